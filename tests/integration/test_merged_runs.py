"""Documents longer than a replica's share of a step: runs that split them over replicas train the
same as runs that do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.layouts import further
from megatron_lm_runs import BOTH, DP2, EXPERTS, PP2, launch, validations
from rank_runs import Flags, finish, losses, read_metrics

from megatron_wlb.data.build_corpus import build_corpus

pytestmark = pytest.mark.launcher

ROUNDING = 1e-5
"""Relative, of losses: fp32 sums of a thousand token losses in other orders, over some updates."""
NUM_STEPS = 6
SLICES: Flags = {
    "wlb_packing": "slim",
    "wlb_long_documents": "slice",
    "wlb_units": 6,
    "wlb_slice_multiple": 16,
    "eval_interval": 3,
    "eval_iters": 2,
    "split": "80,20,0",
    "lr": 1e-2,
    "train_iters": NUM_STEPS,
}
OFF: Flags = {"wlb_dp_merge": "off"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of up to 200 bytes, and each tenth one several windows long."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.RandomState(5)
    with (folder / "a.jsonl").open("w") as stream:
        for number in range(120):
            length = generator.randint(600, 1000) if number % 10 == 0 else generator.randint(5, 200)
            words = generator.choice(["ab", "cde", "fgh ", "the ", "sun ", "x. "], length)
            stream.write(json.dumps({"text": "".join(words)[:length]}) + "\n")
    build_corpus([folder / "a.jsonl"], folder / "a")
    # Mostly attention, so that a long document outweighs all others of a step.
    (folder / "a.cost").write_text(
        '{"forward_linear_us": 1.0, "forward_quadratic_us": 0.02, '
        '"backward_linear_us": 2.0, "backward_quadratic_us": 0.05}'
    )
    return folder / "a"


def on(corpus: Path) -> Flags:
    return {"data_path": corpus, "wlb_cost": corpus.with_suffix(".cost")}


def tell_groups() -> None:
    """Makes a rank print how many replicas run documents together."""
    from megatron_wlb.runtime.stepping import step

    right = step.open_groups

    def told(groups, sizes, *rest):
        sys.stdout.write(f"together: {sizes}\n")
        sys.stdout.flush()
        return right(groups, sizes, *rest)

    step.open_groups = told


OVERLAPPED: Flags = DP2 | {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("num_processes", "layout"),
    [
        further(2, OVERLAPPED),
        further(2, OVERLAPPED | EXPERTS | {"expert_model_parallel_size": 2}),
        (4, PP2 | {"wlb_verify_shapes": True}),
    ],
    ids=["dp2", "ep2", "pp2-dp2"],
)
def test_run_that_merges_has_the_losses_of_one_that_does_not(
    num_processes: int, layout: Flags, corpus: Path, tmp_path: Path
) -> None:
    flags = BOTH | SLICES | layout | on(corpus)
    both = flags | {"wlb_metrics": "merged"}, flags | OFF | {"wlb_metrics": "alone"}
    merged, alone = (
        finish(launch(tmp_path, num_processes, one, fault=tell_groups)) for one in both
    )
    assert merged.output.count("together: [2]") == num_processes
    assert "together" not in alone.output
    expected = losses(tmp_path / "alone")
    assert len(expected) == NUM_STEPS and expected[NUM_STEPS] < expected[1]
    assert losses(tmp_path / "merged") == pytest.approx(expected, rel=ROUNDING)
    evaluated = [[float(loss) for loss in validations(run)] for run in (merged, alone)]
    assert len(evaluated[0]) > 1 and evaluated[0] == pytest.approx(evaluated[1], rel=ROUNDING)
    lines = [[*read_metrics(tmp_path / name)] for name in ("merged", "alone")]
    for name in ("tokens", "targets"):
        assert [line[name] for line in lines[0]] == [line[name] for line in lines[1]]
    told = [line["merged_documents"] for line in lines[0]]
    assert any(told) and not any(line["merged_documents"] for line in lines[1])
    for number in told:
        assert f"| merged: {number} documents | tokens: " in merged.output
