"""One recipe: read, asked of the launcher, made small, run in its layout and in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _run_recipes import inside
from _run_recipes.outcome import (
    EQUAL,
    FAILED,
    FOREIGN,
    NO_TRAINING,
    REFUSED,
    UNEQUAL,
    UNFIT,
    UNKNOWN,
    Outcome,
)
from _run_recipes.ranks import Ended, run_ranks
from _run_recipes.scaling import NUM_STEPS, DoesNotFitError, Scaled, fewest, scale
from megatron_wlb.errors import ConfigError
from megatron_wlb.settings.pattern import FLAG as PATTERN
from megatron_wlb.settings.recipe import Recipe, read_recipe

LOSS_ROUNDING = 1e-6
"""Relative: fp32 sums of a thousand token losses, in another order; up to 1e-7 is seen."""
NORM_ROUNDING = 1e-4
"""Relative, of a gradient norm: weights of later steps differ by Adam's quotients, too."""
HERE = ("--wlb-device", "cpu", "--wlb-hardware", "cpu", "--wlb-metrics", inside.METRICS)


@dataclass(frozen=True)
class Trained:
    """What a run left behind."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    documents: tuple[Any, ...]
    """Of each step, sorted."""


class FailedRunError(Exception):
    """A run that did not come to its end; ``ended`` says how."""

    def __init__(self, which: str, ended: Ended) -> None:
        super().__init__(f"{which}: {ended.why}")
        self.tail = ended.tail


@dataclass
class Runner:
    """Runs recipes; a run of one process that several of them share runs once."""

    script: Path | None
    """None: what the launcher runs without one."""
    folder: Path
    """Where corpus and runs lie."""
    corpus: str
    limit_s: float
    spoil: str = ""
    packing: str = "hold"
    change: tuple[str, ...] = ()
    """Arguments that each recipe is given besides."""
    _trained: dict[tuple[Any, ...], Trained] = field(default_factory=dict)

    @property
    def _ours(self) -> tuple[str, ...]:
        # Which documents a bounded step has depends on what they cost in the layout.
        bound = ("--wlb-max-step-tokens", "0") if self.packing == "hold" else ()
        return "--wlb-packing", self.packing, *bound

    def run(self, path: Path) -> Outcome:
        """What becomes of the recipe in a file."""
        start_s = time.monotonic()
        outcome = Outcome(path.parent.name, FOREIGN)
        with contextlib.suppress(ConfigError):
            recipe = read_recipe(path, _variables(self.folder))
            given = (*recipe.arguments, *self.change)
            self._run(dataclasses.replace(recipe, arguments=given), outcome)
        outcome.seconds = round(time.monotonic() - start_s, 1)
        return outcome

    def _run(self, recipe: Recipe, outcome: Outcome) -> None:
        outcome.status = NO_TRAINING
        if recipe.mode != "pretraining":
            outcome.why = [f"MODE is {recipe.mode}"]
            return
        if not {"--num-layers", PATTERN} & set(recipe.arguments):
            outcome.status = UNKNOWN
            return
        # How many nodes a release's recipe has does not stand in its file.
        num_devices = max(recipe.num_nodes * recipe.devices_per_node, fewest(recipe.arguments))
        outcome.status = REFUSED
        outcome.why = self._refusals(recipe, num_devices)
        if outcome.why:
            return
        try:
            scaled = scale(recipe.arguments, num_devices, self.corpus)
        except DoesNotFitError as error:
            outcome.status, outcome.why = UNFIT, [str(error)]
            return
        outcome.layout, outcome.num_processes = scaled.layout, scaled.num_processes
        outcome.changes = [dataclasses.asdict(change) for change in scaled.changes]
        outcome.command = [*scaled.words, *self._ours]
        try:
            # TransformerEngine's variables would contradict Megatron's defaults without it.
            kept = {k: v for k, v in recipe.environment.items() if not k.startswith("NVTE_")}
            self._compare(scaled, kept, outcome)
        except FailedRunError as error:
            outcome.status, outcome.why, outcome.tail = FAILED, [str(error)], error.tail

    def _refusals(self, recipe: Recipe, num_devices: int) -> list[str]:
        """What the launcher says against the recipe as it stands, all at once."""
        words = (*recipe.arguments, *self._ours)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            found = Path(folder, "said")
            check = functools.partial(inside.check_arguments, words, num_devices, found)
            environment = recipe.environment
            ended = run_ranks(check, 1, Path(folder), limit_s=self.limit_s, environment=environment)
            if ended.why:
                return [f"Megatron-LM fails: {ended.tail.rpartition(chr(10))[2]}"]
            said: list[str] = json.loads(found.read_text())
            return said

    def _compare(self, scaled: Scaled, environment: Mapping[str, str], outcome: Outcome) -> None:
        expected = self._train("one process", scaled.alone, 1, environment)
        found = self._train(
            scaled.layout, scaled.words, scaled.num_processes, environment, self.spoil
        )
        outcome.steps = [
            {"loss": loss, "one_process_loss": other, "grad_norm": norm, "one_process_grad_norm": o}
            for loss, other, norm, o in zip(
                found.losses, expected.losses, found.norms, expected.norms, strict=True
            )
        ]
        outcome.why = differences(found, expected)
        outcome.status = UNEQUAL if outcome.why else EQUAL

    def _train(
        self,
        which: str,
        words: Sequence[str],
        num_processes: int,
        environment: Mapping[str, str],
        spoil: str = "",
    ) -> Trained:
        """Raises :class:`FailedRunError` for a run that does not train all its steps."""
        key = tuple(words), num_processes, spoil  # variables are for GPUs
        if key not in self._trained:
            self._trained[key] = self._run_anew(which, words, num_processes, environment, spoil)
        return self._trained[key]

    def _run_anew(
        self,
        which: str,
        words: Sequence[str],
        num_processes: int,
        environment: Mapping[str, str],
        spoil: str,
    ) -> Trained:
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name)
            given = (*words, *self._ours, *HERE)
            program = functools.partial(inside.train, self.script, given, spoil)
            ended = run_ranks(
                program, num_processes, folder, limit_s=self.limit_s, environment=environment
            )
            if not ended.why:
                lines = _lines(folder / inside.METRICS)
                steps = [line for line in lines if "loss" in line]
                if len(steps) == NUM_STEPS:
                    return Trained(
                        tuple(_number(line["loss"]) for line in steps),
                        tuple(_number(line["grad_norm"]) for line in steps),
                        tuple(_lines(folder / inside.DOCUMENTS)[:NUM_STEPS]),
                    )
                ended = Ended(f"trained {len(steps)} steps of {NUM_STEPS}", ended.log)
            raise FailedRunError(which, ended)


def differences(found: Trained, expected: Trained) -> list[str]:
    """Where a run is not the other one, beyond rounding; a line each."""
    lines = []
    for step, (ours, theirs) in enumerate(zip(found.documents, expected.documents, strict=True), 1):
        if ours != theirs:
            lines.append(f"step {step}: other documents")
    for name, rounding, ours, theirs in (
        ("loss", LOSS_ROUNDING, found.losses, expected.losses),
        ("gradient norm", NORM_ROUNDING, found.norms, expected.norms),
    ):
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
            if not math.isclose(one, other, rel_tol=rounding):
                lines.append(f"step {step}: {name} {one:.9g}, of one process {other:.9g}")
    return lines


def recipes_of(parent: Path, kind: str) -> list[Path]:
    """The files of Megatron's own recipes of one kind.

    Raises :class:`ConfigError` where there is none.
    """
    folder = parent / "tests" / "functional_tests" / "test_cases" / kind
    found = sorted(folder.glob("*/model_config.yaml"))
    if not found:
        raise ConfigError(
            f"{folder} has no recipes; give a checkout of Megatron-LM, or a folder of its recipes "
            "alone, and a --kind"
        )
    return found


def make_corpus(folder: Path) -> str:
    """400 documents of 5 to 400 bytes, of unequal lengths; the same at each call. Its prefix."""
    import numpy as np

    from megatron_wlb.data.build_corpus import build_corpus

    generator = np.random.RandomState(5)
    with (folder / "texts.jsonl").open("w") as stream:
        for length in np.clip(generator.lognormal(4.0, 1.1, 400), 5, 400).astype(int):
            words = generator.choice(["ab", "cde", "fgh ", "the ", "sun ", "x. "], length)
            stream.write(json.dumps({"text": "".join(words)[:length]}) + "\n")
    build_corpus([folder / "texts.jsonl"], folder / "texts")
    return str(folder / "texts")


def _variables(folder: Path) -> dict[str, str]:
    """What the recipes' variables are here; they load from where they save, as a new run may."""
    return {
        "DATA_PATH": str(folder), "DATA_CACHE_PATH": "cache", "REPEAT": "1",
        "CHECKPOINT_SAVE_PATH": "checkpoints", "CHECKPOINT_LOAD_PATH": "checkpoints",
        "TENSORBOARD_PATH": "board", "INFERENCE_OUTPUT_PATH": "out",
        "WANDB_SAVE_PATH": "wandb", "WANDB_EXPERIMENT": "recipe",
        "DATA_BLEND": "corpus", "TOKENIZER_TYPE": "TikTokenizer", "TOKENIZER_MODEL_PATH": "none",
    }  # fmt: skip


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _number(value: float | None) -> float:
    return math.nan if value is None else value
