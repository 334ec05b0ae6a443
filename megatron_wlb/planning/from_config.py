"""Settings of a training run -> its :class:`~megatron_wlb.planning.run.Run`, cost and planners.

Equal on all ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_wlb.cost import (
    AnalyticModel,
    Cost,
    Execution,
    ModelShape,
    Parallelism,
    Recompute,
    load_hardware,
)
from megatron_wlb.cost.cost_files import read_cost
from megatron_wlb.cost.fp8 import fp8_products
from megatron_wlb.cost.hardware import LEAST, MOST
from megatron_wlb.cost.layers import Precisions, slices
from megatron_wlb.cost.parts import Latent
from megatron_wlb.cost.workspace import FP32
from megatron_wlb.data.blend import BlendedStream
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.documents import DocumentStream, LongDocuments
from megatron_wlb.data.ramp import Ramp
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan.sharding import Selector
from megatron_wlb.planning.layer_patterns import with_experts, with_pattern, with_windows
from megatron_wlb.planning.packing import PackingSettings, kind_of
from megatron_wlb.planning.packing.original import count_cut
from megatron_wlb.planning.planner import Planner, Stream
from megatron_wlb.planning.run import Run
from megatron_wlb.planning.slicing.cut import Slicer
from megatron_wlb.reading import real_number
from megatron_wlb.settings.config import Config

logger = logging.getLogger(__name__)

MEMORY_SLACK = 0.1
"""Share of a machine's memory by which a device may have other."""
MOST_COUNTED = 100_000
"""Conversations that are looked at to say how many are cut."""


def model_shape(config: Config, padded_vocab_size: int) -> ModelShape:
    """The sizes that the model's FLOPs and memory depend on."""
    m = config.model
    rows = m.max_position_embeddings or config.data.seq_length
    latent = None
    if m.multi_latent_attention:
        sizes = {f.name: getattr(m, f.name) for f in dataclasses.fields(Latent)}
        latent = Latent(**sizes)
    rotates = m.position_embedding_type in ("rope", "yarn") and latent is None
    shape = ModelShape(
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size or 4 * m.hidden_size,
        num_layers=m.num_layers,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.num_query_groups if m.group_query_attention else m.num_attention_heads,
        kv_channels=(
            latent.key_dim if latent else m.kv_channels or m.hidden_size // m.num_attention_heads
        ),
        vocab_size=padded_vocab_size,
        gated=m.swiglu,
        rms_norm=m.normalization == "RMSNorm",
        linear_bias=not m.disable_bias_linear,
        qkv_bias=m.add_qkv_bias,
        qk_norm=m.qk_layernorm,
        output_gate=m.attention_output_gate,
        rotary_percent=m.rotary_percent if rotates else 0.0,
        learned_positions=rows if m.position_embedding_type == "learned_absolute" else 0,
        tied_embeddings=not m.untie_embeddings_and_output_weights,
        dropout=m.hidden_dropout > 0,
        latent=latent,
    )
    if (pattern := config.parallel.split.pattern) is not None:
        shape = with_pattern(shape, m, pattern)
    else:
        shape = with_experts(with_windows(shape, m), m).with_predictors(m.mtp_num_layers or 0)
    return shape if config.training.fp8_format is None else _in_fp8(config, shape)


def _in_fp8(config: Config, shape: ModelShape) -> ModelShape:
    """``shape`` with matrix products in FP8, but for first and last layers that stay out of it."""
    t, num = config.training, shape.num_layers
    element_bytes = 2 if t.bf16 else FP32
    matrix = fp8_products(
        t.fp8_recipe, param_gather=t.fp8_param_gather, element_bytes=element_bytes
    )
    precisions = dataclasses.replace(Precisions.same(element_bytes), matrix=matrix)
    outside = t.num_layers_at_start_in_bf16, t.num_layers_at_end_in_bf16
    first, last = outside if t.first_last_layers_bf16 else (0, 0)
    first = min(first, num)
    last = min(last, num - first)
    head, inner, tail = slices(shape.runs, (first, num - first - last, last))
    within, further = (
        tuple((n, dataclasses.replace(layer, precisions=precisions)) for n, layer in runs)
        for runs in (inner, shape.predictors)  # which Megatron leaves out of nothing
    )
    return dataclasses.replace(shape, layers=(*head, *within, *tail), predictors=further)


def parallelism(config: Config, dp_size: int = 1) -> Parallelism:
    """Raises :class:`ConfigError` for layers that do not divide as flags say."""
    p = config.parallel
    pp_size, vpp_size = p.pipeline_model_parallel_size, p.vpp_size
    return Parallelism(
        tp_size=p.tensor_model_parallel_size,
        cp_size=p.context_parallel_size,
        pp_size=pp_size,
        vpp_size=vpp_size,
        dp_size=dp_size,
        sequence_parallel=p.sequence_parallel,
        group_size=p.microbatch_group_size_per_virtual_pipeline_stage,
        stage_layers=p.split.uneven(config.model.num_layers, pp_size, vpp_size),
        ep_size=p.expert_model_parallel_size,
        etp_size=p.expert_tensor_parallel_size,
    )


def recompute(config: Config) -> Recompute:
    t = config.training
    return Recompute(t.recompute_granularity, t.recompute_method, t.recompute_num_layers)


def batch(config: Config, dp_size: int) -> tuple[int, Ramp | None]:
    """Windows that arrive in a step, and how they come to be so many, if not from the start.

    A batch of one size is rounded down if ``--decrease-batch-size-if-needed`` is given. Raises
    :class:`ConfigError` for a ramp that is none.
    """
    t = config.training
    if t.step_batch_size_schedule is not None:
        growing = Ramp.schedule(t.step_batch_size_schedule, config.data.seq_length)
        return growing.sizes[-1], growing
    multiple = t.micro_batch_size * dp_size if t.decrease_batch_size_if_needed else 1
    return t.global_batch_size // multiple * multiple, None


def execution(config: Config, dp_size: int = 1) -> Execution:
    """How these settings execute a model.

    Its memory is what the modules of this runtime keep on the CPU; with nccl as backend on a GPU,
    whose norms are single kernels. What attention's backward works in is counted of a kernel that
    ``--wlb-attention-kernel`` names. Raises :class:`ConfigError` for layers that do not divide.
    """
    t, wlb = config.training, config.wlb
    return Execution(
        parallelism(config, dp_size),
        recompute(config),
        bf16=t.bf16,
        optimizer=t.optimizer,
        distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        sends_once=config.model.moe_token_dispatcher_type == "flex",
        kernels="fused" if config.parallel.distributed_backend == "nccl" else "torch",
        attention_kernel=None if wlb.wlb_attention_kernel == "auto" else wlb.wlb_attention_kernel,
        num_head_groups=wlb.wlb_cp_overlap_groups,
        keep_gathered=wlb.wlb_cp_keep_gathered,
        reduce_in_fp32=wlb.wlb_cp_reduce_in_fp32,
        replicas_meet=config.replicas_meet,
        merges=config.merges,
        recomputes=not config.parallel.use_torch_fsdp2,
        host_gib=wlb.wlb_host_gib if wlb.wlb_strategies is None else 0.0,
        expert_imbalance=wlb.wlb_expert_imbalance,
    )


def run_of(
    config: Config, padded_vocab_size: int, dp_size: int, *, cost: Cost | None = None
) -> Run:
    """Describes the run of these settings; ``cost`` replaces the analytic one."""
    wlb, micro_batch_size = config.wlb, config.training.micro_batch_size
    num_windows, ramp = batch(config, dp_size)
    if wlb.wlb_memory_gib is not None:
        real_number("--wlb-memory-gib", wlb.wlb_memory_gib, LEAST, MOST)
    return Run(
        model_shape(config, padded_vocab_size),
        execution(config, dp_size),
        load_hardware(wlb.wlb_hardware),
        config.data.seq_length,
        num_windows // micro_batch_size,
        wlb.wlb_memory_gib,
        cost,
        wlb.wlb_cost_extrapolate,
        micro_batch_size,
        ramp,
    )


def known_cost(config: Config, padded_vocab_size: int) -> Cost | None:
    """Makes the cost that ``--wlb-cost`` names, or None where it must be measured.

    Raises :class:`ConfigError` for unknown hardware, and for a file that is missing, holds no cost,
    or is of another model.
    """
    named = config.wlb.wlb_cost
    if named == "measured":
        return None
    shape = model_shape(config, padded_vocab_size)
    if named == "analytic":
        hardware = load_hardware(config.wlb.wlb_hardware)
        return AnalyticModel(shape, execution(config), hardware).cost()
    extrapolate = config.wlb.wlb_cost_extrapolate
    return read_cost(named, "--wlb-cost", shape, parallelism(config), extrapolate=extrapolate)


def max_tokens(config: Config, run: Run) -> int:
    """:meth:`.Run.s_max` of these settings.

    Raises :class:`ConfigError` where ``--wlb-memory-gib`` is given, and ``--wlb-max-tokens`` or not
    even the windows that a micro-batch stands for fit.
    """
    given, memory_gib = config.wlb.wlb_max_tokens, config.wlb.wlb_memory_gib
    if memory_gib is None:  # what --wlb-hardware has, wherever this runs
        run = run.executed(kernels="fused")
    found = run.s_max(config.wlb.wlb_packing, given)
    if memory_gib is None or kind_of(config.wlb.wlb_packing).slices:
        return found
    fitting, window = run.max_tokens(), run.window
    if fitting < found:
        name, wanted = ("--wlb-max-tokens", given) if given else ("--seq-length", window)
        if given is None and run.micro_batch_size > 1:
            wanted = run.micro_batch_tokens
            name = f"--micro-batch-size {run.micro_batch_size} × --seq-length {window} ="
        raise ConfigError(
            f"micro-batches of {name} {wanted} tokens do not fit --wlb-memory-gib {memory_gib:g}, "
            f"which {fitting} tokens do; recompute activations, use more TP or PP, or lower {name}"
        )
    if given is None:
        logger.info("S_max is %d tokens, which fit %g GiB", found, memory_gib)
    return found


def padded_vocab_size(config: Config, vocab_size: int) -> int:
    """``vocab_size`` rounded up as Megatron does, so that TP divides it."""
    multiple = (
        config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    )
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class Split:
    """The documents of a split, as :class:`~megatron_wlb.planning.run.Documents`."""

    corpora: Corpora
    name: str
    num_epochs: int | None = 1
    """None: one after the other without an end."""

    def longest(self, window: int) -> int:
        return max(int(corpus.lengths.max()) for corpus in self.corpora.corpora)

    def stream(
        self,
        num_steps: int,
        *,
        window: int,
        longest: int,
        windows_a_step: int,
        seed: int,
        long_documents: LongDocuments,
        ramp: Ramp | None = None,
    ) -> Stream:
        """Gives all, by their weights; those with weights never end."""
        corpora, weights = self.corpora, self.corpora.weights.get(self.name)
        make: Callable[..., DocumentStream | BlendedStream]
        if weights is None:
            make = partial(DocumentStream, num_epochs=self.num_epochs)
        else:
            make = partial(BlendedStream, weights=weights)
        return make(
            [corpus.lengths for corpus in corpora.corpora],
            ranges=corpora.ranges[self.name],
            window=longest,
            step_tokens=windows_a_step * window,
            seed=seed,
            long_documents=long_documents,
            names=[corpus.prefix for corpus in corpora.corpora],
            ramp=ramp,
            targets=[corpus.targets for corpus in corpora.corpora],
            loss_mean=corpora.loss_mean,
        )


def make_planner(
    config: Config, corpora: Corpora, cost: Cost, dp_size: int, num_epochs: int | None = None
) -> Planner:
    """Makes the planner of training steps, before its first one; ``num_epochs`` None never ends."""
    return _planner(config, Split(corpora, "train", num_epochs), cost, dp_size)


def without_growth(config: Config) -> Config:
    """Settings whose batches are the global one from the start."""
    training = dataclasses.replace(config.training, step_batch_size_schedule=None)
    return dataclasses.replace(config, training=training)


def make_evaluation_planner(
    config: Config, corpora: Corpora, cost: Cost, dp_size: int, split: str = "valid"
) -> Planner:
    """Plans the validation documents (or those of ``split``), the same ones at each evaluation.

    Balanced and whole, but nothing is held back for balance, so that each evaluation is of the
    documents that arrive in its steps. Their batches are the global one from the start.
    """
    config = without_growth(config)
    if not kind_of(config.wlb.wlb_packing).slices:  # which holds back nothing as it is
        wlb = dataclasses.replace(
            config.wlb,
            wlb_packing="hold",
            wlb_hold_tau=math.inf,
            wlb_look_ahead=0,
            wlb_shape="off",
            wlb_micro_batches="fixed",
        )
        config = dataclasses.replace(config, wlb=wlb)
    return _planner(config, Split(corpora, split), cost, dp_size)


def _planner(config: Config, split: Split, cost: Cost, dp_size: int) -> Planner:
    padded = padded_vocab_size(config, split.corpora.vocab_size)
    run = run_of(config, padded, dp_size, cost=cost)
    packing = PackingSettings.of_config(config.wlb, max_tokens(config, run))
    documents = run.workload(
        split, seed=config.training.seed, long_documents=config.wlb.wlb_long_documents
    )
    if packing.kind.slices:
        check_positions(config, documents.longest(packing))
    costs = run.planning_costs(config.wlb.wlb_cost == "analytic") if packing.simulated else None
    selector = cp_selector(config, run, documents.longest_segment(packing))
    planner = documents.planner(packing, costs=costs, selector=selector)
    if isinstance(planner.slicing, Slicer):
        try:
            planner.slicing.check_room()
        except ConfigError as error:
            if config.wlb.wlb_memory_gib is not None:
                raise
            logger.warning("%s", error)
    return planner


def tell_cuts(planner: Planner, num_documents: int) -> None:
    """Warns of conversations that the packing cuts at its windows, before its first step.

    Counts those of an epoch of ``num_documents``, or the first :data:`MOST_COUNTED`.
    """
    packer, stream = planner.packer, planner.stream
    if not packer.windows:
        return
    before, lengths = stream.state_dict(), list[int]()
    most = min(num_documents, MOST_COUNTED)
    while len(lengths) < most and not stream.exhausted:
        lengths += [document.length for document in stream.next_step()]
    stream.load_state_dict(before)
    num_cut = count_cut(lengths[:most], packer.limits.window)
    logger.warning(
        "--wlb-packing %s cuts %s%d of %d conversations at its windows, and a piece does not see "
        "what was before it; hold and slim cut none",
        packer.name, "" if packer.in_stream_order else "at least ", num_cut, len(lengths[:most]),
    )  # fmt: skip


def tell_memory(config: Config, has_gib: float) -> None:
    """Warns where slices are planned for another memory than the 2³⁰ bytes of a device."""
    wlb = config.wlb
    named_gib = load_hardware(wlb.wlb_hardware).memory_gib
    is_other = abs(has_gib - named_gib) > MEMORY_SLACK * named_gib
    if kind_of(wlb.wlb_packing).slices and wlb.wlb_memory_gib is None and is_other:
        logger.warning(
            "slices are planned for %.0f GiB, which %s has, but this device has %.0f GiB; name the "
            "right --wlb-hardware, or give --wlb-memory-gib",
            named_gib, wlb.wlb_hardware, has_gib,
        )  # fmt: skip


def check_positions(config: Config, longest: int) -> None:
    """Raises :class:`ConfigError` for documents that reach beyond learned positions."""
    rows = config.model.max_position_embeddings or config.data.seq_length
    if config.model.position_embedding_type == "learned_absolute" and longest > rows:
        raise ConfigError(
            f"--wlb-long-documents slice: a document has {longest} tokens, but the model learns "
            f"{rows} positions; raise --max-position-embeddings, or use "
            "--position-embedding-type rope"
        )


def cp_selector(config: Config, run: Run, longest: int) -> Selector | None:
    """Makes what chooses CP shardings of up to so many tokens of a document; None without CP.

    The log says by what. Raises :class:`ConfigError` for measured tables that end before.
    """
    if run.parallelism.cp_size == 1:
        return None
    profile = run.measured_attention
    if profile is None:
        logger.info(
            "%s has no table of %s attention with heads of %d, so CP shardings are chosen by whole "
            "tiles at its rate; `wlb profile` measures a table",
            config.wlb.wlb_hardware,
            run.dtype,
            run.shape.kv_channels,
        )
    else:
        logger.info(
            "CP shardings are chosen by measured %s attention (%s)", profile.kernel, profile.machine
        )
    run.check_reach(longest)  # now, not in the step that has the first such document
    return run.selector(config.wlb.wlb_cp_sharding)
