"""Runs into which a fault is put, and what became of them: resumed alike, refused, or worse.

A fault strikes one rank, at a call of the program drawn by a seed. Then the run is started again,
as a user would, and held against a run without a fault: the plan of each step, every document, and
the losses, to the bit.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from fault_points import Fault, prepare
from helpers.strategy_ranks import strategies_file
from helpers.texts import write_texts
from megatron_lm_runs import BOTH, CP2, DP2, PP2, PP2_VPP2, TP2_SP, launch
from rank_runs import Finished, Flags, Run, finish, losses, tracked

NUM_STEPS = 6
HANG_S = 15.0
"""``--wlb-hang-seconds`` where a rank stops. What is slow has six times that."""
BUSY_S = 100.0
"""The same of other runs: a busy machine is none that hangs."""
ENDED_S = 150.0
"""How long a run may go on after a fault, on a busy machine, before it hangs."""
RUN_S = 400.0
"""How long a whole run may take there."""

RUN: Flags = BOTH | {
    "train_iters": NUM_STEPS,
    "wlb_packing": "hold",
    "wlb_look_ahead": 2,
    "ckpt_format": "torch_dist",
    "dist_ckpt_optim_fully_reshardable": True,
}
SAVING: Flags = {"save": "run", "load": "run", "save_interval": 2, "wlb_metrics": "metrics"}
LAYOUTS: dict[str, tuple[int, Flags]] = {
    "pp2": (2, PP2),
    "dp2": (2, DP2),
    "pp2-vpp2": (2, PP2_VPP2),
    "pp2-dp2": (4, PP2 | DP2),
    "pp2-slim": (2, PP2 | {"wlb_packing": "slim"}),
    "tp2": (2, TP2_SP),
    "cp2": (2, CP2),
    "ep2": (
        2,
        {
            "num_experts": 4,
            "expert_model_parallel_size": 2,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
            "disable_bias_linear": True,
        },
    ),
    # Steps with a long document run by the second of STRATEGIES, others by the first.
    "strategies": (
        4,
        {
            "wlb_hardware": "cpu",
            "wlb_look_ahead": None,
            "wlb_packing": None,
            "global_batch_size": 4,
            "seq_length": 1024,
            "max_position_embeddings": 1024,
            "seed": 2,
        },
    ),
}
STRATEGIES = ("4*tp1:512", "tp2:1k+pp2sliced:1k")


@dataclass
class Outcome:
    """What became of a case."""

    case: str
    layout: str
    seed: int
    trainer: str = "launcher"
    outcome: str = ""
    """``resumed equal``, ``refused clearly``, ``hung``, ``silent``, ``lost``; or ``not struck``:
    the machine was too busy for the case, which says nothing."""
    said: list[str] = field(default_factory=list)
    """The program's own lines of errors, of the fault and of what was refused after it."""
    ended_s: float | None = None
    """From the fault to the end of the last process."""
    why: str = ""


@dataclass
class Bench:
    """A folder with a corpus, and the runs without a fault that others are held against."""

    folder: Path
    plain: dict[str, tuple[dict[int, Any], dict[int, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.corpus = make_corpus(self.folder)
        self.strategies = strategies_file(self.folder, STRATEGIES)

    def flags(self, layout: str) -> tuple[int, Flags]:
        num, more = LAYOUTS[layout]
        more = {"data_path": self.corpus, "wlb_hang_seconds": BUSY_S} | more
        if layout == "strategies":
            more |= {"wlb_strategies": self.strategies}
        return num, RUN | more | SAVING

    def expected(self, layout: str) -> tuple[dict[int, Any], dict[int, float]]:
        """Steps and losses of a run without a fault."""
        if layout not in self.plain:
            folder = self.folder / f"plain-{layout}"
            finish(begin(folder, *self.flags(layout)))
            self.plain[layout] = steps_of(folder), losses(folder / "metrics")
        return self.plain[layout]


def begin(folder: Path, num: int, flags: Flags, fault: Fault | None = None) -> Run:
    """Starts a run in its folder."""
    folder.mkdir(exist_ok=True)
    prepared = partial(prepare, str(folder / "ledger"), fault)
    run = launch(folder, num, flags, fault=prepared)
    run.deadline = time.monotonic() + RUN_S
    return run


def make_corpus(folder: Path, name: str = "texts", seed: int = 7) -> Path:
    """200 documents of 5 to 2,000 bytes, heavy-tailed."""
    return write_texts(folder / name, 200, 4.5, most=2000, seed=seed)


def steps_of(folder: Path) -> dict[int, Any]:
    """Digest and documents of each step; of one that ran more than once, the last time."""
    lines = map(json.loads, (folder / "ledger").read_text().splitlines())
    return {step: (digest, documents) for step, digest, documents in lines}


def await_end(run: Run, limit_s: float) -> float | None:
    """Waits until all ranks have ended, one of them by itself first; None if that takes too long.

    As torchrun does, the rest is ended once one has; but a second is left to say why.
    """
    began = time.monotonic()
    roots = [psutil.Process(pid) for pid in run.roots if psutil.pid_exists(pid)]
    family = {child for root in roots for child in _family(root)}
    said_s = None
    while time.monotonic() - began < limit_s:
        for root in roots:
            family |= _family(root)
        gone = [root for root in roots if not _runs(root)]
        if gone and said_s is None:
            said_s = time.monotonic()
        is_over = said_s is not None and time.monotonic() - said_s > 3.0
        if (is_over or len(gone) == len(roots)) and run.poll() is not None:
            _, alive = psutil.wait_procs(family, timeout=10)
            return None if any(map(_runs, alive)) else time.monotonic() - began
        time.sleep(0.02)
    run.kill()
    for process in family:
        if process.is_running():
            process.kill()
    return None


def _family(root: psutil.Process) -> set[psutil.Process]:
    try:
        return {root, *root.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def attempt(bench: Bench, case: str, layout: str, seed: int) -> Outcome:
    """Runs one of :data:`CASES` in a new folder."""
    done = Outcome(case, layout, seed)
    folder = bench.folder / f"{case}-{layout}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    run = CASES[case]
    try:
        run(bench, folder, done, random.Random(f"{case} launcher {layout} {seed}"))
    except AssertionError as error:
        done.outcome, done.why = done.outcome or "hung", str(error)[-2000:]
    if done.outcome in ("resumed equal", "refused clearly"):
        shutil.rmtree(folder, ignore_errors=True)
    return done


def struck(
    bench: Bench, folder: Path, done: Outcome, dice: random.Random, *, kind: str, point: str
) -> None:
    """A fault strikes a process in the middle of a run, which is started again."""
    num, flags = bench.flags(done.layout)
    rank, step = dice.randrange(num), dice.randint(1, 4)
    most = 1 if done.layout == "strategies" else 4  # calls of a rank that are sure to come
    call = dice.randint(1, most) if point in ("forward", "backward", "read") else 1
    deed = "kill" if kind == "async" else kind
    fault = Fault(deed, point, rank, step, call, str(folder / "struck"))
    if kind == "async":
        flags = flags | {"async_save": True}
    if kind == "stop":
        flags = flags | {"wlb_hang_seconds": HANG_S}
    run = begin(folder, num, flags, fault)
    while not Path(fault.struck).exists() and run.poll() is None:
        run.sleep(0.01)
    done.ended_s = await_end(run, ENDED_S)
    ended = Finished(run.poll() or 0, run.log.read_text(errors="replace"))
    done.said = ended.errors
    if done.ended_s is None:
        done.outcome, done.why = "hung", ended.output[-2000:]
        return
    if not Path(fault.struck).exists():
        done.outcome, done.why = "not struck", f"it ended before: {ended.output[-1000:]}"
        return
    if ended.code and (not done.said or traceback_of(ended)):
        done.outcome, done.why = "silent", f"no line of its own: {ended.output[-2000:]}"
        return
    if kind in ("kill", "stop") and not any(re.search(PLACE, line) for line in done.said):
        done.outcome, done.why = "silent", "the error says no place"
        return
    resume(bench, folder, done)


def traceback_of(finished: Finished) -> bool:
    """Whether a process ended by one; Megatron's timer of stragglers prints its own in one line."""
    return bool(re.search(r"^(\[rank\d+\]: *)?Traceback", finished.output, re.MULTILINE))


PLACE = r"step \d+: .*(pass|micro-batch|beginning)|plan of|checkpoint after|a checkpoint|the start"
"""Where a run was, in an error of a rank that lost another one."""


def resume(bench: Bench, folder: Path, done: Outcome, **changed: Any) -> None:
    """Starts the run again, and judges."""
    num, flags = bench.flags(done.layout)
    run = begin(folder, num, flags | changed)
    finished = run.wait()
    if finished.code:
        done.said += finished.errors
        done.outcome = "refused clearly"
        if len(finished.errors) != 1 or traceback_of(finished):
            done.outcome, done.why = "silent", f"no one line: {finished.output[-2000:]}"
        return
    compare(bench, folder, done)


def compare(bench: Bench, folder: Path, done: Outcome) -> None:
    """Holds what was trained, and its losses, against the run without a fault."""
    steps, expected = bench.expected(done.layout)
    found = steps_of(folder)
    if documents(found) != documents(steps):
        done.outcome, done.why = "lost", "other documents than without the fault"
    elif found != steps:
        done.outcome, done.why = "silent", "other plans"
    elif (now := losses(folder / "metrics")) != expected:
        done.outcome, done.why = "silent", f"other losses: {now}, expected {expected}"
    else:
        done.outcome = "resumed equal"


def documents(steps: dict[int, Any]) -> Counter[tuple[int, ...]]:
    """How often each document runs."""
    return Counter(tuple(document) for _, ran in steps.values() for document in ran)


def stopped_after_four(bench: Bench, folder: Path, done: Outcome) -> Path:
    """A run that was to end after step 4; the folder of its newest checkpoint."""
    num, flags = bench.flags(done.layout)
    finish(begin(folder, num, flags | {"exit_interval": 4}))
    return folder / "run" / "iter_0000004"


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "cut": lambda path, dice: os.truncate(path, dice.randrange(path.stat().st_size)),
    "flipped": lambda path, dice: flip(path, dice.randrange(8 * path.stat().st_size)),
    "swapped": lambda path, dice: swap(path, dice),
    "missing": lambda path, dice: path.unlink(),
}


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def rewrite(path: Path, dice: random.Random) -> None:
    """Gives every byte another value that is a token too."""
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def swap(path: Path, dice: random.Random) -> None:
    """With the file of this name in the checkpoint before, or with another file beside it."""
    other = path.parent.parent / "iter_0000002" / path.name
    if not other.exists():
        other = dice.choice(sorted(p for p in path.parent.iterdir() if p.is_file() and p != path))
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def damaged_checkpoint(
    bench: Bench, folder: Path, done: Outcome, dice: random.Random, *, damage: str
) -> None:
    """One file of the newest checkpoint is not what was saved: refused, and its remedy helps."""
    newest = stopped_after_four(bench, folder, done)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    path = dice.choice(files)
    kept = shutil.copytree(newest.parent, folder / "kept")
    DAMAGES[damage](path, dice)
    resume(bench, folder, done)
    if done.outcome != "refused clearly":
        done.why += f" ({path.name} was {damage})"
        return
    remedy = re.search(r"write (\d+) into (\S+)", done.said[-1])
    if remedy is not None and damage != "swapped":
        (folder / remedy[2]).write_text(remedy[1])
    else:
        shutil.rmtree(newest.parent)
        kept.rename(newest.parent)
    resume(bench, folder, done)


def damaged_corpus(
    bench: Bench, folder: Path, done: Outcome, dice: random.Random, *, suffix: str, damage: str
) -> None:
    """The corpus is changed in place between two runs: refused, and equal with the right one."""
    folder.mkdir()
    for path in bench.folder.glob("texts.*"):
        shutil.copy(path, folder)
    own = {"data_path": folder / "texts"}
    num, flags = bench.flags(done.layout)
    finish(begin(folder, num, flags | own | {"exit_interval": 4}))
    path = folder / f"texts{suffix}"
    if damage == "another":
        other = make_corpus(folder, "other", seed=8)
        for one in (".bin", ".idx"):
            shutil.copy(other.with_suffix(one), folder / f"texts{one}")
    else:
        DAMAGES.get(damage, rewrite)(path, dice)
    resume(bench, folder, done, **own)
    if done.outcome == "refused clearly":
        for good in bench.folder.glob("texts.*"):
            shutil.copy(good, folder)
        resume(bench, folder, done, **own)
    else:
        done.why += f" ({path.name} was {damage})"


def other_world(bench: Bench, folder: Path, done: Outcome, dice: random.Random) -> None:
    """One process more than the checkpoint is of: refused, or the same documents."""
    stopped_after_four(bench, folder, done)
    num, flags = bench.flags(done.layout)
    finished = begin(folder, 2 * num, flags).wait()
    done.said += finished.errors
    if finished.code == 0:
        found, expected = documents(steps_of(folder)), bench.expected(done.layout)[0]
        done.outcome = "resumed equal" if found == documents(expected) else "lost"
    elif len(finished.errors) == 1 and not traceback_of(finished):
        resume(bench, folder, done)
    else:
        done.outcome, done.why = "silent", finished.output[-2000:]


def two_runs(
    bench: Bench, folder: Path, done: Outcome, dice: random.Random, *, shared: str
) -> None:
    """A second run in the folder, or with the metrics file alone, is refused; the first goes on."""
    num, flags = bench.flags(done.layout)
    first = begin(folder, num, flags, sleepy(folder))
    first.wait_until((folder / "struck").exists, 0.01)
    alone = {} if shared == "save" else dict.fromkeys(("save", "load", "save_interval"))
    second = begin(folder / "second", num, {
        **flags, **alone,
        **({"save": folder / "run", "load": folder / "run"} if shared == "save" else {}),
        "wlb_metrics": folder / "metrics" if shared == "metrics" else "own",
    }).wait()  # fmt: skip
    done.said += second.errors
    finished = first.wait()
    if second.code == 0 or len(second.errors) != 1 or traceback_of(second):
        done.outcome, done.why = "silent", f"the second ran: {second.output[-2000:]}"
    elif finished.code:
        done.outcome, done.why = "lost", finished.output[-2000:]
    else:
        compare(bench, folder, done)
        done.outcome = "refused clearly" if done.outcome == "resumed equal" else done.outcome


def sleepy(folder: Path) -> Fault:
    return Fault("sleep", "optimizer", 0, 2, 1, str(folder / "struck"))


def asked_to_leave(bench: Bench, folder: Path, done: Outcome, dice: random.Random) -> None:
    """SIGTERM with ``--exit-signal-handler``: a checkpoint, and an end without an error."""
    num, flags = bench.flags(done.layout)
    fault = Fault("term", "backward", dice.randrange(num), 2, 2, str(folder / "struck"))
    run = begin(folder, num, flags | {"exit_signal_handler": True}, fault)
    run.wait_until(Path(fault.struck).exists, 0.01)
    done.ended_s = await_end(run, ENDED_S)
    if done.ended_s is None or run.poll() or tracked(folder / "run") not in range(1, NUM_STEPS):
        done.outcome, done.why = "silent", run.log.read_text()[-2000:]
        return
    resume(bench, folder, done)


Case = Callable[[Bench, Path, Outcome, random.Random], None]
CASES: dict[str, Case] = {
    **{
        f"{kind}-{point}": partial(struck, kind=kind, point=point)
        for kind, points in {
            "kill": ("planning", "forward", "backward", "optimizer", "write", "saved"),
            "stop": ("planning", "forward", "backward", "optimizer", "write"),
            "usr2": ("forward",),
            "term": ("backward",),
            "full": ("write",),
            "eio": ("read",),
            "clock": ("forward",),
            "async": ("write",),
        }.items()
        for point in points
    },
    "asked-to-leave": asked_to_leave,
    **{f"checkpoint-{damage}": partial(damaged_checkpoint, damage=damage) for damage in DAMAGES},
    **{
        f"corpus{suffix}-{damage}": partial(damaged_corpus, suffix=suffix, damage=damage)
        for suffix, damages in {
            ".bin": ("cut", "rewritten", "another"), ".idx": ("cut", "flipped"), ".json": ("cut",)
        }.items()
        for damage in damages
    },
    "other-world": other_world,
    **{f"two-runs-{shared}": partial(two_runs, shared=shared) for shared in ("save", "metrics")},
}  # fmt: skip
