"""Megatron-LM's own ``pretrain_gpt.py`` on plans computes what the embedded trainer does, which is
held against documents that run alone: from the first weights on, with the same seed and layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers.texts import write_texts
from megatron_lm_runs import (
    BOTH,
    CP2,
    DP2,
    FOCAL,
    LATENT,
    LAYOUTS,
    PP2,
    PP2_VPP2,
    SLICES,
    TP2_SP,
    Flags,
    launch,
    logged,
    validations,
)
from trainer_runs import evaluations, finish, losses, read_metrics, start

pytestmark = pytest.mark.launcher

ROUNDING = 1e-6
"""Relative, of losses: fp32 sums of a thousand token losses, summed in another order."""
NUM_STEPS = 4
SELECTIVE: Flags = {"recompute_granularity": "selective"}
EVALUATED: Flags = {"eval_interval": 2, "eval_iters": 2}
UNMERGED: Flags = SLICES | {"wlb_dp_merge": "off"}
TIGHT: Flags = {"wlb_memory_gib": 0.002}
"""Less than some steps need, unless they recompute."""
HOSTED: Flags = TIGHT | {"wlb_host_gib": 1}


@dataclass(frozen=True)
class Case:
    processes: int
    flags: Flags
    launched: Flags = field(default_factory=dict)
    """What the launcher is told besides, and the embedded trainer does not have or do."""
    is_long: bool = False


CASES = {
    **{
        f"original-{name}": Case(num, layout, is_long=name != "dp2")
        for name, (num, layout) in LAYOUTS.items()
    },
    "original-evaluated": Case(2, PP2 | EVALUATED),
    "two-windows": Case(1, {"micro_batch_size": 2}),
    "windows-slices": Case(
        2, PP2 | SLICES | {"window_size": "19,0", "window_attn_skip_freq": "([1]+[0])*2"}
    ),
    "latents-tp2-sp": Case(2, TP2_SP | LATENT | SELECTIVE, is_long=True),
    "latents-slices": Case(2, PP2 | LATENT | {"wlb_packing": "slim"}),
    "prediction": Case(1, {"mtp_num_layers": 2, "wlb_packing": "hold"} | EVALUATED),
    "slices": Case(1, UNMERGED | EVALUATED, TIGHT),
    "slices-pp2-dp2": Case(
        4,
        PP2 | DP2 | UNMERGED | {"overlap_grad_reduce": True},
        {"overlap_param_gather": True},
        is_long=True,
    ),
    "slices-cp2-divided": Case(2, CP2 | UNMERGED | {"wlb_slice_cache": "divided"}),
    "slices-pp2-vpp2": Case(2, PP2_VPP2 | UNMERGED | EVALUATED, TIGHT, is_long=True),
    "slices-hosted": Case(2, PP2_VPP2 | UNMERGED | EVALUATED, HOSTED),
    "slices-uneven": Case(
        4, PP2 | DP2 | UNMERGED | {"num_layers": 6, "decoder_last_pipeline_num_layers": 2}
    ),
    "own-loss-slices": Case(2, PP2 | SLICES | {"wlb_loss": "mine.py", "wlb_max_step_tokens": 0}),
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("texts")
    first = write_texts(folder / "a", 400, 4.0, 1.3, least=1, most=1000)
    return [first, write_texts(folder / "b", 100, seed=12)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.long] * case.is_long)
        for name, case in CASES.items()
    ],
)
def test_launcher_trains_as_the_embedded_trainer(
    case: Case, corpora: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(FOCAL)
    blend = [0.8, corpora[0], 0.2, corpora[1]] if case is CASES["original-dp2"] else corpora[0]
    flags = BOTH | {"wlb_packing": "original", "train_iters": NUM_STEPS, "seed": 7} | case.flags
    flags |= {"data_path": blend}
    ours = flags | case.launched | {"wlb_metrics": "launched"}
    launched = finish(launch(tmp_path, case.processes, ours))
    finish(start(tmp_path, case.processes, flags | {"wlb_metrics": "embedded"}))
    expected = losses(tmp_path / "embedded")
    assert len(expected) == NUM_STEPS
    assert losses(tmp_path / "launched") == pytest.approx(expected, rel=ROUNDING)
    evaluated = evaluations(tmp_path / "embedded")
    assert len(evaluated) == (2 if "eval_interval" in flags else 0)
    # Megatron-LM evaluates once more at the end: the same documents, by the same weights.
    found = [float(loss) for loss in validations(launched)]
    assert found[: len(evaluated)] == pytest.approx(evaluated, rel=ROUNDING)
    again, hosted = (
        sum(line.get(name, 0) for line in read_metrics(tmp_path / "launched"))
        for name in ("recomputed_tokens", "hosted_tokens")
    )
    assert (hosted > 0) == (case.launched is HOSTED)
    assert (again > 0) == (case.launched is TIGHT) or hosted > 0
    for depth in range(1, flags.get("mtp_num_layers", 0) + 1):
        # In seven digits; Megatron counts the first one in the second again.
        steps = [line for line in read_metrics(tmp_path / "embedded") if "loss" in line]
        theirs = [line[f"mtp_{depth}_loss"] for line in steps[2:]]
        said = [float(loss) for loss in logged(launched, f"mtp_{depth} loss")][2:]
        assert said == pytest.approx(theirs, rel=2e-6)
