"""Asks the rules of settings before any work is lost: :mod:`megatron_wlb.planning.rules`.

Each refusal names the value, the limit and the remedy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice

from megatron_wlb.errors import ConfigError, refuse_all
from megatron_wlb.planning.from_config import without_growth
from megatron_wlb.planning.packing import kind_of, reads, unread
from megatron_wlb.planning.refusal import lines
from megatron_wlb.planning.rules import ALONE, BATCHES, GENERAL, LAYOUT, RULES, Facts
from megatron_wlb.planning.slicing.units import check_units, slice_multiple
from megatron_wlb.settings.config import Config, WlbConfig, flag_of, table

logger = logging.getLogger(__name__)

NCCL_ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS")
"""What NCCL_ALGO may be in Megatron's deterministic mode."""


def check(config: Config, world_size: int) -> None:
    """Checks settings against each other and against the number of processes; warns of those that
    change nothing.

    Raises :class:`ConfigError` of all that cannot run, a line each.
    """
    refuse_all(refusals(config, world_size))
    values = config.flat()
    for name, needed in _without_effect(config, world_size).items():
        value = values[name]
        words = [flag_of(name), *map(str, value if isinstance(value, list | tuple) else [value])]
        given = words[0] if value is True else " ".join(words)
        logger.warning("%s has no effect: it counts only with %s", given, needed)
    w = config.wlb
    has_use = w.wlb_long_documents == "slice" or w.wlb_memory_gib or w.wlb_host_gib
    alone = config.parallel.pipeline_model_parallel_size == 1 and w.wlb_strategies is None
    if kind_of(w.wlb_packing).slices and alone and not has_use:
        logger.warning(
            "--wlb-packing %s without a pipeline gains nothing over hold; take that, unless memory "
            "has no room for whole documents, or those longer than the window are to be trained "
            "whole (--wlb-long-documents slice)",
            w.wlb_packing,
        )


def _without_effect(config: Config, world_size: int) -> dict[str, str]:
    """Settings of ours that are not the default's and change nothing: what they count with."""
    w, p, default = config.wlb, config.parallel, WlbConfig()
    found = unread(w)
    if w.wlb_strategies is not None:  # whose replicas have layouts of their own
        return found | ({"wlb_host_gib": "one layout for all steps"} if w.wlb_host_gib else {})
    has_stages, has_context = p.pipeline_model_parallel_size > 1, p.context_parallel_size > 1
    tables = has_context or w.wlb_cost != "analytic"
    pipeline = "--pipeline-model-parallel-size of at least 2"
    hosts = reads(w.wlb_packing, "recompute") and w.wlb_recompute == "auto"
    hosts &= config.training.recompute_granularity is None and not p.use_torch_fsdp2
    for name, counts, needed in (
        ("wlb_shape", has_stages, pipeline),
        ("wlb_micro_batches", has_stages, pipeline),
        ("wlb_verify_shapes", has_stages, pipeline),
        ("wlb_cp_sharding", has_context, "--context-parallel-size of at least 2"),
        (
            "wlb_host_gib",
            hosts,
            "--wlb-packing slim, --wlb-recompute auto and nothing recomputed "
            "in all micro-batches, without FSDP2",
        ),
        ("wlb_slice_cache", has_context, "--context-parallel-size of at least 2"),
        ("wlb_dp_merge", data_parallel_size(config, world_size) > 1, "several data-parallel ranks"),
        ("wlb_expert_imbalance", config.model.num_experts is not None, "--num-experts"),
        ("wlb_cost_extrapolate", tables, "--wlb-cost measured or FILE, or context parallelism"),
    ):
        if not counts and getattr(w, name) != getattr(default, name):
            found.setdefault(name, needed)
    return found


def refusals(config: Config, world_size: int) -> Iterator[str]:
    """Lists what cannot run, each as the line that a user reads."""
    if any(_check_ranges(config)):  # all else counts with these
        yield from _check_ranges(config)
        return
    facts = Facts(config, world_size)
    layout = [*lines(LAYOUT, facts)]
    rules = [*GENERAL]
    for name, others in RULES.items():
        if facts.value(name) not in (None, False):
            rules += others
    yield from layout
    yield from lines(rules, facts)
    if not layout:
        yield from _check_batches(facts)


def check_alone(config: Config) -> None:
    """Raises :class:`ConfigError` for what only the launcher honours, a line each."""
    refuse_all(lines(ALONE, Facts(config, 1)))


def check_algorithms(environment: Mapping[str, str]) -> None:
    """Raises :class:`ConfigError` where NCCL may choose another algorithm each time."""
    algorithm = environment.get("NCCL_ALGO")
    if algorithm not in NCCL_ALGORITHMS:
        raise ConfigError(
            f"--deterministic-mode with NCCL_ALGO={algorithm}; set that in the environment to one "
            f"of {', '.join(NCCL_ALGORITHMS)}"
        )


def data_parallel_size(config: Config, world_size: int) -> int:
    """DP: what is left of the world after TP, CP and PP."""
    p = config.parallel
    return world_size // (
        p.tensor_model_parallel_size * p.context_parallel_size * p.pipeline_model_parallel_size
    )


def check_ranges(config: Config) -> None:
    """Raises :class:`ConfigError` for numbers that cannot be, whatever the others are."""
    refuse_all(_check_ranges(config))


def _check_ranges(config: Config) -> Iterator[str]:
    values = config.flat()
    for name, known in table().items():
        yield from known.beyond(flag_of(name), values[name])
    if not 0 < values["rotary_percent"] <= 1:
        yield f"--rotary-percent is {values['rotary_percent']}; give a number in (0, 1]"


def check_micro_batches(config: Config, world_size: int) -> int:
    """Micro-batches of each data-parallel rank, M.

    Of a batch that grows they are those at its end. Raises :class:`ConfigError` where micro-batch
    size × DP does not divide each batch, the interleaved schedule cannot run so many, or slices
    would be shorter than cuts are apart.
    """
    facts, w, window = Facts(config, world_size), config.wlb, config.data.seq_length
    refuse_all(_check_batches(facts))
    num_windows = facts.batch[0]
    if kind_of(w.wlb_packing).slices:
        multiple = slice_multiple(window, w.wlb_slice_multiple)
        check_units(w.wlb_units, num_windows // facts.dp * window, multiple)
    return num_windows // facts.multiple


def check_evaluation(config: Config, world_size: int) -> None:
    """Checks likewise what steps of evaluation run, by the settings of evaluations."""
    refuse_all(
        f"{refused}; these are steps of evaluation, of {config.training.global_batch_size} "
        "windows: give --eval-global-batch-size, or --eval-iters 0"
        for refused in _check_batches(Facts(without_growth(config), world_size))
    )


def _check_batches(facts: Facts) -> list[str]:
    """The first of the rules of batches that applies."""
    return [*islice(lines(BATCHES, facts), 1)]
