"""Settings -> cost and planners: the planning side of a run, equal on all ranks."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from functools import partial

import numpy as np

from megatron_wlb import sharding
from megatron_wlb.cost import (
    AnalyticModel,
    Cost,
    MemoryModel,
    ModelShape,
    Parallelism,
    ProfiledCost,
    Recompute,
    analytic_cost,
    check_model,
    cost_from_dict,
    load_hardware,
    read_cost_file,
)
from megatron_wlb.cost.attention import AnalyticAttention, AttentionLatency, nearest_profile
from megatron_wlb.cost.hardware import LEAST, MOST
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.step_costs import StageCosts, StepCosts, analytic_costs
from megatron_wlb.data.blend import BlendedStream
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.errors import ConfigError
from megatron_wlb.packing import CUTS_AT_WINDOWS, packer
from megatron_wlb.planning.planner import Planner
from megatron_wlb.planning.shaping import Shaper
from megatron_wlb.reading import real_number
from megatron_wlb.settings.config import Config
from megatron_wlb.sharding import Selector

logger = logging.getLogger(__name__)


def model_shape(config: Config, padded_vocab_size: int) -> ModelShape:
    """The sizes that the model's FLOPs and memory depend on."""
    m = config.model
    rows = m.max_position_embeddings or config.data.seq_length
    return ModelShape(
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size or 4 * m.hidden_size,
        num_layers=m.num_layers,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.num_query_groups if m.group_query_attention else m.num_attention_heads,
        kv_channels=m.kv_channels or m.hidden_size // m.num_attention_heads,
        vocab_size=padded_vocab_size,
        gated=m.swiglu,
        rms_norm=m.normalization == "RMSNorm",
        linear_bias=not m.disable_bias_linear,
        qkv_bias=m.add_qkv_bias,
        qk_norm=m.qk_layernorm,
        rotary_percent=m.rotary_percent if m.position_embedding_type in ("rope", "yarn") else 0.0,
        learned_positions=rows if m.position_embedding_type == "learned_absolute" else 0,
        tied_embeddings=not m.untie_embeddings_and_output_weights,
        dropout=m.hidden_dropout > 0,
    )


def parallelism(config: Config, dp_size: int = 1) -> Parallelism:
    """How the run divides the model."""
    p = config.parallel
    return Parallelism(
        tp_size=p.tensor_model_parallel_size,
        cp_size=p.context_parallel_size,
        pp_size=p.pipeline_model_parallel_size,
        vpp_size=p.num_virtual_stages_per_pipeline_rank or 1,
        dp_size=dp_size,
        sequence_parallel=p.sequence_parallel,
        group_size=p.microbatch_group_size_per_virtual_pipeline_stage,
    )


def recompute(config: Config) -> Recompute:
    """What the run recomputes."""
    t = config.training
    return Recompute(t.recompute_granularity, t.recompute_method, t.recompute_num_layers)


def memory_model(config: Config, padded_vocab_size: int, dp_size: int) -> MemoryModel:
    """Memory of the run on each pipeline rank.

    It counts what the modules of this runtime keep on the CPU; on a GPU, whose norms are single
    kernels, they keep less.
    """
    return MemoryModel(
        model_shape(config, padded_vocab_size),
        parallelism(config, dp_size),
        recompute(config),
        bf16=config.training.bf16,
        optimizer=config.training.optimizer,
        distributed_optimizer=config.parallel.use_distributed_optimizer,
        keep_gathered=config.wlb.wlb_cp_keep_gathered,
    )


def known_cost(config: Config, padded_vocab_size: int) -> Cost | None:
    """The cost that ``--wlb-cost`` names, or None where it must be measured.

    Raises:
        ConfigError: a file that is missing, holds no cost, or is of another model; unknown
            hardware.
    """
    named = config.wlb.wlb_cost
    if named == "measured":
        return None
    shape = model_shape(config, padded_vocab_size)
    if named == "analytic":
        return analytic_cost(
            shape,
            load_hardware(config.wlb.wlb_hardware),
            parallelism(config),
            recompute(config),
            element_bytes=2 if config.training.bf16 else 4,
        )
    try:
        cost = _cost_of_file(config, shape)
    except ConfigError as error:
        raise ConfigError(f"--wlb-cost {named}: {error}") from None
    return cost


def _cost_of_file(config: Config, shape: ModelShape) -> Cost:
    """What ``--wlb-cost FILE`` holds: coefficients, a fit or tables, for this model."""
    wlb, p = config.wlb, config.parallel
    values = read_cost_file(wlb.wlb_cost)
    inner = values.get("cost", values)
    if inner is not values and "model" in values:
        check_model(values["model"], shape)
    cost = cost_from_dict(inner)
    if isinstance(cost, ProfiledCost):
        if wlb.wlb_cost_extrapolate:
            cost = dataclasses.replace(cost, extrapolate=True)
        cost.check(shape, p.tensor_model_parallel_size, p.context_parallel_size)
    return cost


def max_tokens(config: Config, padded_vocab_size: int, dp_size: int) -> int | None:
    """S_max: ``--wlb-max-tokens``, or what fits ``--wlb-memory-gib``, or None for the default.

    Memory asks that a step fits even if all micro-batches in flight are S_max long. More than the
    tokens of a step is of no use.

    Raises:
        ConfigError: not even a window fits, or ``--wlb-max-tokens`` does not.
    """
    given, memory_gib = config.wlb.wlb_max_tokens, config.wlb.wlb_memory_gib
    if memory_gib is None:
        return given
    real_number("--wlb-memory-gib", memory_gib, LEAST, MOST)
    training, window = config.training, config.data.seq_length
    fitting = memory_model(config, padded_vocab_size, dp_size).max_tokens(
        memory_gib * GIB,
        training.global_batch_size // dp_size,
        multiple=length_multiple(config),
    )
    if fitting < (given or window):
        name, wanted = ("--seq-length", window) if given is None else ("--wlb-max-tokens", given)
        raise ConfigError(
            f"micro-batches of {name} {wanted} tokens do not fit --wlb-memory-gib {memory_gib:g}, "
            f"which {fitting} tokens do; recompute activations, use more TP or PP, or lower {name}"
        )
    return given or min(fitting, training.global_batch_size * window)


def padded_vocab_size(config: Config, vocab_size: int) -> int:
    """``vocab_size`` rounded up as Megatron does, so that TP divides it."""
    multiple = (
        config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    )
    return -(-vocab_size // multiple) * multiple


def length_multiple(config: Config) -> int:
    """What a micro-batch's padded length is a multiple of."""
    p = config.parallel
    return sharding.length_multiple(
        p.tensor_model_parallel_size, p.context_parallel_size, p.sequence_parallel
    )


def attention_latency(config: Config, shape: ModelShape) -> AttentionLatency:
    """Predicted attention of one layer on a device of this run, at ``--wlb-hardware``'s rates.

    From the tables of `wlb profile` where the file has some for such heads, else from whole tiles
    at one rate; the log says which.
    """
    hardware = load_hardware(config.wlb.wlb_hardware)
    tp_size = config.parallel.tensor_model_parallel_size
    num_heads = shape.num_attention_heads // tp_size
    dtype = "bfloat16" if config.training.bf16 else "float32"
    profile = nearest_profile(
        hardware.attention,
        num_heads=num_heads,
        num_groups=max(1, shape.num_query_groups // tp_size),
        head_dim=shape.kv_channels,
        dtype=dtype,
    )
    if profile is None:
        logger.info(
            "CP shardings are chosen by whole tiles at the rate of %s, which has no table of %s "
            "attention with heads of %d; `wlb profile` measures one",
            config.wlb.wlb_hardware,
            dtype,
            shape.kv_channels,
        )
        return AnalyticAttention(num_heads, shape.kv_channels, hardware.attention_tflops)
    logger.info(
        "CP shardings are chosen by measured %s attention (%s)", profile.kernel, profile.machine
    )
    return dataclasses.replace(profile, extrapolate=config.wlb.wlb_cost_extrapolate)


def make_selector(config: Config, padded_vocab_size: int) -> Selector | None:
    """What chooses CP shardings of documents up to the window; None without CP.

    Raises:
        ConfigError: measured tables that end before.
    """
    cp_size = config.parallel.context_parallel_size
    if cp_size == 1:
        return None
    latency = attention_latency(config, model_shape(config, padded_vocab_size))
    longest = np.array([config.data.seq_length])
    latency.chunk_us(longest, longest)  # now, not in the step that has the first such document
    return Selector(config.wlb.wlb_cp_sharding, cp_size, latency)


def make_planner(config: Config, corpora: Corpora, cost: Cost, dp_size: int) -> Planner:
    """The planner of training steps, before its first one."""
    wlb = config.wlb
    planner = _planner(config, corpora, cost, dp_size, "train", wlb.wlb_packing, wlb.wlb_hold_tau)
    if wlb.wlb_shape == "on":
        if config.parallel.pipeline_model_parallel_size == 1:
            logger.info("--wlb-shape on changes nothing: there is no pipeline to fill and drain")
        else:
            s_max = planner.packer.limits.max_tokens
            planner.shaping = make_shaper(config, corpora.vocab_size, cost, dp_size, s_max)
    return planner


def make_shaper(
    config: Config, vocab_size: int, cost: Cost, dp_size: int, max_tokens: int
) -> Shaper:
    """What shapes the run's steps: its cost, spread over the stages as the model's parts are.

    Transfers between stages take time only with ``--wlb-cost analytic``: a measured cost says
    nothing about them.
    """
    layout = parallelism(config, dp_size)
    vocab_size = padded_vocab_size(config, vocab_size)
    model = AnalyticModel(
        model_shape(config, vocab_size),
        load_hardware(config.wlb.wlb_hardware),
        layout,
        recompute(config),
        element_bytes=2 if config.training.bf16 else 4,
    )
    costs = StepCosts(StageCosts.spread(cost, model))
    if config.wlb.wlb_cost == "analytic":
        whole = analytic_costs(model, memory_model(config, vocab_size, dp_size))
        costs = dataclasses.replace(
            costs, p2p_latency_us=whole.p2p_latency_us, p2p_us_per_token=whole.p2p_us_per_token
        )
    return Shaper(
        costs,
        layout,
        num_micro_batches=config.training.global_batch_size // dp_size,
        max_tokens=max_tokens,
        window=config.data.seq_length,
    )


def make_evaluation_planner(
    config: Config, corpora: Corpora, cost: Cost, dp_size: int, split: str = "valid"
) -> Planner:
    """Plans the validation documents (or those of ``split``), the same ones at each evaluation.

    Balanced and whole, but nothing is held back for balance, so that each evaluation is of the
    documents that arrive in its steps.
    """
    return _planner(config, corpora, cost, dp_size, split, "hold", math.inf)


def _planner(
    config: Config,
    corpora: Corpora,
    cost: Cost,
    dp_size: int,
    split: str,
    packing: str,
    tau: float,
) -> Planner:
    data, training, wlb = config.data, config.training, config.wlb
    padded = padded_vocab_size(config, corpora.vocab_size)
    s_max = max_tokens(config, padded, dp_size)
    if s_max != wlb.wlb_max_tokens:
        logger.info("S_max is %d tokens, which fit %g GiB", s_max, wlb.wlb_memory_gib)
    if isinstance(cost, ProfiledCost):  # now, not in the step that has the first such micro-batch
        cost.check_reach(s_max or 2 * data.seq_length)
    lengths = [corpus.lengths for corpus in corpora.corpora]
    longest = data.seq_length
    if packing in CUTS_AT_WINDOWS and wlb.wlb_long_documents == "split":
        longest = max(longest, *(int(corpus.max()) for corpus in lengths))
    num_epochs = wlb.wlb_epochs if split == "train" else 1
    weights = corpora.weights.get(split)
    make_stream: Callable[..., DocumentStream | BlendedStream]
    if weights is None:
        make_stream = partial(DocumentStream, num_epochs=num_epochs)
    elif split == "train" and num_epochs is not None:
        raise ConfigError(
            f"--wlb-epochs is {num_epochs}, but corpora with weights end their epochs at different "
            "times; leave out the weights of --data-path, or end by --train-iters"
        )
    else:
        make_stream = partial(BlendedStream, weights=weights)
    stream = make_stream(
        lengths,
        ranges=corpora.ranges[split],
        window=longest,
        step_tokens=training.global_batch_size * data.seq_length,
        seed=training.seed,
        long_documents=wlb.wlb_long_documents,
        names=[corpus.prefix for corpus in corpora.corpora],
    )
    return Planner(
        stream,
        packer(
            packing,
            num_micro_batches=training.global_batch_size,
            window=data.seq_length,
            cost=cost,
            max_tokens=s_max,
            length_multiple=length_multiple(config),
            max_step_tokens=wlb.wlb_max_step_tokens,
            max_age=wlb.wlb_max_age,
            queue_thresholds=wlb.wlb_queue_thresholds,
            tau=tau,
            delay_price=wlb.wlb_delay_price,
            look_ahead=wlb.wlb_look_ahead if split == "train" else 0,
            fixed_batches=wlb.wlb_fixed_batches,
            fixed_grouping=wlb.wlb_fixed_grouping,
            solver_limit=wlb.wlb_solver_limit,
        ),
        cost,
        dp_size=dp_size,
        length_multiple=length_multiple(config),
        selector=make_selector(config, padded),
    )
