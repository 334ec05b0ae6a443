"""Documents longer than a replica's share of a step: runs that split them over replicas train the
same as runs that do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.layouts import further
from megatron_lm_runs import BOTH, DP2, EXPERTS, launch, validations
from trainer_runs import TINY, Flags, evaluations, finish, losses, read_metrics, start

from megatron_wlb.data.corpus import build_corpus

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


@pytest.mark.parametrize(
    ("num_processes", "layout"),
    [
        further(2, {"overlap_grad_reduce": True, "use_distributed_optimizer": True}),
        (4, {"pipeline_model_parallel_size": 2, "wlb_verify_shapes": True}),
    ],
    ids=["dp2", "pp2-dp2"],
)
def test_run_that_merges_has_the_losses_of_one_that_does_not(
    num_processes: int, layout: Flags, corpus: Path, tmp_path: Path
) -> None:
    flags = TINY | SLICES | layout | on(corpus)
    merged = start(tmp_path, num_processes, flags | {"wlb_metrics": "merged"}, fault=tell_groups)
    assert finish(merged).output.count("together: [2]") == num_processes
    alone = start(
        tmp_path, num_processes, flags | OFF | {"wlb_metrics": "alone"}, fault=tell_groups
    )
    assert "together" not in finish(alone).output
    expected = losses(tmp_path / "alone")
    assert len(expected) == NUM_STEPS and expected[NUM_STEPS] < expected[1]
    assert losses(tmp_path / "merged") == pytest.approx(expected, rel=ROUNDING)
    evaluated = evaluations(tmp_path / "alone")
    assert len(evaluated) == 2
    assert evaluations(tmp_path / "merged") == pytest.approx(evaluated, rel=ROUNDING)
    for name in ("tokens", "targets"):
        counts = [
            [line[name] for line in read_metrics(tmp_path / run) if name in line]
            for run in ("merged", "alone")
        ]
        assert counts[0] == counts[1]


@pytest.mark.launcher
@pytest.mark.parametrize("model", [further({}), EXPERTS | {"expert_model_parallel_size": 2}])
def test_launcher_merges_as_the_embedded_trainer(
    model: Flags, corpus: Path, tmp_path: Path
) -> None:
    """With all that overlaps communication."""
    flags = BOTH | DP2 | SLICES | on(corpus) | model
    flags |= {"overlap_grad_reduce": True}
    only = {"overlap_param_gather": True, "wlb_metrics": "launched"}
    launched = finish(launch(tmp_path, 2, flags | only, fault=tell_groups))
    assert launched.output.count("together: [2]") == 2
    finish(start(tmp_path, 2, flags | OFF | {"wlb_metrics": "embedded"}))
    merged = [line["merged_documents"] for line in read_metrics(tmp_path / "launched")]
    alone = [
        line["merged_documents"] for line in read_metrics(tmp_path / "embedded") if "lr" in line
    ]
    assert any(merged) and not any(alone)
    for number in merged:
        assert f"| merged: {number} documents | tokens: " in launched.output
    expected = losses(tmp_path / "embedded")
    assert losses(tmp_path / "launched") == pytest.approx(expected, rel=ROUNDING)
    evaluated = evaluations(tmp_path / "embedded")
    found = [float(loss) for loss in validations(launched)]
    assert found[: len(evaluated)] == pytest.approx(evaluated, rel=ROUNDING)
