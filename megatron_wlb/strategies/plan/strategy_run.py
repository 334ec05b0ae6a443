"""Settings of a training run with ``--wlb-strategies`` -> its strategies, and their planners.

Equal on all ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from megatron_wlb.cost import Execution, ModelShape, load_hardware
from megatron_wlb.cost.cost_files import read_costs
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.errors import ConfigError, refuse_all
from megatron_wlb.plan.sharding import Selector
from megatron_wlb.planning import guards
from megatron_wlb.planning.balance.replica_costs import Scheme
from megatron_wlb.planning.from_config import (
    Split,
    cp_selector,
    model_shape,
    padded_vocab_size,
    recompute,
    run_of,
)
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.packing.settings import sliced
from megatron_wlb.planning.planner import Stream
from megatron_wlb.settings.config import Config, flag_of, table
from megatron_wlb.strategies.plan.assigner import Assigner, Candidate, StrategyPlanner
from megatron_wlb.strategies.plan.propose import StrategySpace, propose
from megatron_wlb.strategies.plan.strategy import Layout, Strategy, read_strategies

AUTO = "auto"
SAMPLE_STEPS = 16
"""Steps from which ``auto`` proposes strategies."""

_OF_PACKINGS = (
    "micro_batch_size wlb_packing wlb_max_tokens wlb_max_step_tokens wlb_shape wlb_look_ahead "
    "wlb_micro_batches"
)
_REASONS = {
    **dict.fromkeys(
        (
            *(n for n, known in table().items() if known.layout and not n.startswith("expert_")),
            "microbatch_group_size_per_virtual_pipeline_stage",
            "sequence_parallel",
        ),
        "each replica's layout is in the strategy",
    ),
    **dict.fromkeys(
        _OF_PACKINGS.split(), "each replica packs its documents by its own memory and time"
    ),
}
"""Settings that must be as they are if not given, and why."""


def check(config: Config) -> None:
    """Raises :class:`ConfigError` for settings that strategies cannot run with, a line each."""
    given, default = config.flat(), Config().flat()
    reasons = {name: why for name, why in _REASONS.items() if given[name] != default[name]}
    if given["wlb_cost"] == "measured":
        reasons["wlb_cost"] = "what is timed at start is of one layout; give a folder of tables"
    if "global_aux_loss" in given["moe_router_load_balancing_type"]:
        reasons["moe_router_load_balancing_type"] = "replicas would meet in each pass"
    refuse_all(
        f"{flag_of(name)} does not work with --wlb-strategies: {reason}; leave one of them out"
        for name, reason in reasons.items()
    )


def check_ranks(config: Config, num_ranks: int) -> None:
    """Raises :class:`ConfigError` for strategies of another number of devices, and a batch that
    does not divide over so many.
    """
    _read(config, num_ranks)
    batch = config.training.global_batch_size
    if batch % num_ranks:
        raise ConfigError(
            f"--global-batch-size is {batch}, but with --wlb-strategies Megatron takes each of the "
            f"{num_ranks} processes for a data-parallel rank; give a multiple of {num_ranks}"
        )


def _read(config: Config, num_ranks: int) -> tuple[Strategy, ...]:
    """The strategies of a file; none for those that are proposed."""
    named = config.wlb.wlb_strategies
    if named in (AUTO, None):
        return ()
    strategies = read_strategies(named)
    found = strategies[0].cluster.num_devices
    if found != num_ranks:
        raise ConfigError(
            f"--wlb-strategies {named} is for {found} devices, but {num_ranks} processes were "
            "started; start as many, or give strategies for as many"
        )
    return strategies


def undivided(config: Config) -> Config:
    """The settings of a run on one rank: what all layouts have in common. Replicas run as many
    micro-batches as they like.
    """
    return _replica_config(config, Scheme())


def check_shape(shape: ModelShape, said: str) -> None:
    """Raises :class:`ConfigError`, a line each, for what of a model no run with strategies has;
    ``said`` is how the user named it.
    """
    if any(layer.precisions for _, layer in shape.all_runs):
        raise ConfigError(
            f"{said} has {flag_of('fp8_format')}, whose rates the search for strategies does not "
            "know; give another model, or leave --strategies out"
        )


@dataclass(frozen=True)
class StrategyRun:
    """A run's strategies; its vocabulary is padded for each of them."""

    config: Config
    """The settings, with a vocabulary padded for every strategy."""
    candidates: tuple[Candidate, ...]
    vocab_size: int
    """The tokenizer's."""

    @classmethod
    def of(cls, config: Config, corpora: Corpora, num_ranks: int) -> StrategyRun:
        """Reads the strategies of ``--wlb-strategies``, or proposes them.

        Raises :class:`ConfigError` for strategies of another number of devices, layouts that the
        model does not divide over, documents that none takes, and all that :func:`check` refuses.
        """
        check(config)
        named, window = config.wlb.wlb_strategies, config.data.seq_length
        hardware = load_hardware(config.wlb.wlb_hardware)
        strategies = _read(config, num_ranks)
        if not strategies:
            sizes: Iterable[int] = range(1, min(num_ranks, hardware.devices_per_node) + 1)
            sizes = [size for size in sizes if not size & (size - 1)]
        else:
            sizes = {r.scheme.tp_size for s in strategies for r in s.replicas}
        config = _with_vocabulary(config, math.lcm(*sizes))
        shape = model_shape(config, padded_vocab_size(config, corpora.vocab_size))
        folder, extrapolate = config.wlb.wlb_cost, config.wlb.wlb_cost_extrapolate
        measured = None
        if folder != "analytic":
            measured = read_costs(folder, "--wlb-cost", shape, extrapolate=extrapolate)
        space = StrategySpace(
            shape,
            Execution(recompute=recompute(config), bf16=config.training.bf16),
            hardware,
            num_ranks,
            config.wlb.wlb_memory_gib,
            ep_size=config.parallel.expert_model_parallel_size,
            etp_size=config.parallel.expert_tensor_parallel_size,
            longest=window,
            measured=measured,
            schemes=() if strategies else None,
        )
        if not strategies:
            schemes = [scheme for scheme in space.offered() if not any(_refusals(config, scheme))]
            space = dataclasses.replace(space, schemes=tuple(schemes))
            steps = [*islice(_lengths(_stream(config, Split(corpora, "train"))), SAMPLE_STEPS)]
            run = cls(config, propose(space, steps, longest=window).candidates, corpora.vocab_size)
        else:
            refuse_all(
                f"--wlb-strategies {named}, {scheme}: {refusal}"
                for scheme in dict.fromkeys(r.scheme for s in strategies for r in s.replicas)
                for refusal in _refusals(config, scheme)
            )
            try:
                candidates = tuple(map(space.candidate, strategies))
            except ConfigError as error:
                raise ConfigError(f"--wlb-strategies {named}: {error}") from None
            run = cls(config, candidates, corpora.vocab_size)
        if run.assigner.max_tokens < window:
            raise ConfigError(
                f"--wlb-strategies {named} takes documents of up to {run.assigner.max_tokens} "
                f"tokens, but --seq-length is {window}; add a strategy that takes longer ones, or "
                "use a shorter window"
            )
        return run

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return tuple(candidate.strategy for candidate in self.candidates)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Each replica's, once; the first is that of the first strategy's first one."""
        return tuple(dict.fromkeys(r.layout for s in self.strategies for r in s.replicas))

    @cached_property
    def assigner(self) -> Assigner:
        return Assigner(self.candidates)

    @property
    def padded_vocab_size(self) -> int:
        return padded_vocab_size(self.config, self.vocab_size)

    def replica_config(self, scheme: Scheme) -> Config:
        """Settings of a run whose layout is one such replica."""
        return _replica_config(self.config, scheme)

    def expert_sizes(self, scheme: Scheme) -> tuple[int, int]:
        """EP and expert TP of a replica."""
        p = self.config.parallel
        return scheme.expert_sizes(p.expert_model_parallel_size, p.expert_tensor_parallel_size)

    def room_bytes(self, strategy: Strategy, rank: int) -> float:
        """What the exchange may take of a rank's memory in steps of a strategy."""
        candidate = self.candidates[self.strategies.index(strategy)]
        for replica in strategy.replicas:
            for pp_rank, ranks in enumerate(replica.stages):
                if rank in ranks:
                    return candidate.costs[replica.kind].room_bytes(pp_rank)
        return min(costs.room_bytes(None) for costs, _ in candidate.groups)

    def planner(self, corpora: Corpora, split: str = "train") -> StrategyPlanner:
        """Makes a planner of the documents of a split, before its first step."""
        source = Split(corpora, split, None if split == "train" else 1)
        return StrategyPlanner(_stream(self.config, source), self.assigner, self.selectors)

    @cached_property
    def selectors(self) -> dict[Scheme, Selector]:
        """What chooses how replicas with context parallelism divide micro-batches, by scheme."""
        found = {}
        for scheme in dict.fromkeys(scheme for scheme, _ in self.layouts):
            own = _alone(self.config, scheme)
            run = run_of(own, self.padded_vocab_size, 1)
            selector = cp_selector(own, run, own.data.seq_length)
            if selector is not None:
                found[scheme] = selector
        return found


def _refusals(config: Config, scheme: Scheme) -> Iterator[str]:
    """Why a replica of the scheme could not run."""
    return guards.refusals(_alone(config, scheme), scheme.num_ranks)


def _alone(config: Config, scheme: Scheme) -> Config:
    """Settings of a replica with as many windows as any pipeline of it runs, whatever the run has:
    the step's documents are divided over replicas.
    """
    training = dataclasses.replace(config.training, global_batch_size=scheme.pp_size)
    return dataclasses.replace(_replica_config(config, scheme), training=training)


def _replica_config(config: Config, scheme: Scheme) -> Config:
    p = config.parallel
    ep_size, etp_size = scheme.expert_sizes(
        p.expert_model_parallel_size, p.expert_tensor_parallel_size
    )
    parallel = dataclasses.replace(
        p,
        expert_model_parallel_size=ep_size,
        expert_tensor_parallel_size=etp_size,
        tensor_model_parallel_size=scheme.tp_size,
        context_parallel_size=scheme.cp_size,
        pipeline_model_parallel_size=scheme.pp_size,
        num_virtual_stages_per_pipeline_rank=scheme.vpp_size if scheme.vpp_size > 1 else None,
        sequence_parallel=scheme.tp_size > 1,
    )
    multiple = config.model.make_vocab_size_divisible_by // scheme.tp_size
    model = dataclasses.replace(config.model, make_vocab_size_divisible_by=multiple)
    packing = sliced()[0] if scheme.sliced else config.wlb.wlb_packing
    wlb = dataclasses.replace(config.wlb, wlb_packing=packing)
    return dataclasses.replace(config, parallel=parallel, model=model, wlb=wlb)


def _with_vocabulary(config: Config, tp_size: int) -> Config:
    """Settings whose vocabulary is padded as for TP of this size."""
    multiple = config.model.make_vocab_size_divisible_by * tp_size
    model = dataclasses.replace(config.model, make_vocab_size_divisible_by=multiple)
    return dataclasses.replace(config, model=model)


def _stream(config: Config, source: Split) -> Stream:
    """Gives the documents of steps as a run without strategies has them."""
    run = run_of(undivided(config), padded_vocab_size(config, source.corpora.vocab_size), 1)
    documents = run.workload(
        source, seed=config.training.seed, long_documents=config.wlb.wlb_long_documents
    )
    return documents.stream(PackingSettings("hold", 2 * config.data.seq_length), 0)


def _lengths(stream: Stream) -> Iterator[list[int]]:
    """Gives the lengths of the documents of each step that has some."""
    while not stream.exhausted:
        if documents := stream.next_step():
            yield [document.length for document in documents]
