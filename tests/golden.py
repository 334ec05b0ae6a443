"""Golden cases: what plans and commands are today, so that a redesign shows what it changes.

``python tests/golden.py`` writes all of them to ``tests/golden.json``, a line a case;
``python tests/golden.py NAME`` prints one in full, to compare two versions of the code.
``tests/unit/test_golden.py`` holds the code to the file.

A line has a digest of all, which is exact for plans, and a few figures that say what changed.
Figures, and all numbers that commands print, have 9 significant digits: logarithms, powers and sums
may end in other bits on another machine, and plans must not.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
from helpers.index import write_index

import megatron_wlb as wlb
from megatron_wlb.cli.main import main
from megatron_wlb.cost.document import DocumentCost
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning import from_config as planned
from megatron_wlb.planning.ledger.writer import StepLedger
from megatron_wlb.planning.plan_ahead import Plans
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.strategies.plan.strategy_run import StrategyRun

FILE = Path(__file__).with_suffix(".json")
WINDOW, NUM_STEPS = 16384, 6
StepTime: TypeAlias = Callable[[StepPlan], float]


def lengths(number: int, longest: int, seed: int) -> list[int]:
    """Heavy-tailed ones, by whole numbers alone: the same on every machine."""
    random = np.random.RandomState(seed)
    tails = longest // random.randint(1, 200, number)
    return (tails - tails // 50 + random.randint(1, 1 + longest // 50, number)).tolist()


COST = DocumentCost(1, 0.0003, 2, 0.0007, micro_batch_us=50)
TP2_PP4 = wlb.Parallelism(tp_size=2, pp_size=4, dp_size=2, sequence_parallel=True)
STEPS: dict[str, tuple[str, wlb.Parallelism]] = {
    "steps original": ("original", wlb.Parallelism(dp_size=2)),
    "steps fixed-greedy": ("fixed-greedy:3", wlb.Parallelism()),
    "steps wlb": ("wlb:3", wlb.Parallelism(tp_size=2, dp_size=4, sequence_parallel=True)),
    "steps hold": ("hold", wlb.Parallelism(cp_size=2, dp_size=2)),
    "steps slim": ("slim", wlb.Parallelism(pp_size=4, dp_size=2)),
    "steps slim alike": ("slim", wlb.Parallelism(pp_size=2, dp_size=4, ep_size=2)),
}
"""Plans of :func:`megatron_wlb.plan_steps`: packing and layout."""

SAMPLES = lengths(250, 15_000, 7)
BATCHES: dict[str, dict[str, Any]] = {
    "batch": {"cost": "7b"},
    "batch by a cost": {"cost": COST, "num_micro_batches": 7},
    "batch of unequal numbers": {"cost": "7b", "equal_numbers": False},
    "batch of groups": {"cost": "7b", "groups": [n // 5 for n in range(len(SAMPLES))]},
    "batch of weights": {
        "cost": "7b",
        "weights": [n % 3 / 4 + np.arange(size) // 900 % 2 for n, size in enumerate(SAMPLES)],
    },
    "batch in slices": {"cost": "7b", "slices": True},
    "batch in slices and memory": {"cost": "7b", "slices": True, "memory_gib": 24},
}
"""Plans of :func:`megatron_wlb.plan_batch`."""

_7B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --bf16 "
    f"--seq-length {WINDOW} --vocab-size 32000 --split 80,20,0 --use-distributed-optimizer "
    "--overlap-grad-reduce --seed 5 "
)
_PIPELINE = "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 4 "
_EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 1408 --expert-tensor-parallel-size 1 "
_LATENTS = "--multi-latent-attention --kv-lora-rank 512 --rope-type rope --mtp-num-layers 1 "
_CP = "--context-parallel-size 2 "
_LONG = "--data-path long --wlb-long-documents slice "
RUNS: dict[str, str] = {
    "run original": "--wlb-packing original --micro-batch-size 2",
    "run original auto": "--wlb-packing original --wlb-micro-batches auto",
    "run fixed-greedy": "--wlb-packing fixed-greedy --wlb-fixed-batches 2 "
    "--wlb-fixed-grouping arrival",
    "run fixed-solver": "--wlb-packing fixed-solver --wlb-solver-limit 0.15 --global-batch-size 8",
    "run wlb": "--wlb-packing wlb --wlb-queue-thresholds 3000 9000 --wlb-max-tokens 24000",
    "run wlb shaped": "--wlb-packing wlb --wlb-shape on --num-virtual-stages-per-pipeline-rank 2",
    "run hold": "--wlb-packing hold",
    "run hold shaped, auto": "--wlb-packing hold --wlb-shape on --wlb-micro-batches auto",
    "run hold ahead": "--wlb-packing hold --wlb-look-ahead 2 --wlb-memory-gib 60",
    "run hold of experts": f"--wlb-packing hold {_EXPERTS} --expert-model-parallel-size 2",
    "run hold hybrid": f"--wlb-packing hold {_CP} --wlb-cp-sharding hybrid",
    "run hold truncated": "--wlb-packing hold --wlb-long-documents truncate --window-size 4095,0",
    "run hold ramp": "--wlb-packing hold "
    f"--step-batch-size-schedule '0:8 {30 * WINDOW}:12 {60 * WINDOW}:16'",
    "run hold blend": "--wlb-packing hold --data-path 0.7 corpus 0.3 masked",
    "run evaluation": "--wlb-packing wlb --data-path corpus masked",
    "run slim": "--wlb-packing slim --wlb-units 24",
    "run slim merged": f"--wlb-packing slim {_LONG}",
    "run slim unmerged": f"--wlb-packing slim {_LONG} --wlb-dp-merge off",
    "run slim chunks": "--wlb-packing slim --num-virtual-stages-per-pipeline-rank 4",
    "run slim uneven": "--wlb-packing slim --decoder-last-pipeline-num-layers 5",
    "run slim host": f"--wlb-packing slim {_LONG} --wlb-memory-gib 60 --wlb-host-gib 200",
    "run slim divided": f"--wlb-packing slim {_LONG} {_CP} --wlb-slice-cache divided",
    "run slim of experts": f"--wlb-packing slim {_EXPERTS} --expert-model-parallel-size 8",
    "run slim meeting": f"--wlb-packing slim {_EXPERTS} --moe-router-load-balancing-type "
    "global_aux_loss --moe-aux-loss-coeff 0.01",
    "run slim latents": f"--wlb-packing slim {_LATENTS} --wlb-slice-multiple 512",
    "run slim schedule": "--wlb-packing slim --step-batch-size-schedule '0:8 300000:16'",
    "run slim samples": "--wlb-packing slim --data-path masked --wlb-loss-mean sample",
    "run strategies": "--wlb-strategies strategies.yaml --global-batch-size 12",
    "run strategies auto": "--wlb-strategies auto --global-batch-size 12 --wlb-memory-gib 70",
}
"""Flags of runs, whose plans are read back from a state in the middle. There are 2 replicas of
:data:`_PIPELINE`, and 12 devices with strategies."""

_BATCH = f"corpus --window {WINDOW} --num-micro-batches 8 --steps 3"
COMMANDS: dict[str, str] = {
    "wlb corpus stats": f"corpus stats corpus masked --window {WINDOW}",
    "wlb pack": f"pack {_BATCH} --packing original,fixed-greedy:2,wlb,hold:1 --model 7b",
    "wlb tune": f"tune {_BATCH} --packing hold --max-delay 0.4",
    "wlb simulate": f"simulate {_BATCH} --model 7b --tp-size 4 --cp-size 2 --pp-size 4 --dp-size 2 "
    "--packing original,hold+shape,slim --num-seeds 1",
    "wlb simulate experts": f"simulate {_BATCH} --model mixtral-8x7b --tp-size 2 --pp-size 4 "
    "--dp-size 2 --ep-size 2 --packing original,hold --num-seeds 1",
    "wlb plan": f"plan {_BATCH} --model 7b --num-devices 16 --refine 2 --packing original,hold",
    "wlb plan strategies": f"plan {_BATCH} --model 7b --num-devices 8 --strategies",
    "wlb recipe show": "recipe show recipe.yaml --nnodes 2 --rdzv-endpoint host:1",
    "wlb audit": "audit saved --replay",
}
"""What commands print with ``--json``, but for those that tell of the machine or of Megatron:
``doctor``, ``profile`` and dry runs of recipes."""
MEASURED = ("ms_per_step",)
NAMES = [*STEPS, *BATCHES, *RUNS, *COMMANDS]
FIGURES = (
    *("documents", "tokens", "packing", "strategy", "max_tokens", "imbalance_mean"),
    *("step_ms", "peak_gib", "speedup", "net_speedup"),
)
"""What of a command's result stands beside its digest: the first value of each name."""

STATES = FILE.with_name("states-0.2.json")
RELEASED = ("run hold", "run slim", "run wlb")
"""Runs whose states a release has written: ``python tests/golden.py states``, once a release."""

STRATEGIES = """\
num_devices: 12
devices_per_node: 4
strategies:
- tp4pp2:32k+4*tp1:4k
- 2*tp2pp2:16k+2*tp2:8k
"""
EXPERIMENT = Path(__file__).parents[1] / "configs" / "experiment" / "mixtral-8x7b-128k.yaml"


@contextlib.contextmanager
def folder() -> Iterator[None]:
    """A working directory with all that the cases read."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        write_index("corpus", lengths(3000, 2 * WINDOW, 1))
        write_index("masked", short := lengths(800, WINDOW // 4, 2))
        masks = [np.arange(n) // 700 % 3 * (at % 5 > 0) for at, n in enumerate(short)]
        wlb.write_targets("masked", masks)
        write_index("long", lengths(300, 20 * WINDOW, 4))
        Path("strategies.yaml").write_text(STRATEGIES)
        Path("recipe.yaml").write_bytes(EXPERIMENT.read_bytes())
        yield


def case(name: str, resumed: bool = False) -> Any:
    """All that the case's digest is of; plans of runs may be read back in the middle."""
    if name in COMMANDS:
        return _said(COMMANDS[name])
    if name in STEPS:
        packing, layout = STEPS[name]
        batch = {"window": WINDOW, "num_micro_batches": 8, "packing": packing}
        steps = wlb.plan_steps("corpus", layout=layout, cost=COST, **batch)
        return _plans(islice(steps, NUM_STEPS))
    if name in BATCHES:
        batch = {"max_tokens": WINDOW, "layout": TP2_PP4, **BATCHES[name]}
        plan = wlb.plan_batch(SAMPLES, **batch)
        if not batch.get("equal_numbers", True):
            return _plans([plan])
        return _plans([plan], lambda plan: wlb.simulate_step(plan, TP2_PP4).step_us)
    make, step_us = _run(name)
    if not resumed:
        return _plans(_next(make(), NUM_STEPS), step_us)
    planner = make()
    first = [*_next(planner, NUM_STEPS // 2)]
    state = json.loads(json.dumps(planner.state_dict()))
    planner = make()
    planner.load_state_dict(state)
    return _plans([*first, *_next(planner, NUM_STEPS - len(first))], step_us)


def line(found: Any) -> dict[str, Any]:
    """What is kept of a case: a digest and figures."""
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    names = [*found][1:] if "digests" in found else FIGURES
    figures: dict[str, Any] = {}
    for name, value in _leaves(found):
        if name in names:
            figures.setdefault(name, value)
    return {"digest": digest, **figures}


def _leaves(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(found, dict):
        for key, value in found.items():
            yield from _leaves(value, key)
    elif isinstance(found, list):
        for value in found:
            yield from _leaves(value, name)
    else:
        yield name, found


def _config(flags: str) -> Config:
    layout = "" if "--wlb-strategies" in flags else _PIPELINE
    data = "" if "--data-path" in flags else "--data-path corpus"
    return parse(shlex.split(f"{_7B} {layout} {data} --global-batch-size 16 {flags}"))


def _run(name: str) -> tuple[Callable[[], Plans], StepTime | None]:
    """What makes the planner of a run, and what simulates its steps."""
    config = _config(RUNS[name])
    corpora = Corpora.open(config)
    if config.wlb.wlb_strategies is not None:
        strategies = StrategyRun.of(config, corpora, 12)
        return lambda: strategies.planner(corpora), None
    padded = planned.padded_vocab_size(config, corpora.vocab_size)
    cost = planned.known_cost(config, padded)
    assert cost is not None
    make = planned.make_evaluation_planner if "evaluation" in name else planned.make_planner
    run = planned.run_of(config, padded, 2, cost=cost)
    simulator = Simulator(run.costs, run.parallelism)
    return lambda: make(config, corpora, cost, 2), lambda plan: simulator.step(plan).step_us


def saved(name: str) -> dict[str, Any]:
    """A run's state in the middle, as a checkpoint has it, and the arrivals that have run."""
    planner = _run(name)[0]()
    ran = _arrivals(_next(planner, NUM_STEPS // 2))
    return {"state": planner.state_dict(), "waiting": planner.num_waiting, "ran": ran}


def continued(name: str, kept: dict[str, Any]) -> tuple[int, list[list[int]]]:
    """How many documents wait once a state is read, and the arrivals that run from then on."""
    planner: Any = _run(name)[0]()
    planner.load_state_dict(kept["state"])
    return planner.num_waiting, _arrivals(_next(planner, 3 * NUM_STEPS))


def _arrivals(plans: Iterable[StepPlan]) -> list[list[int]]:
    return [[d.arrival, d.offset] for plan in plans for d in plan.documents]


def _next(planner: Plans, number: int) -> Iterator[StepPlan]:
    return islice(iter(planner.next_plan, None), number)


def _plans(plans: Iterable[StepPlan], step_us: StepTime | None = None) -> dict[str, Any]:
    """Digests of plans, and what they say together."""
    steps = list(plans)
    every = [m for plan in steps for m in plan]
    found = {
        "digests": [plan.digest for plan in steps],
        "steps": len(steps),
        "micro_batches": len(every),
        "tokens": sum(plan.num_tokens for plan in steps),
        "targets": sum(plan.num_targets for plan in steps),
        "slices": sum(m.slice is not None for m in every),
        "merged": sum(plan.num_merged for plan in steps),
        "recomputed": sum(m.recomputed in (1, 2) for m in every),
        "hosted": sum(m.recomputed == 3 for m in every),
        "divided": sum(m.divided for m in every),
        "per_document": sum(m.sharding.kind != "per-sequence" for m in every),
        "waiting": steps[-1].num_waiting,
        "imbalance": sum(plan.imbalance for plan in steps) / len(steps),
        "step_ms": sum(map(step_us, steps)) / len(steps) / 1e3 if step_us else None,
    }
    return _rounded({name: value for name, value in found.items() if value})


def _said(words: str) -> Any:
    """What a command prints; an audit is of a run that is planned before, and no one trains."""
    if words.startswith("audit"):
        planner: Any = _run("run hold")[0]()
        settings, ledger = _config(RUNS["run hold"]).flat(), StepLedger("saved")
        about = {"dp_size": 2, "vocab_size": 32000, "cost": planner.cost.as_dict()}
        ledger.start(0, planner, settings=settings, **about)
        for plan in _next(planner, NUM_STEPS):
            ledger.step(plan)
        ledger.close()
    out = io.StringIO()
    with (
        patch.dict(os.environ, clear=True),  # which says where Megatron-LM is, or data
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = main([*shlex.split(words), "--json"])
    assert status == 0, err.getvalue()
    return _rounded(json.loads(out.getvalue().replace(os.getcwd(), "FOLDER")))


def _rounded(found: Any) -> Any:
    """Without what is of this machine and moment."""
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items() if key not in MEASURED}
    if isinstance(found, list):
        return list(map(_rounded, found))
    return float(f"{found:.9g}") if isinstance(found, float) else found


if __name__ == "__main__":
    with folder():
        if sys.argv[1:] == ["states"]:
            STATES.write_text(json.dumps({name: saved(name) for name in RELEASED}) + "\n")
        elif sys.argv[1:]:
            sys.stdout.write(json.dumps(case(sys.argv[1]), indent=1) + "\n")
        else:
            rows = [f"{json.dumps(name)}: {json.dumps(line(case(name)))}" for name in NAMES]
            FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
