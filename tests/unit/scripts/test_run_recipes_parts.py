"""How recipes are made small, judged, and told: the parts of ``scripts/run_recipes.py``."""

from __future__ import annotations

import dataclasses
import errno
import os
import shlex
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from _run_recipes import outcome, pages, scaling
from _run_recipes.ranks import run_ranks
from _run_recipes.recipes import Trained, differences
from _run_recipes.results import Results

from megatron_wlb.errors import ConfigError

RECIPE = shlex.split(
    """--num-layers 32 --hidden-size 4096 --num-attention-heads 48 --group-query-attention
    --num-query-groups 8 --ffn-hidden-size 16384 --kv-channels 128 --seq-length 4096
    --max-position-embeddings 8192 --micro-batch-size 4 --global-batch-size 256 --train-iters 50
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --swiglu --bf16 --fp8-format hybrid --save there --vocab-file words --lr-decay-iters 9000
    --data-path 0.3 /a 0.7 /b --distributed-backend nccl"""
)


def scaled(*more: str, num_devices: int = 8) -> tuple[Any, dict[str, Any]]:
    found = scaling.scale([*RECIPE, *more], num_devices, "/corpus")
    return found, scaling.grouped(found.words)


def test_small_recipe_keeps_ratios_and_flags() -> None:
    found, flags = scaled("--log-params-norm", "--split", "949,50,1")
    heads, groups = (int(flags[f"--num-{name}"][0]) for name in ("attention-heads", "query-groups"))
    hidden, ffn, kv = (
        int(flags[f"--{name}"][0]) for name in ("hidden-size", "ffn-hidden-size", "kv-channels")
    )
    assert (heads / groups, ffn / hidden) == (48 / 8, 16384 / 4096)
    assert kv / (hidden / heads) == pytest.approx(128 / (4096 / 48), rel=0.2)
    positions, window = (
        int(flags[f"--{name}"][0]) for name in ("max-position-embeddings", "seq-length")
    )
    assert positions == 2 * window
    assert flags["--train-iters"] == ("3",) and flags["--data-path"] == ("/corpus",)
    for flag in ("--swiglu", "--sequence-parallel", "--log-params-norm", "--recompute-granularity"):
        assert flag in flags
    assert found.num_processes == 4 and found.layout == "TP2 PP2"


def test_every_changed_flag_is_told() -> None:
    """With what it was and what it is; no other flag differs."""
    found, flags = scaled("--wandb-project", "one", "--error-injection-rate", "100")
    given = scaling.grouped([*RECIPE, "--wandb-project", "one"])
    given["--error-injection-rate"] = ("100",)
    told = {change.flag: change for change in found.changes}
    differing = {flag for flag in given.keys() | flags.keys() if given.get(flag) != flags.get(flag)}
    assert told.keys() == differing
    assert (told["--fp8-format"].before, told["--fp8-format"].after) == ("hybrid", "")
    assert told["--fp8-format"].kind == "needs a GPU" and told["--bf16"].kind == "fp32"
    change = {c.flag: c for c in scaled("--cross-entropy-fusion-impl", "te")[0].changes}
    assert change["--cross-entropy-fusion-impl"].after == "native"
    assert told["--data-path"].before == "0.3 /a 0.7 /b"
    assert told["--error-injection-rate"].kind == "faults"


@pytest.mark.parametrize(
    ("tp", "pp", "cp", "num_devices", "layout", "reduced"),
    [
        (1, 1, 1, 8, "DP4", False),
        (1, 2, 1, 8, "PP2 DP2", False),
        (8, 1, 1, 8, "TP4", True),
        (2, 2, 2, 8, "PP2 CP2", True),
        (4, 2, 1, 8, "TP2 PP2", True),
        (1, 1, 1, 1, "one process", False),
    ],
)
def test_layout_loses_replicas_first_and_then_halves_the_largest(
    tp: int, pp: int, cp: int, num_devices: int, layout: str, reduced: bool
) -> None:
    flags = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    flags += ["--context-parallel-size", str(cp)]
    found, _ = scaled(*flags, num_devices=num_devices)
    assert found.layout == layout
    assert any(change.kind == "layout" for change in found.changes) == reduced


@pytest.mark.parametrize(
    ("flags", "num_layers"),
    [
        (["--num-layers-per-virtual-pipeline-stage", "2"], 2 * 2 * 2),
        (["--num-virtual-stages-per-pipeline-rank", "3"], 2 * 3),
        (["--decoder-first-pipeline-num-layers", "3"], 3 + 1),
        (["--account-for-embedding-in-pipeline-split"], 2 - 1 + 2),
        (["--pipeline-model-parallel-layout", "Et*20|t*12L"], 32),
    ],
)
def test_layers_fill_the_stages_that_the_recipe_has(flags: list[str], num_layers: int) -> None:
    assert scaled(*flags)[1]["--num-layers"] == (str(num_layers),)


def trained() -> Any:
    return Trained((6.5, 6.25), (2.0, 1.5), ([[0, 4, 0, 9]], [[0, 2, 0, 7]]))


def test_rounding_is_equal_and_more_is_not() -> None:
    one = trained()
    rounded = dataclasses.replace(one, losses=(6.5 * (1 + 5e-7), 6.25), norms=(2.0, 1.50005))
    assert differences(rounded, one) == []
    (line,) = differences(dataclasses.replace(one, losses=(6.5, 6.2501)), one)
    assert line == "step 2: loss 6.2501, of one process 6.25"
    (line,) = differences(dataclasses.replace(one, norms=(2.001, 1.5)), one)
    assert line.startswith("step 1: gradient norm")
    not_a_number = dataclasses.replace(one, losses=(float("nan"), 6.25))
    assert differences(not_a_number, not_a_number)
    (line,) = differences(dataclasses.replace(one, documents=([[0, 4, 0, 9]], [])), one)
    assert line == "step 2: other documents"


def results_of(version: str = "0.18.2", packing: str = "hold") -> Any:
    command = ["--bf16", "--wlb-packing", packing, "--wlb-max-step-tokens", "0"]
    refused = "--fim-data does not work with --wlb-packing: it rewrites; leave it out"
    changes = [{"flag": "--fp8-format", "before": "hybrid", "after": "", "kind": "needs a GPU"}]
    some = [
        outcome.Outcome("a", outcome.EQUAL, layout="TP2", changes=changes, command=command),
        outcome.Outcome("b", outcome.REFUSED, why=[refused]),
        outcome.Outcome("c", outcome.NO_TRAINING),
        outcome.Outcome("d", outcome.FAILED, why=["TP2: rank 1 ended with 1"]),
        outcome.Outcome("e", outcome.UNFIT),
    ]
    return Results("gpt", version, {one.recipe: one for one in some})


def test_results_go_on_where_they_were_but_for_failures(tmp_path: Path) -> None:
    results, path = results_of(), tmp_path / "new" / "results.json"
    assert str(results.counts) == (
        "4 of 5 recipes train; 3 are accepted, 2 fit, 1 ran, 1 equals one process"
    )
    results.write(path)
    again = Results("gpt", "0.18.2")
    again.resume(path)
    assert again.outcomes == {k: one for k, one in results.outcomes.items() if k != "d"}
    with pytest.raises(ConfigError, match=r"results of gpt 0\.18\.2, these recipes are gpt 0\.19"):
        Results("gpt", "0.19.2").resume(path)
    path.write_text('{"kind": "gpt"}')
    with pytest.raises(
        ConfigError, match=r"has no results of recipes \(recipes .*\); give a file that --out"
    ):
        again.resume(path)


def test_pages_hold_the_results_that_are_given_and_no_others(tmp_path: Path) -> None:
    page = tmp_path / pages.PAGE
    page.write_text(f"# Page of {{runs}}\n\n{pages.BEGIN}\n{pages.END}\n\nEnd.\n")
    pages.write([results_of("0.18.2")], tmp_path)
    pages.write([results_of("0.19.2", "slim"), results_of("0.19.2")], tmp_path)
    written = page.read_text()
    assert written.startswith("# Page of {runs}\n") and written.endswith("\n\nEnd.\n")
    rows = [line for line in written.splitlines() if line.startswith("| gpt ")]
    assert rows == [f"| gpt 0.19.2 | `{p}` | 5 | 4 | 3 | 2 | 1 | 1 |" for p in ("hold", "slim")]
    assert [line for line in written.splitlines() if line.startswith("## ")] == [
        "## gpt 0.19.2, hold", "## gpt 0.19.2, slim",
    ]  # fmt: skip
    assert "| `a` | equal | TP2 | needs a GPU; without `--fp8-format` |  |" in written
    assert "`--fim-data` does not work with `--wlb-packing`" in written
    page.write_text("# Page\n")
    with pytest.raises(ConfigError, match="has no place for results"):
        pages.write([results_of()], tmp_path)


def hang_with_a_child() -> int:
    """Rank 1 hangs, and so does what it has started."""
    if os.environ["RANK"] == "0":
        return 0
    child = os.fork()
    if child:
        Path("child").write_text(str(child))
    signal.pause()
    return 0


def fail() -> int:
    if os.environ["RANK"] == "1":
        sys.stdout.write("this is why\n")
        return 3
    signal.pause()
    return 0


def test_processes_end_at_the_limit_and_with_the_first_that_fails(tmp_path: Path) -> None:
    ended = run_ranks(hang_with_a_child, 2, tmp_path, limit_s=2.0, environment={})
    assert ended.why == "no end after 2 s"
    child = Path("/proc", (tmp_path / "child").read_text())
    stop_s = time.monotonic() + 20
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < stop_s, "what a rank had started is left"
        time.sleep(0.05)
    ended = run_ranks(fail, 2, tmp_path, limit_s=60.0, environment={})
    assert (ended.why, ended.tail) == ("rank 1 ended with 3", "this is why")


def meet() -> int:
    """Ranks meet in the store, whose port nobody else can take."""
    import torch.distributed as dist

    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        except OSError as error:
            assert error.errno == errno.EADDRINUSE
        else:
            return 3
    dist.init_process_group("gloo")
    dist.barrier()
    return 0


def test_port_is_taken_before_any_rank_is_told_of_it(tmp_path: Path) -> None:
    ended = run_ranks(meet, 2, tmp_path, limit_s=60.0, environment={})
    assert ended.why == "", ended.tail


EXPERTS = shlex.split(
    """--num-experts 64 --expert-model-parallel-size 8 --moe-router-topk 1
    --moe-aux-loss-coeff 1e-4 0
    --moe-z-loss-coeff 0 --moe-layer-freq ([0]*3+[1]*29) --moe-grouped-gemm --optimizer dist_muon
    --moe-router-load-balancing-type sinkhorn"""
)


@pytest.mark.parametrize(
    ("layout", "ep", "etp"),
    [
        ((2, 2), "2", ("1",)),  # two processes a stage
        ((2, 1), "4", ("1",)),
        ((1, 1), "4", None),
        ((4, 1), "4", ("1",)),
    ],
)
def test_experts_are_few_and_their_losses_and_layers_count(
    layout: tuple[int, int], ep: str, etp: tuple[str] | None
) -> None:
    sizes = zip(("tensor", "pipeline"), layout, strict=True)
    given = [f"--{name}-model-parallel-size={size}" for name, size in sizes]
    found, flags = scaled(*EXPERTS, *given)
    num_layers = int(flags["--num-layers"][0])
    assert flags["--moe-layer-freq"] == (f"[0]+[1]*{num_layers - 1}",)
    assert (flags["--num-experts"], flags["--expert-model-parallel-size"]) == (("8",), (ep,))
    assert flags.get("--expert-tensor-parallel-size") == etp
    assert flags["--moe-aux-loss-coeff"] == ("0.5", "0.5") and flags["--moe-z-loss-coeff"] == ("0",)
    assert flags["--moe-router-load-balancing-type"] == ("none",)
    assert flags["--moe-router-score-function"] == ("sigmoid",)
    assert "--moe-grouped-gemm" not in flags and flags["--optimizer"] == ("adam",)
    kinds = {change.flag: change.kind for change in found.changes}
    assert kinds["--moe-router-load-balancing-type"] == "routing"
    assert kinds["--optimizer"] == "needs a package"
    assert "--expert-model-parallel-size" not in scaling.grouped(found.alone)
