"""The report of one GPU, in its tiny form on a CPU: what it leaves behind, how it is cut off."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_wlb.cost import load_hardware

PROJECT = Path(__file__).parents[2]
PARTS = [
    "environment", "tests", "kernels", "profile", "context_parallel", "stage", "launcher",
    "replay", "host", "smoke_training",
]  # fmt: skip


def report(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PROJECT / "scripts" / "gpu_report"), *arguments],
        capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one start leaves behind."""
    folder = tmp_path_factory.mktemp("report") / "gpu"
    before = (PROJECT / "docs" / "results" / "gpu.md").read_text()
    # Limits are for GPUs: what a busy CPU takes is not the question.
    done = report("--tiny", "--out", str(folder), "--parts", ",".join(PARTS), "--limit", "800")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in PARTS:
        log = folder / f"{name}.log"
        assert f"{name}: done after" in done.stdout, done.stdout + log.read_text()
    assert (PROJECT / "docs" / "results" / "gpu.md").read_text() == before
    return folder


def figures(out: Path, part: str) -> dict[str, Any]:
    content = json.loads((out / f"{part}.json").read_text())
    assert content["tiny"] is True and content["status"] == "done" and content["seconds"] > 0
    found: dict[str, Any] = content["figures"]
    return found


def test_each_part_of_the_report_leaves_its_figures(out: Path) -> None:
    assert any(one["area"] == "kernel" for one in figures(out, "environment")["findings"])
    tests = figures(out, "tests")
    assert tests["errors"] == [] and set(tests["counts"]) == {"skipped"}
    assert len(tests["outcomes"]) == tests["counts"]["skipped"] > 30
    kernels = figures(out, "kernels")
    assert kernels["flash-attn-2, tiny"]["obstacle"]
    for name in ("torch-cpu", "sdpa"):
        assert 0 < max(kernels[f"{name}, tiny"]["errors"].values()) <= 2
        speeds = kernels[f"{name}, tiny, 131072"]
        assert speeds["documents"] > 1
        assert min(speeds[kind]["tflops"] for kind in ("packed", "one by one")) > 0
    (profile,) = load_hardware(str(out / "profile" / "hardware.yaml")).attention
    assert (profile.num_heads, profile.dtype) == (1, "bfloat16")
    for case in (one for one in figures(out, "context_parallel").values() if type(one) is dict):
        assert set(case["latency_us"]) > {"per-sequence", "per-document", "adaptive", "hybrid"}
    launcher = figures(out, "launcher")
    assert len(launcher["uneven documents, slim"]) == 6
    assert all(step["ms"] > 0 < step["tokens"] for step in launcher["uneven documents, slim"])
    replay = figures(out, "replay")
    assert {key.partition(",")[0] for key in replay} == {"figure-12", "figure-13", "figure-14"}
    assert all(row["value"] > 0 for rows in replay.values() for row in rows)
    host = figures(out, "host")
    assert all(0 < one["busy_us"] <= one["whole_us"] for one in host["steps"])
    assert host["memory"][-1]["reserved_bytes"] > 0
    losses = figures(out, "smoke_training")
    assert losses["slim, cpu"] == losses["slim, fp32"] and len(losses["slim, cpu"]) == 2


def test_page_of_a_tiny_report_never_looks_like_a_gpu_s(out: Path) -> None:
    page = (out / "gpu.md").read_text()
    assert "**This is the tiny form on a CPU" in page and "Measured on" not in page
    headings = re.findall(r"^Done in .*$", page, re.MULTILINE)
    assert len(headings) == len(PARTS) and all("tiny form on a CPU" in one for one in headings)
    pictures = re.findall(r"!\[(.*)\]\((.*)\)", page)
    assert len(pictures) >= 6
    for title, path in pictures:
        assert title.startswith("Tiny, on a CPU: ")
        assert (out / path).read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_report_goes_on_where_it_stopped_and_kills_what_overruns(out: Path, tmp_path: Path) -> None:
    kept = (out / "environment.json").read_bytes()
    parts = ["--tiny", "--parts", "environment", "host"]
    again = report(*parts, "--out", str(out), "--minutes", "0.01")
    assert again.returncode == 0 and "environment: done before" in again.stdout
    assert (out / "environment.json").read_bytes() == kept
    # Less than it takes to import torch: both are killed, one after the other.
    cut = report(*parts, "--out", str(tmp_path), "--limit", "0.2")
    assert cut.returncode == 0, cut.stderr
    for name in ("environment", "host"):
        assert f"{name}: cut off after" in cut.stdout
        assert json.loads((tmp_path / f"{name}.json").read_text())["status"] == "cut off"
    assert (tmp_path / "gpu.md").read_text().count("killed at its limit of 0.2 s") == 2
    # Limits that no longer fit: nothing is started, and the page in the docs stays.
    before = (PROJECT / "docs" / "results" / "gpu.md").read_text()
    none = report(*parts, "--out", str(tmp_path / "new"), "--minutes", "0.1")
    assert none.stdout.count("not started") == 2
    assert not list((tmp_path / "new").glob("*.json"))
    assert (PROJECT / "docs" / "results" / "gpu.md").read_text() == before


def test_wrong_figures_fail_the_command_and_are_told(tmp_path: Path) -> None:
    losses = {"slim, cpu": [5.0, 4.0], "slim, fp32": [5.0, 4.1]}
    content = {"part": "smoke_training", "status": "done", "why": "", "tiny": False,
               "machine": "NVIDIA Any", "seconds": 60.0, "figures": losses}  # fmt: skip
    (tmp_path / "smoke_training.json").write_text(json.dumps(content))
    done = report("--page", "--out", str(tmp_path), "--docs", str(tmp_path / "docs"))
    assert done.returncode == 1
    assert "WRONG  smoke_training: slim in fp32: losses are off the CPU's by 0.025" in done.stdout
    page = (tmp_path / "docs" / "gpu.md").read_text()
    assert "Measured on: NVIDIA Any" in page and "**Wrong:** slim in fp32" in page
    assert "tiny form" not in page.lower().split("## how")[0]


def test_full_report_without_a_gpu_is_refused(tmp_path: Path) -> None:
    done = report("--out", str(tmp_path))
    assert done.returncode == 2 and done.stderr.startswith("error: torch sees no GPU, which tests")
    assert "--tiny" in done.stderr
    (tmp_path / "host.json").write_text("{}")
    done = report("--page", "--out", str(tmp_path))
    assert done.returncode == 2 and "is no result of the report" in done.stderr


def test_page_in_the_docs_is_the_one_that_the_command_makes(tmp_path: Path) -> None:
    """Of the results beside it, with their notes."""
    recorded = PROJECT / "docs" / "results" / "gpu-h100"
    done = report("--page", "--out", str(recorded), "--docs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "gpu.md").read_text()
    assert page == (PROJECT / "docs" / "results" / "gpu.md").read_text()
    assert "Measured on: NVIDIA H100" in page and "## Beside the report" in page
    for picture in (tmp_path / "images").iterdir():
        assert (PROJECT / "docs" / "results" / "images" / picture.name).exists()


def test_page_without_results_says_so(tmp_path: Path) -> None:
    done = report("--page", "--out", str(tmp_path), "--docs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "**There are no measured figures yet.**" in (tmp_path / "gpu.md").read_text()
