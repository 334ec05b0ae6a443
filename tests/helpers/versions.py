"""Ragged pipelines on whichever megatron-core this interpreter imports, against the oracle.

For other versions than the installed one, and for patched copies: started in a process of its own
whose PYTHONPATH has that source first.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from helpers.layouts import (
    FULL,
    GROUP,
    NO_P2P_OVERLAP,
    OVERLAP,
    SELECTIVE,
    WORKLOAD,
    Layout,
)
from megatron_wlb.runtime.compat.source import MegatronSource
from megatron_wlb.settings.megatron import ModelConfig

SLICES = Layout("gpt2", 1, pp=2, dp=2, extra=OVERLAP)
"""It runs documents in slices, the others whole ones."""
CASES = (
    Layout("llama", 5, pp=2),
    Layout("mixed", 6, pp=2, vpp=2, extra=FULL),
    Layout("mixed", 5, pp=2, tp="2sp", extra=SELECTIVE),
    Layout("gpt2", 5, pp=2, dp=2, extra=OVERLAP),
    Layout("llama", 4, pp=2, cp=2),
    Layout("llama", 9, pp=4, vpp=2, extra=f"{NO_P2P_OVERLAP} {GROUP} 5"),
    Layout("mixed", 3, pp=2, extra=f"--mtp-num-layers 2 {FULL}"),
    SLICES,
)


@dataclass(frozen=True)
class CoreRun:
    """What the ranks of a process imported, and how its runs differ from the oracle's."""

    version: str
    folder: str
    """The folder of ``megatron.core``, on every rank."""
    takes_shape_provider: bool
    differences: dict[str, list[str]]
    """Differences by case; empty where every loss and gradient is right."""


def patched_copy(source: MegatronSource, root: Path) -> MegatronSource:
    """A copy of a source's ``megatron.core`` at ``root``, with the patches of its version."""
    core = Path("megatron", "core")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source.core_root / core, root / core, ignore=ignored)
    for patch in patches_of(source.version):
        command = ["patch", "-p1", "--fuzz", "0", "-i", str(patch)]
        subprocess.run(command, cwd=root, check=True, capture_output=True)
    return MegatronSource.at(root)


def patches_of(version: str) -> list[Path]:
    """The patch files of a version, in their order."""
    project = Path(__file__).resolve().parents[2]
    return sorted((project / "patches" / f"core_v{version}").glob("*.patch"))


def run_with_core(root: Path, *, stock_communicator: bool = False) -> CoreRun:
    """Runs :data:`CASES` in a new process on the ``megatron.core`` below ``root``.

    With ``stock_communicator`` Megatron's own one runs, and schedules are told the lengths.
    """
    code = "from helpers import versions; versions.main()"
    tests = Path(__file__).resolve().parents[1]
    folders = [str(root), str(tests.parent), str(tests), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [sys.executable, "-c", code, *(["stock"] if stock_communicator else [])],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        raise AssertionError(f"the runs on {root} failed:\n{done.stdout}\n{done.stderr}")
    return CoreRun(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Runs in that process and prints a :class:`CoreRun`."""
    from helpers.gloo import GlooPool
    from helpers.oracle import OracleRun, run_oracle
    from helpers.plans import scatter_for, sliced_for
    from helpers.ranks import train
    from helpers.shards import differences

    fault = _stock_communicator if "stock" in sys.argv else _public_shapes
    oracles: dict[ModelConfig, OracleRun] = {}
    found = {}
    with GlooPool(4) as pool:
        (core,) = pool.run(1, describe_core)
        for case in CASES:
            config = case.config
            key = config.model
            if key not in oracles:
                (oracles[key],) = pool.run(1, run_oracle, config, WORKLOAD)
            initial = oracles[key].initial
            plan_for = sliced_for if case is SLICES else scatter_for
            runs = pool.run(case.world_size, train, config, WORKLOAD, initial, fault, plan_for)
            found[str(case)] = differences(oracles[key], runs)
    sys.stdout.write(json.dumps({**core, "differences": found}) + "\n")


def describe_core() -> dict[str, Any]:
    """What a rank has imported."""
    core = importlib.import_module("megatron.core")
    communicator = importlib.import_module("megatron_wlb.runtime.stepping.communicator")
    return {
        "version": str(core.__version__),
        "folder": str(Path(core.__path__[0])),
        "takes_shape_provider": communicator.TAKES_SHAPE_PROVIDER,
    }


@contextlib.contextmanager
def _public_shapes(runner: Any) -> Iterator[None]:
    """Refuses private requests for shapes where the core takes a shape provider."""
    from megatron_wlb.runtime.stepping.communicator import TAKES_SHAPE_PROVIDER

    if not TAKES_SHAPE_PROVIDER:
        yield
        return
    private = mock.Mock(side_effect=AssertionError("a private exchange of shapes"))
    with mock.patch.object(runner.communicator, "_communicate_shapes", private):
        yield


@contextlib.contextmanager
def _stock_communicator(runner: Any) -> Iterator[None]:
    """Takes the plan away from a ``StepRunner``'s communication: the schedule gets the lengths."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    config = runner.model.config
    shards = config.context_parallel_size
    if config.sequence_parallel:
        shards *= config.tensor_model_parallel_size
    stock = P2PCommunicator(runner.model.groups.pp, config)
    schedule, lengths = runner._schedule, list[int]()

    class Lengths:
        verify = False

        def begin(self, local_lengths: list[int], **_: Any) -> None:
            lengths[:] = [shards * length for length in local_lengths]

        def end(self) -> None: ...

    def run(**kwargs: Any) -> Any:
        return schedule(**{**kwargs, "seq_length": list(lengths), "p2p_communicator": stock})

    runner.communicator, runner._schedule = Lengths(), run
    yield
