"""What a training command line will do, before a device is taken: layout, S_max, memory, time.

Memory is *modelled*, and steps are those of :func:`~megatron_wlb.simulator.trial.trial`, on the
documents of the run's corpora, or drawn from a named distribution.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_wlb.cost.memory import GIB
from megatron_wlb.data.blend import Blend
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.corpus import CorpusInfo
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError, refuse_all
from megatron_wlb.planning import from_config as planning
from megatron_wlb.planning import guards
from megatron_wlb.planning.models import DEFAULT_VOCAB_SIZE
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Documents, Run
from megatron_wlb.settings.config import Config
from megatron_wlb.simulator.baseline import Baseline, baseline, row
from megatron_wlb.simulator.trial import Outcome, Steps, trial

DISTRIBUTION = "reference"


@dataclass(frozen=True)
class Command:
    """What a training command line runs on one kind of device."""

    config: Config
    run: Run
    steps: Steps
    documents: str
    """Where their lengths are from."""

    @classmethod
    def of(cls, config: Config, num_devices: int) -> Command:
        """Documents are those of ``--data-path`` where its files exist, else drawn from
        :data:`DISTRIBUTION`.

        Raises :class:`ConfigError` for settings that the run itself would refuse, and
        :class:`CorpusError` where ``--data-path`` names files that are damaged.
        """
        refuse_all(guards.refusals(config, num_devices))
        guards.check_micro_batches(config, num_devices)
        documents, source, vocab_size = _documents(config)
        padded = planning.padded_vocab_size(config, vocab_size)
        run = on_gpus(config, padded, guards.data_parallel_size(config, num_devices))
        if run.parallelism.cp_size == 1:  # where no measured table chooses anything
            run = dataclasses.replace(run, extrapolate=True)
        seeds, long_documents = (config.training.seed,), config.wlb.wlb_long_documents
        return cls(
            config, run, Steps(source, seeds=seeds, long_documents=long_documents), documents
        )

    @cached_property
    def setting(self) -> PackingSettings:
        """The packing, with an S_max that fits memory if none is given."""
        wlb = self.config.wlb
        return PackingSettings.of_config(wlb, self.run.s_max(wlb.wlb_packing, wlb.wlb_max_tokens))

    def baseline(self) -> Baseline:
        wlb = self.config.wlb
        return baseline(self.run, self.steps, wlb.wlb_cp_sharding, wlb.wlb_hardware)

    def outcome(self, base: Baseline) -> Outcome:
        """Raises :class:`ConfigError` for memory that does not suffice for S_max, or not even for a
        window.
        """
        if not self.setting.kind.slices:
            self._check_memory()
        if self.setting.is_plain and base.original.run == self.run:
            return base.original
        found = trial(self.run, self.setting, self.steps, self.config.wlb.wlb_cp_sharding)
        if found.out_of_memory:
            raise ConfigError(found.out_of_memory)
        return found

    @property
    def most_gib(self) -> float:
        """The most that a rank holds where all micro-batches in flight are S_max long."""
        memory, max_tokens = self.run.memory, self.setting.max_tokens
        lengths = [max_tokens] * self.micro_batches_a_rank
        stages = range(self.run.parallelism.pp_size)
        return max(memory.peak_bytes(rank, lengths) for rank in stages) / GIB

    @property
    def micro_batches_a_rank(self) -> int:
        return self.run.num_micro_batches // self.run.parallelism.dp_size

    def _check_memory(self) -> None:
        most, max_tokens, row_tokens = (
            self.run.max_tokens(), self.setting.max_tokens, self.run.micro_batch_tokens
        )  # fmt: skip
        if most >= max(max_tokens, row_tokens):
            return
        name = "S_max (--wlb-max-tokens)" if most >= row_tokens else "--seq-length"
        if most < row_tokens and self.run.micro_batch_size > 1:
            name = "--micro-batch-size"
        raise ConfigError(
            f"micro-batches of {max_tokens} tokens need {self.most_gib:.1f} GiB (modelled), above "
            f"the {self.run.limit_gib:.1f} GiB that {self.config.wlb.wlb_hardware} has for "
            f"tensors; {most} tokens fit: lower {name}, recompute activations, or use more TP, CP "
            "or PP"
        )


def forecast(config: Config, num_devices: int) -> dict[str, Any]:
    """What ``config`` will do on so many devices of its ``--wlb-hardware``, JSON-able: all figures
    of a trial by name, what its gains are over, and how it is laid out.

    Raises what :meth:`Command.of` and :meth:`Command.outcome` do.
    """
    command = Command.of(config, num_devices)
    base = command.baseline()
    found, run, memory = command.outcome(base), command.run, command.run.memory
    layout, stages = run.parallelism, range(run.parallelism.pp_size)
    slices = command.setting.kind.slices
    return {
        **layout.sizes,
        "parameters": memory.total_parameters,
        "num_devices": num_devices,
        "micro_batches_a_rank": command.micro_batches_a_rank,
        "fitting_tokens": command.setting.max_tokens
        if slices
        else min(run.max_tokens(), run.step_tokens),
        "limit_gib": run.limit_gib,
        "state_gib": max(memory.state_bytes(rank).total for rank in stages) / GIB,
        # Where all micro-batches in flight are S_max long, or slices of the longest documents.
        "most_gib": found.expected_bytes / GIB if slices else command.most_gib,
        "lengths": command.documents,
        "frame": base.as_dict(),
        "frame_said": base.said,
        **row(found, base),
    }


def on_gpus(config: Config, padded_vocab_size: int, dp_size: int) -> Run:
    """The run of these settings on GPUs, once batches have grown."""
    run = planning.run_of(config, padded_vocab_size, dp_size)
    return dataclasses.replace(run.executed(kernels="fused"), ramp=None)


def _documents(config: Config) -> tuple[str, Documents, int]:
    """Opens those of ``--data-path`` where all its files exist, or those that ``--mock-data`` makes
    up, else draws some, whose order fills windows: what they are, and their vocabulary.
    """
    data = config.data
    if data.mock_data:
        corpora = Corpora.mock(config, data.vocab_size or DEFAULT_VOCAB_SIZE)
        split = planning.Split(corpora, "train", None)
        return f"of {corpora.corpora[0].prefix}", split, corpora.vocab_size
    blend = Blend.parse(data.data_path)
    absent = [
        prefix
        for prefix in blend.prefixes
        if not all(Path(prefix + suffix).is_file() for suffix in (".bin", ".idx"))
    ]
    if blend.prefixes and not absent:
        noted = [info.vocab_size for p in blend.prefixes if (info := CorpusInfo.load(p))]
        known = data.vocab_size or max(noted, default=DEFAULT_VOCAB_SIZE)
        corpora = Corpora.of_blend(blend, data.split, known)
        split = planning.Split(corpora, "train", None)
        return f"of {', '.join(blend.prefixes)}", split, corpora.vocab_size
    return (
        f"drawn from {DISTRIBUTION!r}" + (f"; no corpus is at {absent[0]}" if absent else ""),
        LengthSource.of_distribution(DISTRIBUTION),
        data.vocab_size or DEFAULT_VOCAB_SIZE,
    )
