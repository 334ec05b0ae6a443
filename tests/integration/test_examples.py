"""The programs of ``scripts/examples``, as a user starts them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rank_runs import ROOT, finish, spawn

SLIM = ["--wlb-packing", "slim", "--wlb-slice-multiple", "8"]


def grpo(folder: Path, num_processes: int, *flags: str) -> list[str]:
    """What each iteration says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_processes}", str(ROOT / "scripts/examples/grpo.py")]
    said = finish(spawn(folder, [*command, *flags])).output.replace("-0.0000", "0.0000")
    return re.findall("^iteration .*", said, re.MULTILINE)


def test_grpo_is_the_same_over_replicas_and_slices(tmp_path: Path) -> None:
    alone = grpo(tmp_path, 1, "--iterations", "3")
    assert len(alone) == 3
    assert grpo(tmp_path, 2, "--iterations", "3", *SLIM) == alone


def test_grpo_learns(tmp_path: Path) -> None:
    few = ["--longest", "10", "--prompts", "4", "--lr", "0.006"]
    said = grpo(tmp_path, 1, "--iterations", "24", *few)
    rewards = [float(re.search(r"reward ([\d.]+)", line).group(1)) for line in said]
    assert max(rewards[:3]) < 0.12 < min(rewards[-3:])


def test_grpo_runs_with_slices_in_a_pipeline(tmp_path: Path) -> None:
    flags = ["--iterations", "1", "--longest", "6", "--pipeline-model-parallel-size", "2", *SLIM]
    (said,) = grpo(tmp_path, 2, *flags)
    first, second = map(float, said.split("losses ")[1].split())
    assert first == 0 and second != 0


def test_grpo_is_the_same_where_responses_share_their_prompt(tmp_path: Path) -> None:
    flags = ["--iterations", "2", "--longest", "6", "--prompt", "120"]
    flags += ["--max-position-embeddings", "128", "--wlb-max-tokens", "2048"]
    said = [grpo(tmp_path, 1, *flags, *more) for more in ([], ["--share"])]
    ran = [[int(re.search(r"ran (\d+)", line).group(1)) for line in own] for own in said]
    assert all(less < 0.3 * whole for whole, less in zip(*ran, strict=True))
    whole, shared = ([re.sub(r" ran \d+", "", line) for line in own] for own in said)
    assert whole == shared
