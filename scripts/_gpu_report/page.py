"""The page of the results: ``gpu.md`` and its pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _sections import wrapped

from _gpu_report import results
from _gpu_report.drawing import TINY, Pictures, table
from _gpu_report.parts import PARTS
from megatron_wlb.files import write_text
from megatron_wlb.reading import read_text

PAGE, NOTES = "gpu.md", "notes.md"
NOTHING = "**There are no measured figures yet.** One command makes the figures, and this page."
TINY_WARNING = (
    f"**This is the {TINY}.** It shows that the command works. Sizes are hundreds of times smaller "
    "and the kernels are others."
)
WHEELS = "megatron-core psutil rich markdown-it-py mdurl Pygments"
"""What a machine with torch, numpy, matplotlib, pyyaml, tqdm, pytest and hypothesis lacks."""


def found_in(out: Path) -> dict[str, dict[str, Any]]:
    """The results that are there, by part in their order."""
    read = {name: results.read(out / f"{name}.json") for name in PARTS}
    return {name: one for name, one in read.items() if one is not None}


def make(found: Mapping[str, Mapping[str, Any]], docs: Path, out: Path) -> Path:
    """Writes the page and its pictures below ``docs``; the page's path.

    What stands in ``notes.md`` of the results is on it too.
    """
    docs.mkdir(parents=True, exist_ok=True)
    path, notes = docs / PAGE, out / NOTES
    said = read_text(notes).splitlines() if notes.exists() else []
    lines = map(wrapped, _lines(found, docs / "images", said))
    write_text(path, "\n".join(lines) + "\n")
    return path


def _lines(found: Mapping[str, Mapping[str, Any]], images: Path, notes: Sequence[str]) -> list[str]:
    tiny = any(one["tiny"] for one in found.values())
    text = ["# What one GPU says", ""]
    if tiny:
        text += [TINY_WARNING, ""]
    elif found:
        machines = dict.fromkeys(str(one.get("machine", "")) for one in found.values())
        text += [f"Measured on: {'; '.join(machines)}. Do not edit this page by hand: "
                 "`scripts/gpu_report` makes it.", ""]  # fmt: skip
    else:
        text += [NOTHING, ""]
    if found:
        text += _summary(found)
    if notes:
        text += ["## Beside the report", "", *notes, ""]
    text += _how()
    for name, one in found.items():
        part = PARTS[name]
        text += ["", f"## {part.title}", "", *_state(one)]
        for line in part.wrong(one["figures"]):
            text.append(f"- **Wrong:** {line}")
        if one["figures"]:
            # Figures of a form or machine of its own never pass for another's.
            text += ["", *part.lines(one["figures"], Pictures(images, bool(one["tiny"])))]
    return text


def _state(one: Mapping[str, Any]) -> list[str]:
    how = f"{one['status'].capitalize()} in {one['seconds'] / 60:.1f} minutes"
    if one["status"] != "done":
        # A part that was at work when its machine was taken away says so itself.
        how = {"running": "Did not come to its end"}.get(one["status"], how)
        how += f": {one['why']}" if one.get("why") else ""
        how += ". What it had found by then is below" if one["figures"] else ""
    form = f" ({TINY})" if one["tiny"] else ""
    return [f"{how}{form}."]


def _summary(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for name, part in PARTS.items():
        one = found.get(name)
        status = "not run" if one is None else one["status"]
        if one is not None and part.wrong(one["figures"]):
            status += ", **wrong**"
        rows.append([part.title, part.tells, status])
    return [*table(["part", "what it tells", "state"], rows), ""]


def _how() -> list[str]:
    minutes = sum(part.limit_s for part in PARTS.values()) / 60
    rows = [
        [f"`{name}`", part.tells, f"{part.limit_s / 60:.0f} min",
         ", ".join(["a GPU"] * part.needs_gpu + [f"`{other}`" for other in part.after])]
        for name, part in PARTS.items()
    ]  # fmt: skip
    return [
        "## How to make it",
        "",
        "```bash",
        "scripts/gpu_report                            # all parts, then this page",
        "scripts/gpu_report --minutes 9                # as much as fits; start it again to go on",
        "scripts/gpu_report --parts kernels,profile    # some parts; --again redoes them",
        "scripts/gpu_report --page                     # the page alone, from results that exist",
        "scripts/gpu_report --tiny --out /tmp/report   # on a CPU: does the command work?",
        "```",
        "",
        "It needs one GPU of compute capability 8.0 or later with 40 GB, a checkout of this "
        "project, and no network. It takes the Python that is there, 3.12 or later "
        "(`PYTHON=/path/to/python3` names one), and installs nothing. Where `MEGATRON_LM_PATH` "
        "names a checkout of Megatron-LM, that one's `pretrain_gpt.py` runs. Results go to "
        "`runs/gpu`, one JSON file a part, written as they come. A part that is done is not done "
        "again, and one that was cut off goes on where it was. The limits below add up to "
        f"{minutes:.0f} minutes; most parts end earlier. The exit status is 1 only if something "
        "was computed wrong.",
        "",
        *table(["part", "what it tells", "at most", "needs"], rows),
        "",
        "### Several ranks on one GPU",
        "",
        "Three parts run several processes on one GPU, over NCCL. Where time is short:",
        "",
        "```bash",
        "pip download --no-deps nvidia-nccl-cu13==2.30.7",
        "unzip -j nvidia_nccl*.whl '*/libnccl.so.2'",
        "scripts/gpu_report --parts probe,ranks --limit-s 400 --nccl libnccl.so.2",
        "scripts/gpu_report --parts pipeline --limit-s 480 --nccl libnccl.so.2",
        "```",
        "",
        "NCCL 2.30 is the first that lets ranks share a GPU (`NCCL_MULTI_RANK_GPU_ENABLE`, which "
        "it calls experimental). `--nccl` gives its library to the ranks where torch has an older "
        "one. MPS, of NVIDIA's driver, lets the ranks run at once. The report starts a server of "
        "its own and ends it, and changes no setting of the GPU. Without MPS the ranks take turns: "
        "`ranks` then still tells right from wrong, and `pipeline` does not run. `--limit-s` "
        "bounds all parts together. What is at work then is cut off and keeps what it has. A rank "
        "that hangs ends at a limit of its own, with its stacks in the part's log.",
        "",
        "`ranks` compares losses, gradients and weights with one process on the CPU, within "
        "10 times the tolerances of the CPU's tests, and runs some layouts again with "
        "`CUDA_DEVICE_MAX_CONNECTIONS=1`. Without a GPU it runs over gloo. `pipeline` runs "
        "`pretrain_gpt.py` with four stages on a quarter of the SMs each. They share caches and "
        "memory bandwidth, so it says too how much slower a stage is beside the others than alone.",
        "",
        "### Without a network",
        "",
        "The machine has to have torch for CUDA (with Triton), numpy, matplotlib, PyYAML, tqdm, "
        "pytest and Hypothesis. The rest comes as wheels. On a machine with a network, in this "
        "checkout (here for Python 3.12 on x86-64):",
        "",
        "```bash",
        "pip download --dest wheels --no-deps --only-binary=:all: --python-version 3.12 \\",
        "  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \\",
        "  --platform manylinux2014_x86_64 -c constraints.txt \\",
        f"  {WHEELS}",
        "```",
        "",
        "Then bring the checkout and `wheels` to the machine with the GPU:",
        "",
        "```bash",
        "pip install --no-index --no-deps wheels/*.whl",
        "scripts/gpu_report",
        "```",
        "",
        "flash-attn and TransformerEngine make two more kernels. They are built for one version of "
        "torch, so build their wheels with `pip wheel --no-deps --no-build-isolation` where the "
        "same torch is installed ([installing.md](../installing.md)). The report runs without them "
        "and says so. With TransformerEngine, and compute capability 8.9 or later, `tests` runs "
        "those of FP8 too.",
    ]
