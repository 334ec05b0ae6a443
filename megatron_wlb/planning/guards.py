"""Combinations of settings that cannot run, refused before any work is lost.

Each guard names the value, the limit and the remedy. Some of what is refused here Megatron would
run and silently compute something else.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping

from megatron_wlb.cost import load_hardware
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError, WLBError, refuse_all
from megatron_wlb.planning import expert_rules
from megatron_wlb.planning.from_config import batch, without_growth
from megatron_wlb.planning.packing import check_numbers, check_shaping, kind_of, unread
from megatron_wlb.planning.slicing import check_units, slice_multiple
from megatron_wlb.planning.sliding import windowed_layers
from megatron_wlb.settings.config import Config, WlbConfig, flag_of, table
from megatron_wlb.settings.megatron import ModelConfig
from megatron_wlb.settings.packings import CHOSEN

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


def _without_effect(config: Config, world_size: int) -> dict[str, str]:
    """Settings of ours that are not the default's and change nothing: what they count with."""
    w, p, default = config.wlb, config.parallel, WlbConfig()
    found = unread(w)
    if w.wlb_strategies is not None:  # whose replicas have layouts of their own
        return found
    has_stages, has_context = p.pipeline_model_parallel_size > 1, p.context_parallel_size > 1
    tables = has_context or w.wlb_cost != "analytic"
    pipeline = "--pipeline-model-parallel-size of at least 2"
    for name, counts, needed in (
        ("wlb_shape", has_stages, pipeline),
        ("wlb_micro_batches", has_stages, pipeline),
        ("wlb_verify_shapes", has_stages, pipeline),
        ("wlb_cp_sharding", has_context, "--context-parallel-size of at least 2"),
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
    yield from _check_layout(config, world_size)
    yield from _check_model(config)
    yield from expert_rules.refusals(config, world_size)
    yield from _check_recompute(config)
    yield from _check_prediction(config)
    yield from _check_optimizer(config)
    yield from _check_batch(config)
    yield from _check_data(config)
    if not any(_check_layout(config, world_size)):
        yield from _check_micro_batches(config, world_size)
    try:
        # Now: the cost and the shardings need it once the model is built.
        load_hardware(config.wlb.wlb_hardware)
    except ConfigError as error:
        yield f"--wlb-hardware: {error}"


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
    for name, limits in table().items():
        if (value := values[name]) is None:
            continue
        said = f"{flag_of(name)} is {value}; it must be"
        if limits.most is not None and value > limits.most:
            yield f"{said} at most {limits.most}"
        if limits.least is not None and value < limits.least:
            yield f"{said} at least {limits.least}"
        if limits.within is not None:
            least, below = limits.within
            if not least <= value < below:  # NaN is not.
                yield f"{said} in [{least}, {below})"
    if not 0 < values["rotary_percent"] <= 1:
        yield f"--rotary-percent is {values['rotary_percent']}; it must be in (0, 1]"


def _merges(config: Config) -> bool:
    """Whether data-parallel ranks may run documents together: not where they have to run alike."""
    slices = kind_of(config.wlb.wlb_packing).slices and config.wlb.wlb_dp_merge == "auto"
    return slices and config.model.num_experts is None and not config.replicas_meet


def _check_layout(config: Config, world_size: int) -> Iterator[str]:
    p, m = config.parallel, config.model
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    cp = p.context_parallel_size
    if world_size % (tp * cp * pp):
        yield (
            f"{world_size} processes were started, but TP {tp} × CP {cp} × PP {pp} = "
            f"{tp * cp * pp} does not divide that; start a multiple of {tp * cp * pp} "
            "(torchrun --nproc-per-node)"
        )
    if cp == 1 and not (_merges(config) and world_size > tp * pp):
        for name, value in (
            ("overlap-groups", config.wlb.wlb_cp_overlap_groups),
            ("keep-gathered", config.wlb.wlb_cp_keep_gathered),
            ("reduce-in-fp32", config.wlb.wlb_cp_reduce_in_fp32),
        ):
            if value:
                yield (
                    f"--wlb-cp-{name} counts only with --context-parallel-size of at least 2, or "
                    "where data-parallel ranks run documents together (--wlb-packing slim "
                    "--wlb-dp-merge auto); leave it out"
                )
    vpp = p.num_virtual_stages_per_pipeline_rank
    if pp > m.num_layers and not p.split.given:
        yield (
            f"--pipeline-model-parallel-size is {pp}, but there are only {m.num_layers} layers; "
            f"use at most {m.num_layers} stages"
        )
    else:
        yield from _check_split(config)
    if not any(_check_split(config)):
        if vpp is None and p.vpp_size > 1:  # of a layout
            vpp = p.vpp_size
        stages = p.split.layers(m.num_layers, pp, p.vpp_size)
        if empty := [rank for rank in range(1, pp - 1) if not any(stages[rank::pp])]:
            yield (
                f"--pipeline-model-parallel-layout {p.pipeline_model_parallel_layout} leaves "
                f"pipeline rank {empty[0]} without a layer: Megatron saves checkpoints of a rank "
                "without weights, but cannot load them; give each rank between the first and the "
                "last a layer"
            )
    if vpp is None and p.microbatch_group_size_per_virtual_pipeline_stage is not None:
        yield (
            "--microbatch-group-size-per-virtual-pipeline-stage is "
            f"{p.microbatch_group_size_per_virtual_pipeline_stage}, but there are no virtual "
            "stages; give --num-virtual-stages-per-pipeline-rank too, or leave it out"
        )
    if vpp is not None:
        if pp == 1:
            yield (
                f"--num-virtual-stages-per-pipeline-rank is {vpp}, but there is no pipeline; "
                "leave it out or use --pipeline-model-parallel-size of at least 2"
            )
        elif vpp < 2:
            yield (
                f"--num-virtual-stages-per-pipeline-rank is {vpp}; use at least 2, or leave it out"
            )
        if pp == 2 and p.no_overlap_p2p_communication and config.wlb.wlb_verify_shapes:
            # Both directions go to one peer in one batch, and the exchange cannot tell them apart.
            yield (
                "--wlb-verify-shapes cannot check --pipeline-model-parallel-size 2 with virtual "
                "stages and --no-overlap-p2p-communication: Megatron's exchange of shapes mixes up "
                "activations and gradients there; leave one of the flags out"
            )
    if p.sequence_parallel and tp == 1:
        yield ("--sequence-parallel needs --tensor-model-parallel-size of at least 2; leave it out")


def _check_split(config: Config) -> Iterator[str]:
    p = config.parallel
    try:
        vpp_size = p.num_virtual_stages_per_pipeline_rank or p.vpp_size  # a layout must agree
        p.split.layers(config.model.num_layers, p.pipeline_model_parallel_size, vpp_size)
    except ConfigError as error:
        yield str(error)


def _check_model(config: Config) -> Iterator[str]:
    m, tp = config.model, config.parallel.tensor_model_parallel_size
    if m.kv_channels is None and m.hidden_size % m.num_attention_heads:
        yield (
            f"--hidden-size {m.hidden_size} is not divisible by --num-attention-heads "
            f"{m.num_attention_heads}; change one of them or give --kv-channels"
        )
    head_dim = m.kv_channels or m.hidden_size // m.num_attention_heads
    if m.multi_latent_attention:
        yield from _check_latent(config)
    elif m.position_embedding_type in ("rope", "yarn") and head_dim % 2:
        yield (
            f"rotary positions need an even head dimension, but it is {head_dim}; change "
            "--kv-channels or --num-attention-heads"
        )
    for name, value in (
        ("num-attention-heads", m.num_attention_heads),
        ("ffn-hidden-size", m.ffn_hidden_size or 4 * m.hidden_size),
        ("num-query-groups", m.num_query_groups if m.group_query_attention else tp),
    ):
        if value % tp:
            yield (f"--{name} is {value}, which TP {tp} does not divide; use a multiple of {tp}")
    if m.group_query_attention and m.num_attention_heads % m.num_query_groups:
        yield (
            f"--num-attention-heads {m.num_attention_heads} is not divisible by "
            f"--num-query-groups {m.num_query_groups}"
        )
    if config.parallel.sequence_parallel and m.hidden_size % tp:
        yield f"--hidden-size {m.hidden_size} is not divisible by TP {tp}"
    yield from _check_positions(config)
    try:
        windowed_layers(m)
    except ConfigError as error:
        yield str(error)
    rows = m.max_position_embeddings
    if rows is not None and rows < config.data.seq_length:
        yield (
            f"--max-position-embeddings is {rows}, below --seq-length {config.data.seq_length}; "
            "documents reach the window's length"
        )


def _check_latent(config: Config) -> Iterator[str]:
    """Multi-latent attention that cannot run, or that Megatron would run as something else."""
    m, p, flag = config.model, config.parallel, "--multi-latent-attention"
    if m.group_query_attention:
        yield f"{flag} has no query groups; leave --group-query-attention out"
    if m.rotary_interleaved or m.position_embedding_type == "yarn":
        given = "--rotary-interleaved" if m.rotary_interleaved else "--position-embedding-type yarn"
        yield f"{given} does not work with {flag}; rotate with --rope-type rope or yarn"
    if m.qk_pos_emb_head_dim % 2:
        yield f"--qk-pos-emb-head-dim is {m.qk_pos_emb_head_dim}; rotary positions need an even one"
    if m.v_head_dim > m.qk_head_dim + m.qk_pos_emb_head_dim:
        yield (
            f"--v-head-dim is {m.v_head_dim}, above --qk-head-dim + --qk-pos-emb-head-dim = "
            f"{m.qk_head_dim + m.qk_pos_emb_head_dim}; kernels take values as wide as keys at most"
        )
    if m.transformer_impl != "transformer_engine":  # which has all of them on each rank
        tp = p.tensor_model_parallel_size
        for name, size in (
            ("--q-lora-rank", m.q_lora_rank or tp),
            ("--kv-lora-rank + --qk-pos-emb-head-dim", m.kv_lora_rank + m.qk_pos_emb_head_dim),
        ):
            if size % tp:
                yield f"{name} is {size}, which TP {tp} does not divide; use a multiple of {tp}"
    if (config.wlb.wlb_cp_overlap_groups or 1) > 1:
        yield (
            f"--wlb-cp-overlap-groups is {config.wlb.wlb_cp_overlap_groups}, but with {flag} ranks "
            "exchange one latent for all heads; leave it out"
        )
    merges = _merges(config)
    if p.context_parallel_size > 1 or merges:
        other = "--wlb-dp-merge" if merges else "--context-parallel-size"
        why = f"does not work with {flag} and {other} {config.flat()[other[2:].replace('-', '_')]}"
        if m.window_size:
            yield f"--window-size {why}: latents of all tokens are exchanged; leave one of them out"
        if config.training.fp8_format is not None:
            yield (
                f"--fp8-format {why}: keys and values are projected again in the backward pass, "
                "where nothing scales them; leave one of them out"
            )


def _check_positions(config: Config) -> Iterator[str]:
    """Settings of positions that Megatron would leave out without a word."""
    m = config.model
    default = ModelConfig()
    given = {
        field.name
        for field in dataclasses.fields(m)
        if getattr(m, field.name) != getattr(default, field.name)
    }
    of_rope = {"use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor"}
    of_yarn = {name for name in given if name.startswith("wlb_yarn_")}
    if m.multi_latent_attention:  # whose YaRN has flags of its own for all but these
        of_yarn -= {"wlb_yarn_original_max_position_embeddings"}
        of_yarn -= {"wlb_yarn_beta_fast", "wlb_yarn_beta_slow"}
    for kind, names in (("rope", of_rope & given), ("yarn", of_yarn)):
        if names and m.position_embedding_type != kind:
            yield (
                f"{flag_of(min(names))} counts only with --position-embedding-type {kind}, but "
                f"that is {m.position_embedding_type}; leave one of them out"
            )
    if "rope_scaling_factor" in given and not m.use_rope_scaling:
        yield ("--rope-scaling-factor is given without --use-rope-scaling; give both or neither")
    if m.position_embedding_type == "yarn" and (m.rotary_interleaved or m.rotary_percent != 1):
        yield (
            "--position-embedding-type yarn rotates the whole head in halves; leave "
            "--rotary-interleaved and --rotary-percent out"
        )


def _check_prediction(config: Config) -> Iterator[str]:
    """Layers that predict further ahead, where Megatron builds or runs them."""
    m, t, num = config.model, config.training, config.model.mtp_num_layers
    split = config.parallel.split
    if not any(_check_split(config)) and split.num_ahead not in (None, num or 0):
        yield (
            f"--pipeline-model-parallel-layout {split.pipeline_model_parallel_layout} has "
            f"{split.num_ahead} m, but --mtp-num-layers is {num or 0}; give as many"
        )
    if num is None:
        return
    if m.position_embedding_type == "learned_absolute":
        yield (
            f"--mtp-num-layers is {num}, but Megatron would not keep the last stage's table of "
            "--position-embedding-type learned_absolute like the first's; use rope or none"
        )
    if m.window_attn_skip_freq is not None:
        yield (
            f"--mtp-num-layers is {num}, but whether such a layer has a window by "
            f"--window-attn-skip-freq {m.window_attn_skip_freq} differs between versions of "
            "Megatron; leave that out, so that all layers have it"
        )
    if t.recompute_method == "uniform" and t.recompute_num_layers not in (None, 1):
        yield (
            f"--mtp-num-layers is {num}, of which Megatron recomputes each layer for itself; use "
            f"--recompute-num-layers 1 in place of {t.recompute_num_layers}"
        )


def _check_optimizer(config: Config) -> Iterator[str]:
    t = config.training
    if not 0 <= t.min_lr <= t.lr:
        yield f"--min-lr is {t.min_lr}; it must be in [0, {t.lr}], up to --lr"
    decay_iters = t.lr_decay_iters or t.train_iters
    if t.lr_warmup_iters >= decay_iters:
        yield (
            f"--lr-warmup-iters is {t.lr_warmup_iters}, but the learning rate has decayed after "
            f"{decay_iters} steps; use fewer, or more --lr-decay-iters (--train-iters if not given)"
        )
    if t.optimizer == "sgd" and config.parallel.use_distributed_optimizer:
        yield (
            "--use-distributed-optimizer shards the state of Adam only, but --optimizer is sgd; "
            "leave one of them out"
        )
    p = config.parallel
    if p.overlap_param_gather and not (p.use_distributed_optimizer and p.overlap_grad_reduce):
        yield (
            "--overlap-param-gather gathers what the distributed optimizer has updated in parts; "
            "add --use-distributed-optimizer and --overlap-grad-reduce, or leave it out"
        )


def _check_batch(config: Config) -> Iterator[str]:
    t, d, w = config.training, config.data, config.wlb
    if d.seq_length < 2:
        yield (
            f"--seq-length is {d.seq_length}; a window needs at least 2 tokens, one to predict "
            "the other"
        )
    row = t.micro_batch_size * d.seq_length
    if w.wlb_max_tokens is not None and w.wlb_max_tokens < d.seq_length:
        yield (
            f"--wlb-max-tokens is {w.wlb_max_tokens}, below --seq-length {d.seq_length}; a "
            "document of a whole window would fit nowhere: use at least the window, better twice"
        )
    elif w.wlb_max_tokens is not None and w.wlb_max_tokens < row:
        yield (
            f"--wlb-max-tokens is {w.wlb_max_tokens}, below --micro-batch-size "
            f"{t.micro_batch_size} × --seq-length {d.seq_length} = {row}, the tokens of a mean "
            "micro-batch; use at least that, better twice"
        )
    cuts = w.wlb_packing == CHOSEN or kind_of(w.wlb_packing).slices
    if w.wlb_long_documents == "slice" and not cuts:
        yield (
            f"--wlb-long-documents is slice, but {w.wlb_packing} packing cuts no slices; use "
            "--wlb-packing slim, or split"
        )
    for chosen, check_packing in (
        (w.wlb_shape == "on", check_shaping),
        (w.wlb_micro_batches == "auto", check_numbers),
    ):
        try:
            if chosen:
                check_packing(w.wlb_packing)
        except ConfigError as error:
            yield str(error)
    if config.checkpoint.save_interval is not None and config.checkpoint.save is None:
        yield "--save-interval is given without --save FOLDER"


def _check_data(config: Config) -> Iterator[str]:
    d, lengths = config.data, config.wlb.wlb_mock_lengths
    if d.mock_data and d.data_path:
        yield "--mock-data stands for a corpus, but --data-path names one; leave one of them out"
    if lengths is None:
        return
    if not d.mock_data:
        yield (
            f"--wlb-mock-lengths is {lengths}, which counts only with --mock-data; give that too, "
            "or leave it out"
        )
        return
    try:
        LengthSource.named(lengths)  # Now: the corpus is made once the model is built.
    except WLBError as error:
        yield f"--wlb-mock-lengths: {error}"


def _check_recompute(config: Config) -> Iterator[str]:
    t, p = config.training, config.parallel
    method, num_layers = t.recompute_method, t.recompute_num_layers
    if t.recompute_granularity != "full":
        for name, value in (("method", method), ("num-layers", num_layers)):
            if value is not None:
                yield (
                    f"--recompute-{name} is {value}, which counts only with "
                    "--recompute-granularity full; give that too, or leave it out"
                )
        return
    if method is None or num_layers is None:
        yield (
            "--recompute-granularity full needs --recompute-method uniform or block, and "
            "--recompute-num-layers, e.g. 1"
        )
        return
    if method != "uniform" or any(_check_split(config)):
        return
    chunks = p.split.layers(config.model.num_layers, p.pipeline_model_parallel_size, p.vpp_size)
    if undivided := sorted({layers for layers in chunks if layers % num_layers}):
        # Megatron would index beyond the chunk's last layer.
        yield (
            f"--recompute-num-layers is {num_layers}, which does not divide the "
            f"{', '.join(map(str, undivided))} layers of model chunks; use a divisor of each, or "
            "--recompute-method block"
        )


def check_micro_batches(config: Config, world_size: int) -> int:
    """Micro-batches of each data-parallel rank, M.

    Of a batch that grows they are those at its end. Raises :class:`ConfigError` where micro-batch
    size × DP does not divide each batch, the interleaved schedule cannot run so many, or slices
    would be shorter than cuts are apart.
    """
    refuse_all(_check_micro_batches(config, world_size))
    dp, w, window = data_parallel_size(config, world_size), config.wlb, config.data.seq_length
    num_windows = batch(config, dp)[0]
    if kind_of(w.wlb_packing).slices:
        multiple = slice_multiple(window, w.wlb_slice_multiple)
        check_units(w.wlb_units, num_windows // dp * window, multiple)
    return num_windows // (config.training.micro_batch_size * dp)


def check_evaluation(config: Config, world_size: int) -> None:
    """Checks likewise what steps of evaluation run, by the settings of evaluations."""
    refuse_all(
        f"{refused}; these are steps of evaluation, of {config.training.global_batch_size} "
        "windows: give --eval-global-batch-size, or --eval-iters 0"
        for refused in _check_micro_batches(without_growth(config), world_size)
    )


def _check_micro_batches(config: Config, world_size: int) -> Iterator[str]:
    t, dp = config.training, data_parallel_size(config, world_size)
    multiple = t.micro_batch_size * dp
    divisor = f"DP {dp}"
    if t.micro_batch_size > 1:
        divisor = f"--micro-batch-size {t.micro_batch_size} × {divisor} = {multiple}"
    try:
        num_windows, ramp = batch(config, dp)
    except ConfigError as error:
        yield str(error)
        return
    if not num_windows:
        yield (
            f"--global-batch-size is {t.global_batch_size}, below {divisor}, so it would be "
            f"rounded down to nothing; use at least {multiple}"
        )
        return
    sizes = (num_windows,) if ramp is None else ramp.sizes
    for size in sizes:
        if size % multiple:
            flag = "--global-batch-size is"
            if size != t.global_batch_size:
                assert ramp is not None
                flag = f"{ramp.flag} leads to a batch of"
            yield (
                f"{flag} {size}, which {divisor} does not divide; every data-parallel rank runs "
                f"the same number of micro-batches: use a multiple of {multiple}"
            )
            return
    numbers = [size // multiple for size in sizes]
    refused = (number for number in numbers if any(_check_interleaved(config, number)))
    yield from _check_interleaved(config, next(refused, numbers[-1]))


def _check_interleaved(config: Config, num_micro_batches: int) -> Iterator[str]:
    """Checks that a rank's micro-batches divide over virtual stages as Megatron asks."""
    if config.parallel.vpp_size == 1:
        return
    pp = config.parallel.pipeline_model_parallel_size
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage or pp
    if not pp <= group <= num_micro_batches:
        yield (
            f"--microbatch-group-size-per-virtual-pipeline-stage is {group}; it must lie "
            f"between PP {pp} and the {num_micro_batches} micro-batches of a rank"
        )
    elif 0 < num_micro_batches % group < pp:
        yield (
            f"{num_micro_batches} micro-batches a rank leave {num_micro_batches % group} after "
            f"groups of {group}; the remainder must be 0 or at least PP {pp}: change "
            "--global-batch-size"
        )
