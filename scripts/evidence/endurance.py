#!/usr/bin/env python3
"""The long tests with one command: planned and trained soaks, faults, fuzzing. It takes hours.

Each part is a command of its own, whose result is kept in --out as JSON with the commit, the date,
the machine and the time it took. A part that is there is not run again unless --again is given, so
what was cut off goes on. --page makes a page of all results: what was not run is said.

    scripts/evidence/endurance.py --out runs/endurance --page docs/results/endurance.md
    scripts/evidence/endurance.py --out runs/endurance --parts steps fuzz
    scripts/evidence/endurance.py --out runs/endurance --parts --page docs/results/endurance.md

Fuzzing needs atheris (pip install atheris).
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from _common import parser_of
from _sections import wrapped
from fault_matrix import OUTCOMES
from fuzz import _names as fuzz_targets

from megatron_wlb.errors import run_program
from megatron_wlb.files import write_text
from megatron_wlb.reading import read_text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Part:
    """A command whose result is kept."""

    title: str
    words: tuple[str, ...]
    """Of a script beside this one, and its flags."""
    rows: Callable[[Any], Iterator[Sequence[str]]]
    """The table of a result, its heads first."""
    says: Callable[[Any], str]
    """A result in a sentence."""
    grows: bool = False
    """Whether the script keeps its result in a file itself, and goes on there."""


@dataclass(frozen=True)
class Result:
    """What a part came to."""

    commit: str
    day: str
    machine: str
    seconds: float
    status: int
    found: Any


def _steps(found: Any) -> Iterator[Sequence[str]]:
    yield "packing", "restarts", "documents", "lost", "twice", "MiB, third tenth to end", "wrong"
    for one in found:
        rss = one["rss_mib"]
        name = one["packing"] + (", blend" if one["is_blend"] else "")
        yield (
            name, f"{one['restarts']:,}", f"{one['documents']:,}", str(one["lost"]),
            str(one["twice"]),
            f"{rss[2]:.1f} to {rss[-1]:.1f}", one["refusal"] or "nothing",
        )  # fmt: skip


def _steps_said(found: Any) -> str:
    documents, restarts, lost, twice = (
        sum(one[name] for one in found) for name in ("documents", "restarts", "lost", "twice")
    )
    return f"**{documents:,} documents, {lost} lost, {twice} twice**, over {restarts} restarts."


def _trained(found: Any) -> Iterator[Sequence[str]]:
    yield "steps", "slices", "MiB, third tenth to end", "tensors, second tenth to end", "wrong"
    for one in found:
        rss, tensors = one["rss_mib"], one["tensors"]
        yield (
            f"{one['steps']:,}", f"{one['slices']:,}", f"{rss[2]:.1f} to {rss[-1]:.1f}",
            f"{tensors[1]} to {tensors[-1]}", one["refusal"] or "nothing",
        )  # fmt: skip


def _trained_said(found: Any) -> str:
    (one,) = found
    kept = "a key, a value or a tensor leaked" if one["refusal"] else "no buffer leaked"
    return f"**{one['steps']:,} steps, {one['slices']:,} slices**; {kept}."


def _faults(found: Any) -> Iterator[Sequence[str]]:
    yield "fault", "layout", "outcome", "longest end"
    for one in found:
        ended = "" if one["ended_s"] is None else f"{one['ended_s']:.0f} s"
        yield one["case"], one["layout"], one["outcome"], ended


def _faults_said(found: Any) -> str:
    good = sum(one["outcome"] in OUTCOMES[:2] for one in found)
    return f"**{good} of {len(found)} ended as they should**: resumed equal, or refused clearly."


def _fuzzed(found: Any) -> Iterator[Sequence[str]]:
    yield "target", "executions", "branches", "findings", "error"
    for one in found:
        yield (
            one["target"], f"{one['executions']:,}", str(one["edges"]), str(len(one["findings"])),
            one["error"] or "none",
        )  # fmt: skip


def _fuzzed_said(found: Any) -> str:
    executions = sum(one["executions"] for one in found)
    findings = sum(len(one["findings"]) for one in found)
    return f"**{len(found)} targets, {executions:,} executions, {findings} findings.**"


def _faults_of(seed: int) -> Part:
    words = ("fault_matrix.py", "--trainers", "launcher", "--seed", str(seed), "--minutes", "600")
    title = f"Faults, the launcher, seed {seed}"
    return Part(title, words, _faults, _faults_said, grows=True)


PARTS = {
    "steps": Part("Planned steps", ("soak.py", "--steps", "100000", "--seed", "1", "--json"),
                  _steps, _steps_said),
    "trained": Part("Trained steps of slices", ("soak.py", "--train", "2000"), _trained,
                    _trained_said),
    "experts": Part("Trained steps of slices with experts",
                    ("soak.py", "--train", "2000", "--experts"), _trained, _trained_said),
    "launcher-1": _faults_of(1),
    "launcher-2": _faults_of(2),
    "fuzz": Part("Fuzzing", ("fuzz.py", "--minutes", "2", "--seed", "1", "--json"), _fuzzed,
                 _fuzzed_said),
}  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of results")
    parser.add_argument("--parts", nargs="*", choices=PARTS, help="default: all of them")
    parser.add_argument("--again", action="store_true", help="run parts that have a result, too")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write this page of all results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in PARTS if args.parts is None else args.parts:
        if args.again:
            for file in args.out.glob(f"{name}.*json"):
                file.unlink()
        for _ in _run(name, PARTS[name], args.out):
            pass
        result = _read(args.out, name)
        failed |= result is None or bool(result.status)
        print(f"{name}: {'not run' if result is None else f'status {result.status}'}", flush=True)
    if args.page:
        write_text(args.page, page_of({name: _read(args.out, name) for name in PARTS}))
    return int(failed)


def _run(name: str, part: Part, folder: Path) -> Iterator[Result]:
    """Runs what of a part has no result yet, and keeps it; fuzzing target by target."""
    before = _read(folder, name)
    if name != "fuzz":
        if before is None:
            known = ("--out", str(folder / f"{name}.outcomes.json"), "--missing", "--json")
            yield _keep(folder, name, _result([*part.words, *known[: 4 * part.grows]]))
        return
    found = [] if before is None else before.found
    for target in fuzz_targets():
        if all(one["target"] != target for one in found):
            corpus = ("--corpus", str((folder / "fuzz").absolute()))
            one = _result([*part.words, "--targets", target, *corpus])
            found = [*found, *one.found]
            before = Result(
                one.commit, one.day, one.machine, one.seconds + (before.seconds if before else 0),
                one.status | (before.status if before else 0), found,
            )  # fmt: skip
            yield _keep(folder, name, before)


def _result(words: Sequence[str]) -> Result:
    """Runs a script beside this one, whose last output is JSON, or lines of it."""
    started_s = time.monotonic()
    command = [sys.executable, str(HERE / words[0]), *words[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return Result(
        commit(), date.today().isoformat(), machine(), time.monotonic() - started_s,
        done.returncode, parsed(done.stdout),
    )  # fmt: skip


def parsed(text: str) -> list[Any]:
    """One list, or one object a line."""
    if text.lstrip().startswith("["):
        whole: list[Any] = json.loads(text)
        return whole
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def commit() -> str:
    """The commit that is checked out, and whether files differ from it."""

    def said(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    package = said("status", "--porcelain", "megatron_wlb")
    return said("rev-parse", "--short=8", "HEAD") + (" and changes" if package else "")


def machine() -> str:
    """The processor, and how many of its cores this process may use."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores of an {name}"


def _keep(folder: Path, name: str, result: Result) -> Result:
    write_text(folder / f"{name}.json", json.dumps(asdict(result), indent=1) + "\n")
    return result


def _read(folder: Path, name: str) -> Result | None:
    file = folder / f"{name}.json"
    return Result(**json.loads(read_text(file))) if file.exists() else None


def page_of(results: dict[str, Result | None]) -> str:
    """The page: each part with its command, its table, or that it was not run."""
    missing = [PARTS[name].title for name, result in results.items() if result is None]
    lines = [
        "# Long tests: what ran, when, and what came of it",
        "",
        "Made by `scripts/evidence/endurance.py --out FOLDER --page docs/results/endurance.md`; do "
        "not edit it by hand. The command runs all parts and takes hours; it goes on where it was "
        "cut off. [tested.md](tested.md) says what each part does. All is *tested* on CPUs, with "
        "gloo; other work shared the cores unless a part says otherwise.",
        "",
    ]
    if missing:
        lines += [f"**Not run yet by this command: {'; '.join(missing)}.**", ""]
    for name, result in results.items():
        part = PARTS[name]
        lines += [f"## {part.title}", ""]
        command = shlex.join([f"scripts/evidence/{part.words[0]}", *part.words[1:]])
        if result is None:
            lines += [f"Not run. `{command}`", ""]
            continue
        heads, *rows = part.rows(result.found)
        lines += [
            f"`{command}`, {result.day}, commit `{result.commit}`, {result.machine}, "
            f"{result.seconds / 60:.0f} minutes, status {result.status}. {part.says(result.found)}",
            "",
            *(_line(row) for row in (heads, ["---"] * len(heads), *rows)),
            "",
        ]
    return "\n".join(map(wrapped, lines)).rstrip() + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(run_program(main, place_flag="--out"))
