#!/usr/bin/env python3
"""Looks for inputs that a reader of the project does not take or refuse in one line.

Everything that the project reads is a target (tests/helpers/fuzz.py): settings, recipes, corpora,
lengths, ledgers, states and checksums of checkpoints, cost and hardware files, recordings, results.
atheris changes right files so that new branches run. A finding is an error that is not ours, more
than --memory-mib of memory, or more than --input-seconds for an input; its input is kept beside the
inputs of --corpus, and the exit status is 1. The short form is tests/unit/test_readers.py.

    pip install atheris
    scripts/evidence/fuzz.py --minutes 5 --corpus fuzz
    scripts/evidence/fuzz.py --targets ledger state --minutes 30 --corpus fuzz --seed 2
    scripts/evidence/fuzz.py --targets ledger --corpus fuzz --input fuzz/ledger/findings/crash-…
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import resource
import subprocess
import sys
import tempfile
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from _common import parser_of
from rich.console import Console
from rich.table import Table

from megatron_wlb.errors import CompatibilityError, ConfigError, run_program

sys.path.append(str(Path(__file__).parents[2] / "tests"))
PREFIX = "target: "
"""What stands before the names that a process without work prints."""


READERS = ["megatron_wlb", "_gpu_report", "_quickstart", "_run_recipes"]
"""The packages whose branches guide the fuzzer."""


@dataclass(frozen=True)
class Outcome:
    """What became of a target."""

    target: str
    executions: int
    edges: int
    """Branches of the project's code that ran."""
    findings: tuple[str, ...]
    """Files of inputs."""
    error: str = ""
    """The last line that was said of the last of them."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="default: all of them")
    parser.add_argument("--minutes", type=float, default=1.0, help="a target (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--corpus", type=Path, help="folder of inputs, kept between runs")
    parser.add_argument("--input", type=Path, help="reads this input with the one target, no more")
    parser.add_argument("--memory-mib", type=int, default=1024, help="default: 1024")
    parser.add_argument("--input-seconds", type=int, default=20, help="default: 20")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--worker", metavar="NAME", help="runs one target in this process")
    args = parser.parse_args()
    if args.worker is not None:
        _work(args.worker, args.corpus, args.seed, args.minutes, args.memory_mib,
              args.input_seconds, args.input)  # fmt: skip
        return 0
    if importlib.util.find_spec("atheris") is None and args.input is None:
        raise CompatibilityError(
            "there is no atheris, which fuzzes; install it: pip install atheris"
        )
    if args.input is not None and not (args.targets and args.input.is_file()):
        raise ConfigError(f"--input {args.input} is no file, or has no --targets; give both")
    known = _names()
    for name in set(args.targets or ()) - set(known):
        raise ConfigError(f"unknown target {name}; use some of {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        corpus = (args.corpus or Path(folder)).absolute()
        outcomes = []
        for name in args.targets or known:
            outcomes.append(_outcome(name, corpus, sys.argv[1:]))
            if not args.json:
                print(f"{name}: {outcomes[-1].executions} executions", file=sys.stderr, flush=True)
        if args.corpus is None and any(one.findings for one in outcomes):
            print("findings are gone without --corpus FOLDER", file=sys.stderr)
    if args.json:
        print(json.dumps([asdict(one) for one in outcomes]))
    else:
        _show(outcomes)
    return int(any(one.findings or one.error for one in outcomes))


def _show(outcomes: list[Outcome]) -> None:
    table = Table("target", "executions", "edges", "findings")
    for one in outcomes:
        table.add_row(one.target, f"{one.executions:,}", str(one.edges), str(len(one.findings)))
    Console().print(table)
    for one in outcomes:
        if one.error:
            print(f"{one.target}: {one.error}")
        for path in one.findings:
            print(f"  scripts/evidence/fuzz.py --targets {one.target} --input {path}")


def _names() -> list[str]:
    """The targets, by a process of its own: making them fills its folder."""
    done = _process(["--worker", ""])
    names = [line.removeprefix(PREFIX) for line in done.splitlines() if line.startswith(PREFIX)]
    if not names:
        raise ConfigError(f"the targets cannot be made: {done.strip().splitlines()[-1:]}")
    return names


def _process(words: list[str]) -> str:
    command = [sys.executable, str(Path(__file__).absolute()), *words]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return done.stderr + done.stdout


def _outcome(name: str, corpus: Path, words: list[str]) -> Outcome:
    """Runs a target until its time is over or it finds something."""
    findings = corpus / name / "findings"
    findings.mkdir(parents=True, exist_ok=True)
    (corpus / name / "inputs").mkdir(exist_ok=True)
    before = {*findings.iterdir()}
    said = _process([*words, "--corpus", str(corpus), "--worker", name])
    # Slow ones, which libFuzzer keeps too, are none.
    new = {path for path in findings.iterdir() if not path.name.startswith("slow")} - before
    found = tuple(map(str, sorted(new)))
    errors = re.findall(
        r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*$|^.*ERROR: .*$", said, re.M
    )
    failed = bool(found) or "Traceback" in said
    return Outcome(
        name,
        max(map(int, re.findall(r"^(?:#|stat::number_of_executed_units: )(\d+)", said, re.M)),
            default=0),
        max(map(int, re.findall(r" cov: (\d+)", said)), default=0),
        found,
        (errors or ["it failed"])[0][:300] if failed else "",
    )  # fmt: skip


def _work(
    name: str,
    corpus: Path,
    seed: int,
    minutes: float,
    memory_mib: int,
    input_s: int,
    input_path: Path | None,
) -> None:
    """Runs a target in this process, which ends with it; without a name says which there are."""
    warnings.simplefilter("ignore")
    logging.disable()
    instrumented: AbstractContextManager[None] = nullcontext()
    if name and input_path is None:
        import atheris

        # Torch has too many branches, and none of them reads.
        instrumented = atheris.instrument_imports(include=READERS)
        for module in [one for one in sys.modules if one.split(".")[0] in READERS]:
            del sys.modules[module]  # what this script itself needs is imported anew
    content = None if input_path is None else input_path.read_bytes()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as work:
        os.chdir(work)
        with instrumented:
            from helpers.fuzz import TOKENS, targets

            known = targets()
            for data in known[name].seeds if name and content is None else ():
                known[name].run(data)  # which imports the rest
        if not name:
            print("".join(f"{PREFIX}{one}\n" for one in known))
            return
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + (memory_mib << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if content is not None:
            known[name].run(content)
            return
        for number, data in enumerate(known[name].seeds):
            (corpus / name / "inputs" / f"seed-{number}").write_bytes(data)
        words = ["".join(f"\\x{byte:02x}" for byte in token) for token in TOKENS if len(token) < 64]
        Path("words").write_text("".join(f'"{word}"\n' for word in words))
        flags = {
            "seed": seed, "max_total_time": int(60 * minutes), "timeout": input_s,
            "rss_limit_mb": 0, "max_len": 1 << 16, "print_final_stats": 1, "dict": "words",
            "artifact_prefix": f"{corpus / name / 'findings'}/",
        }  # fmt: skip
        argv = [*(f"-{key}={value}" for key, value in flags.items()), str(corpus / name / "inputs")]
        atheris.Setup([sys.argv[0], *argv], known[name].run)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(run_program(main))
