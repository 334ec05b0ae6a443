from __future__ import annotations

import numpy as np
import pytest

from megatron_wlb.cost import AnalyticModel, Execution, MemoryModel, ModelShape, load_hardware
from megatron_wlb.cost.document import DocumentCost
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.step_costs import StageCosts, StepCosts
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts, Scheme
from megatron_wlb.strategies.plan.whole_replica import replica_costs

SHAPE = ModelShape(
    1024, 2816, 8, 8, 8, 128, 8192, True, rms_norm=True, linear_bias=False, tied_embeddings=False
)
HARDWARE = load_hardware("a100")


def modelled(text: str, limit_gib: float = 4.0) -> ReplicaCosts:
    p = Scheme.parse(text).parallelism
    memory = MemoryModel(SHAPE, Execution(p, store_ranks=16))
    return replica_costs(AnalyticModel(SHAPE, Execution(p), HARDWARE), memory, limit_gib * GIB)


def test_ranks_have_all_their_chunks_and_overheads_apart() -> None:
    stages = [DocumentCost(0.1 * n, 1e-6 * n, 0.3 * n, 2e-6, 30.0 * n) for n in range(1, 5)]
    costs = ReplicaCosts(Scheme(1, 1, 2, 2), 4096, StepCosts(StageCosts(tuple(stages))))
    found = costs.rank_us([100, 2000])
    for rank in range(2):  # chunk c of rank r is stage c · PP + r
        own = [stages[rank], stages[rank + 2]]
        for at, length in enumerate((100, 2000)):
            assert found[rank, at] == pytest.approx(sum(s.document_us(length) for s in own))
    assert costs.micro_batch_us == pytest.approx(30.0 * (2 + 4))
    assert costs.warm_up == 0.5  # (PP - 1) / VPP


def test_modelled_replica_has_no_reduction_of_its_own() -> None:
    costs = modelled("tp4cp2pp2")
    assert not costs.costs.reduce_us and not costs.costs.update_us
    assert costs.max_tokens % costs.scheme.length_multiple == 0
    assert costs.num_parts == 4 and costs.costs.p2p_us_per_token > 0
    memory = costs.memory
    assert memory is not None
    for rank in range(2):
        assert memory.peak_bytes(rank, [costs.max_tokens] * 4) <= 4 * GIB


def test_more_ranks_take_longer_documents() -> None:
    tokens = [modelled(text).max_tokens for text in ("tp1", "tp2", "tp2pp2", "tp4pp2", "tp8cp2")]
    assert tokens == sorted(tokens) and tokens[-1] > 8 * tokens[0]
    with pytest.raises(ConfigError, match="above the limit"):
        modelled("tp1", 0.5)


def test_what_is_waited_for_is_what_passes_do_not_hide() -> None:
    costs = modelled("tp8")  # 8 layers
    passes_us = np.array([0.0, 50.0, 100.0, 900.0])
    waits = costs.waits_us(np.full(4, 100.0), passes_us)
    assert waits.tolist() == pytest.approx([100.0, 100 - 50 * 7 / 8, 100 / 8, 100 / 8])
