"""What a training command line will do, before a device is taken: layout, S_max, memory, time.

Everything here is *modelled*: memory by :class:`~megatron_wlb.cost.MemoryModel`, times by
:class:`~megatron_wlb.cost.AnalyticModel` and the simulator of whole steps, on the documents of the
run's corpora, or drawn from a named distribution. Context parallelism divides attention perfectly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_wlb.cost.memory import GIB
from megatron_wlb.data.blend import Blend
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.corpus import CorpusInfo
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError, refuse_all
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning import from_config as planning
from megatron_wlb.planning import guards
from megatron_wlb.planning.packing import PackingSettings, kind_of
from megatron_wlb.planning.run import Documents, Run
from megatron_wlb.planning.slicing.cut import Slicer
from megatron_wlb.settings.config import Config
from megatron_wlb.simulator.step import Simulator

WARM_UP_STEPS, NUM_STEPS, SPARE_STEPS = 10, 40, 10
"""Steps in which delay queues fill, over which times are averaged, and that are never reached."""
DISTRIBUTION = "reference"
DEFAULT_VOCAB_SIZE = 32000
"""The vocabulary of settings that name none, where no corpus does either."""


@dataclass(frozen=True)
class Forecast:
    """What one training command line does on one kind of device. Times and bytes are modelled."""

    parameters: int
    num_devices: int
    tp_size: int
    cp_size: int
    pp_size: int
    vpp_size: int
    dp_size: int
    ep_size: int
    num_micro_batches: int
    """Micro-batches of each data-parallel rank."""
    window: int
    max_tokens: int
    """S_max."""
    fitting_tokens: int
    """The largest S_max that would fit, but at most the tokens of a step."""
    limit_gib: float
    state_gib: float
    """Weights, gradients and optimizer, on the pipeline rank that needs most."""
    peak_gib: float
    """The most that a rank holds, where all micro-batches in flight are S_max long."""
    step_ms: float
    """Mean over steps of ``documents``."""
    tokens_per_s: float
    flops_per_s: float
    """FLOPs of the model a second, of all devices: its work."""
    speedup: float
    """Work a second against ``original`` on the same documents. Tokens would
    not do: where it cuts documents, its tokens are less work."""
    net_speedup: float
    """The same against ``original`` with all that stock Megatron may overlap."""
    original_fits: bool
    """Whether ``original`` fits memory."""
    documents: str
    """Where their lengths are from."""
    packing: str
    units: int | None = None
    """Micro-batches that `slim` cuts a rank's step into."""


def forecast(
    config: Config, num_devices: int, known: Sequence[Forecast] = (), *, fits: bool = False
) -> Forecast:
    """What ``config`` will do on so many devices of its ``--wlb-hardware``.

    Documents are those of ``--data-path`` where its files exist, else drawn from
    :data:`DISTRIBUTION`. Forecasts that are ``known`` differ in the packing alone. With ``fits``,
    S_max that is not given is lowered to what fits.

    Raises:
        ConfigError: settings that the run itself would refuse, or memory that does not suffice for
            S_max, or not even for a window.
        CorpusError: ``--data-path`` names files that are damaged.
    """
    window = config.data.seq_length
    refuse_all(guards.refusals(config, num_devices))
    num_micro_batches = guards.check_micro_batches(config, num_devices)
    documents, source, vocab_size = _documents(config)
    padded = planning.padded_vocab_size(config, vocab_size)
    run = planning.run_of(config, padded, guards.data_parallel_size(config, num_devices))
    # As on a GPU, and once batches have grown.
    run = dataclasses.replace(run.executed(kernels="fused"), ramp=None)
    row = run.micro_batch_tokens
    layout, memory, limit_gib = run.parallelism, run.memory, run.limit_gib
    stages = range(layout.pp_size)
    max_tokens = config.wlb.wlb_max_tokens
    units = None
    if kind_of(config.wlb.wlb_packing).slices:
        fitting = max_tokens = max_tokens or 2 * row
        units, peak_gib = _units(config, run, source, max_tokens)
    else:
        most = run.max_tokens()
        fitting = min(most, run.step_tokens)
        if max_tokens is None:
            windows = 1 if kind_of(config.wlb.wlb_packing).windows else 2
            max_tokens = fitting if config.wlb.wlb_memory_gib else windows * row
            if fits:
                max_tokens = max(row, min(max_tokens, most))
        lengths = [max_tokens] * num_micro_batches
        peak_gib = max(memory.peak_bytes(rank, lengths) for rank in stages) / GIB
        if most < max(max_tokens, row):
            name = "S_max (--wlb-max-tokens)" if most >= row else "--seq-length"
            if most < row and run.micro_batch_size > 1:
                name = "--micro-batch-size"
            raise ConfigError(
                f"micro-batches of {max_tokens} tokens need {peak_gib:.1f} GiB (modelled), above "
                f"the {limit_gib:.1f} GiB that {config.wlb.wlb_hardware} has for tensors; {most} "
                f"tokens fit: lower {name}, recompute activations, or use more TP, CP or PP"
            )
    planned = PackingSettings.of_config(config.wlb, max_tokens)
    original = PackingSettings("original", max_tokens)
    step_ms, tokens_per_s, flops_per_s = _simulate(config, run, planned, source)
    if known:
        original_flops_per_s = known[0].flops_per_s / known[0].speedup
        stock_flops_per_s = known[0].flops_per_s / known[0].net_speedup
    else:
        *_, original_flops_per_s = _simulate(config, run, original, source)
        *_, stock_flops_per_s = _simulate(config, run.overlapped, original, source)
    return Forecast(
        parameters=memory.total_parameters,
        num_devices=num_devices,
        tp_size=layout.tp_size,
        cp_size=layout.cp_size,
        pp_size=layout.pp_size,
        vpp_size=layout.vpp_size,
        dp_size=layout.dp_size,
        ep_size=layout.ep_size,
        num_micro_batches=num_micro_batches,
        window=window,
        max_tokens=max_tokens,
        fitting_tokens=fitting,
        limit_gib=limit_gib,
        state_gib=max(memory.state_bytes(r).total for r in stages) / GIB,
        peak_gib=peak_gib,
        step_ms=step_ms,
        tokens_per_s=tokens_per_s,
        flops_per_s=flops_per_s,
        speedup=flops_per_s / original_flops_per_s,
        net_speedup=flops_per_s / stock_flops_per_s,
        original_fits=run.fits_windows,
        documents=documents,
        packing=planned.name,
        units=units,
    )


def _units(config: Config, run: Run, source: Documents, max_tokens: int) -> tuple[int, float]:
    """Micro-batches that `slim` cuts a rank's first step into, and the most GiB that a step needs:
    the first, or one of few longest and many short documents.

    Raises :class:`ConfigError` where that is too much.
    """
    packing = PackingSettings.of_config(config.wlb, max_tokens)
    seed, long_documents = config.training.seed, config.wlb.wlb_long_documents
    documents = run.workload(source, seed=seed, long_documents=long_documents)
    planner = documents.planner(packing, 1, costs=run.costs)
    assert isinstance(planner.slicing, Slicer)
    plan = planner.next_plan()
    planner.slicing.check_room()
    peak_gib = planner.slicing.peak_bytes / GIB
    simulator = Simulator(run.costs, run.parallelism, memory=run.memory)
    if plan is not None:
        peaks = (held.peak_bytes / GIB for held in simulator.plan_memory(plan))
        peak_gib = max(peak_gib, *peaks)
    return planner.slicing.num_units or 1, peak_gib


def _simulate(
    config: Config, run: Run, packing: PackingSettings, source: Documents
) -> tuple[float, float, float]:
    """Time of a simulated step in ms, tokens and FLOPs a second."""
    simulator = Simulator(run.costs, run.parallelism)
    seed, long_documents = config.training.seed, config.wlb.wlb_long_documents
    workload = run.workload(source, seed=seed, long_documents=long_documents)
    if run.parallelism.cp_size > 1:
        run.check_reach(workload.longest_segment(packing))
    planner = workload.planner(
        packing,
        WARM_UP_STEPS + NUM_STEPS + SPARE_STEPS,
        costs=planning.shaping_costs(config, run) if packing.simulated else run.costs,
    )
    plans: list[StepPlan] = []
    while len(plans) < WARM_UP_STEPS + NUM_STEPS and (plan := planner.next_plan()) is not None:
        plans.append(plan)
    plans = plans[WARM_UP_STEPS:] or plans  # of data that end before
    total_us = sum(simulator.step(plan).step_us for plan in plans)
    num_flops = run.flops(d.length for plan in plans for d in plan.documents)
    num_tokens = sum(plan.num_tokens for plan in plans)
    return total_us / len(plans) / 1e3, num_tokens / total_us * 1e6, num_flops / total_us * 1e6


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
