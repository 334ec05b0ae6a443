"""With a sliding window attention costs what pairs in reach do, counted one by one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_wlb.cost import AnalyticModel, DocumentCost, Parallelism, load_hardware
from megatron_wlb.cost.attention_latency import AnalyticAttention, SlidingAttention, pairs_in_reach
from megatron_wlb.cost.document import unseen
from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.fit import Sample, fit_document_cost
from megatron_wlb.cost.shape import ModelShape
from megatron_wlb.cost.step_costs import StageCosts
from megatron_wlb.cost.table import ProfiledCost, Row, check_model, model_identity
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.planning.run import Run
from megatron_wlb.settings.command_line import parse

PLAIN = model_shape(parse(["--num-layers", "4", "--hidden-size", "512"]), 1024)
EVERY = dataclasses.replace(PLAIN, reach_tokens=300)
CPU = load_hardware("cpu")


def mixed(skipped: str, reach_tokens: int = 300) -> ModelShape:
    flags = f"--num-layers 4 --hidden-size 512 --window-size {reach_tokens - 1},0"
    return model_shape(parse([*flags.split(), "--window-attn-skip-freq", skipped]), 1024)


def counted(queries: int, keys: int, reach_tokens: int | None) -> int:
    """Pairs that a mask has."""
    query = np.arange(keys - queries, keys)[:, None]
    key = np.arange(keys)[None]
    seen = key <= query
    if reach_tokens is not None:
        seen &= query - key < reach_tokens
    return int(seen.sum())


@pytest.mark.parametrize("reach", [1, 2, 7, 300])
@pytest.mark.parametrize("length", [1, 5, 7, 8, 299, 300, 301, 1000])
def test_document_costs_half_of_what_a_mask_has(length: int, reach: int) -> None:
    """Half of ``length²`` stands for the causal pairs: it lacks half of each own key."""
    exact = counted(length, length, reach)
    ours = (length**2 - unseen(length, reach)) / 2
    assert exact - ours == min(length, reach) / 2


def test_pairs_of_a_chunk_are_those_of_its_mask() -> None:
    for reach in (1, 3, 8, 40):
        for keys in (1, 3, 8, 9, 33):
            queries = np.arange(1, keys + 1)
            expected = [counted(q, keys, reach) for q in queries.tolist()]
            assert pairs_in_reach(queries, np.full_like(queries, keys), reach).tolist() == expected


def test_measured_table_is_spread_by_the_windows_of_stages() -> None:
    """A table of the model's own times gives each stage its own time at every length."""
    model = AnalyticModel(mixed("2"), Execution(Parallelism(pp_size=4)), CPU)
    whole = model.cost()
    lengths = [64 * 2**n for n in range(8)]
    works = [whole.work([n]) for n in lengths]
    table = ProfiledCost(
        model_identity(mixed("2")), 1, 1,
        tuple(Row(n, w.forward_attention_us, w.backward_attention_us)
              for n, w in zip(lengths, works, strict=True)),
        tuple(Row(n, w.forward_linear_us, w.backward_linear_us)
              for n, w in zip(lengths, works, strict=True)),
    )  # fmt: skip
    spread = StageCosts.spread(table, model).times_us([[64], [8192]])
    assert spread == pytest.approx(StageCosts(model.stage_costs()).times_us([[64], [8192]]))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"forward_unseen_us": 2.0, "reach_tokens": 5}, "forward_unseen_us is 2.0; give at most"),
        ({"backward_unseen_us": 0.5}, "reach_tokens with it"),
        ({"reach_tokens": 0}, "reach_tokens is 0"),
    ],
)
def test_impossible_savings_are_refused(changed: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DocumentCost.from_dict({**DocumentCost(1.0, 1.0, 1.0, 1.0).as_dict(), **changed})


def test_layers_of_another_window_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers reach 300 tokens, but reach_tokens is 7"):
        dataclasses.replace(mixed("2"), reach_tokens=7)


def test_fit_finds_a_windowed_cost_again() -> None:
    cost = DocumentCost(3.0, 0.02, 5.0, 0.05, 40.0, 0.01, 0.025, 300)
    lengths = (64, 128, 256, 512, 1024, 4096)
    samples = [Sample(n, 15 + cost.forward_us(n), 25 + cost.backward_us(n)) for n in lengths]
    fit = fit_document_cost(samples, 300, 0.5)
    assert fit.max_error < 1e-6
    assert fit.cost.document_us(3000) == pytest.approx(cost.document_us(3000), rel=1e-6)
    # Negative control: no quadratic goes through these.
    assert fit_document_cost(samples).max_error > 0.03


def test_flops_are_those_of_pairs_in_reach() -> None:
    shape = mixed("2")
    full, windowed = counted(1000, 1000, None), counted(1000, 1000, 300)
    expected = 4 * 512 * (2 * full + 2 * windowed)
    assert shape.attention_flops(1000) == pytest.approx(expected, rel=0.01)
    linear = shape.linear_flops * 1400
    flops = 3 * (linear + shape.attention_flops(1000) + shape.attention_flops(400))
    assert shape.training_flops([1000, 400]) == flops


def test_latency_of_a_chunk_is_that_of_pairs_in_reach() -> None:
    """Whole tiles of a single token count pairs exactly."""
    exact = AnalyticAttention(4, 64, 1.0, tile=1, row_overhead=0.0)
    pair_us = float(exact.chunk_us(np.array(1), np.array(1))[0])
    for share in (1.0, 0.25):
        sliding = SlidingAttention(exact, 8, share)
        for queries, keys in ((1, 1), (1, 30), (9, 30), (30, 30)):
            forward, backward = sliding.chunk_us(np.array(queries), np.array(keys))
            seen = counted(queries, keys, 8)
            expected = share * seen + (1 - share) * counted(queries, keys, None)
            assert float(forward) == pytest.approx(pair_us * expected)
            assert float(backward) == pytest.approx(2.5 * pair_us * expected)


def test_choice_of_sharding_knows_the_window() -> None:
    """One long document: per sequence is uneven with all keys, and even with a window."""
    lengths = [200] * 40 + [8192]
    of = {
        shape.reach_tokens: Run(shape, Execution(Parallelism(cp_size=4)), CPU, 16384, 4)
        for shape in (PLAIN, EVERY)
    }
    imbalance = {
        reach: run.chooser("per-sequence")(lengths).forward_imbalance for reach, run in of.items()
    }
    assert imbalance[None] > 1.2 > imbalance[300]
    chosen = {reach: run.chooser("adaptive")(lengths) for reach, run in of.items()}
    assert chosen[None].sharding.kind == "per-document"
    assert chosen[300].sharding.kind == "per-sequence"
    # The slowest rank, over an even share of the plain cost: short documents fill few tiles.
    assert 1 < of[300].attention_scale([8192], of[300].chooser("adaptive")([8192])) < 1.5
    assert of[300].flops([8192]) < of[None].flops([8192])


def test_measured_table_is_of_one_window() -> None:
    rows = (Row(64, 1.0, 2.0), Row(128, 2.0, 4.0))
    cost = ProfiledCost(model_identity(EVERY), 1, 1, rows, rows)
    check_model(cost.model, EVERY)
    with pytest.raises(ConfigError, match="reach_tokens 300, but this one has None"):
        check_model(cost.model, PLAIN)
