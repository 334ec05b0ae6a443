"""Settings that cannot run together: one table of rules for any run.

A rule names a setting, says when it cannot run, why, and what to do. Some of what is refused here
Megatron would run and silently compute something else. :mod:`megatron_wlb.planning.guards` asks
the tables. Flags that only Megatron-LM has are in the launcher's table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

from megatron_wlb.cost import load_hardware
from megatron_wlb.data.ramp import SCHEDULE, Ramp
from megatron_wlb.errors import ConfigError
from megatron_wlb.extensions import load
from megatron_wlb.planning.from_config import batch
from megatron_wlb.planning.layer_patterns import expert_layers, mamba_heads, windowed_layers
from megatron_wlb.planning.packing import check_numbers, check_shaping, kind_of
from megatron_wlb.planning.refusal import Refusal, failing, given
from megatron_wlb.settings import pattern
from megatron_wlb.settings.config import Config, flag_of
from megatron_wlb.settings.megatron import ModelConfig
from megatron_wlb.settings.packings import CHOSEN


class Facts:
    """What refusals ask of a run: its settings by groups, and what follows from several of them."""

    def __init__(self, config: Config, world_size: int) -> None:
        self.config = config
        self.world_size = world_size
        self.m, self.p, self.t = config.model, config.parallel, config.training
        self.d, self.w = config.data, config.wlb
        m, p, t = self.m, self.p, self.t
        self.split = p.split
        self.tp, self.cp = p.tensor_model_parallel_size, p.context_parallel_size
        self.pp = p.pipeline_model_parallel_size
        self.shards = self.tp * self.cp * self.pp
        self.dp = world_size // self.shards
        self.etp = p.expert_tensor_parallel_size or self.tp
        self.expert_shards = p.expert_model_parallel_size * self.etp * self.pp
        self.head_dim = m.kv_channels or m.hidden_size // m.num_attention_heads
        self.num_groups, self.num_ahead = m.moe_router_num_groups or 0, m.mtp_num_layers or 0
        self.num_experts = m.num_experts or 0
        self.key_dim = m.qk_head_dim + m.qk_pos_emb_head_dim
        self.latent_dim = m.kv_lora_rank + m.qk_pos_emb_head_dim
        self.softmax = m.moe_router_score_function == "softmax"
        self.recomputes_all = t.recompute_granularity == "full"
        self.decay_iters = t.lr_decay_iters or t.train_iters
        self.tokens = t.micro_batch_size * config.data.seq_length
        self.multiple = t.micro_batch_size * self.dp
        self.group = p.microbatch_group_size_per_virtual_pipeline_stage or self.pp
        """Micro-batches that run through a virtual stage before the next one."""
        self._values = config.flat()
        self._values["ffn_hidden_size"] = m.ffn_hidden_size or 4 * m.hidden_size
        self._values["mamba_num_heads"] = mamba_heads(m)

    def value(self, name: str) -> Any:
        return self._values[name]

    def begins(self, name: str) -> str:
        value = self.value(name)
        shown = "given" if isinstance(value, bool | tuple | None) else value
        return f"{flag_of(name)} is {shown}, but"

    @cached_property
    def merges(self) -> bool:
        """Whether data-parallel ranks may run documents together."""
        return kind_of(self.w.wlb_packing).slices and self.config.merges

    def check_split(self) -> None:
        """Raises :class:`ConfigError` for layers that do not divide over the stages."""
        p = self.config.parallel
        vpp_size = p.num_virtual_stages_per_pipeline_rank or p.vpp_size  # a layout must agree
        if self.pp <= self.m.num_layers or self.split.given:  # else another rule says so
            self.split.layers(self.m.num_layers, self.pp, vpp_size)

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Layers of each virtual stage; empty where they do not divide."""
        try:
            self.check_split()
            return self.split.layers(self.m.num_layers, self.pp, self.config.parallel.vpp_size)
        except ConfigError:
            return ()

    @cached_property
    def vpp(self) -> int | None:
        """Virtual stages of a rank: what the flag says, or else the layout."""
        given = self.p.num_virtual_stages_per_pipeline_rank
        of_layout = self.p.vpp_size if given is None and self.chunks else 1
        return of_layout if of_layout > 1 else given

    @property
    def without_layer(self) -> int | None:
        """The first pipeline rank between the two ends that has no layer."""
        ranks = range(1, self.pp - 1) if self.chunks else ()
        return next((rank for rank in ranks if not any(self.chunks[rank :: self.pp])), None)

    def model_given(self, *names: str, but_for: str) -> str:
        """A flag of these of the model, if any is given and positions are not of this kind."""
        given = [n for n in names if getattr(self.m, n) != getattr(ModelConfig, n)]
        return flag_of(min(given)) if given and self.m.position_embedding_type != but_for else ""

    @cached_property
    def batch(self) -> tuple[int, Ramp | None]:
        """Windows of a batch, at its end where it grows. Raises :class:`ConfigError` for a growth
        that cannot be read.
        """
        return batch(self.config, self.dp)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Windows of each batch that a step may have."""
        num_windows, ramp = self.batch
        return (num_windows,) if ramp is None else ramp.sizes

    @property
    def undivided_batch(self) -> str:
        """The first batch that data-parallel ranks do not share alike, and where it comes from."""
        ramp = self.batch[1]
        size = next((size for size in self.batch_sizes if size % self.multiple), None)
        if size is None or ramp is None or size == self.t.global_batch_size:
            return "" if size is None else f"--global-batch-size is {size}"
        return f"{SCHEDULE} leads to a batch of {size}"

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a rank: the first number that virtual stages refuse, or the last."""
        numbers = [size // self.multiple for size in self.batch_sizes]
        refused = (n for n in numbers if not self.pp <= self.group <= n or self.left_of(n))
        return next(refused, numbers[-1])

    @property
    def is_interleaved(self) -> bool:
        return self.config.parallel.vpp_size > 1

    @property
    def num_reachable(self) -> int:
        """Experts of the groups that a router chooses; all where it chooses none."""
        groups, chosen = self.num_groups, self.m.moe_router_group_topk or 0
        each = self.num_experts // (groups or 1)
        return chosen * each if 0 < chosen <= groups else self.num_experts

    def left_of(self, number: int) -> int:
        """Micro-batches left after whole groups, if they are too few for the pipeline."""
        left = number % self.group
        return left if left < self.pp else 0


def _divides(
    words: str,
    by: Callable[[Facts], int | None],
    name: str,
    when: Callable[[Facts], Any] = lambda f: True,
) -> Refusal[Facts]:
    """Refuses a setting that a number does not divide, a flag or a size in words."""

    def undivided(f: Facts, value: int | None) -> int | None:
        number = by(f) if value and when(f) else None
        return number if number and value and value % number else None

    reason = words + " {found} does not divide it"
    return Refusal(name, undivided, reason, "use a multiple of {found}")


def _has(sign: str) -> Callable[[Facts], bool]:
    """Whether a HybridModel has such layers."""
    return lambda f: sign in (f.p.hybrid_layer_pattern or "")


Rules: TypeAlias = tuple[Refusal[Facts], ...]

_LEAVE_ONE = "leave one of them out"
_STARTED = "{f.world_size} processes were started, but "
_ROPE = ("use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor")
_YARN = (
    "wlb_yarn_rotary_scaling_factor", "wlb_yarn_mscale", "wlb_yarn_mscale_all_dim",
    "wlb_yarn_original_max_position_embeddings", "wlb_yarn_beta_fast", "wlb_yarn_beta_slow",
)  # fmt: skip

LAYOUT: Rules = (
    Refusal("", lambda f, _: f.world_size % f.shards,
        _STARTED + "TP {f.tp} × CP {f.cp} × PP {f.pp} = {f.shards} does not divide that",
        "start a multiple of {f.shards} (torchrun --nproc-per-node)"),
    *(
        Refusal[Facts](name, lambda f, v: v and f.cp == 1
            and not (f.merges and f.world_size > f.tp * f.pp),
            "it counts only with --context-parallel-size of at least 2, or where data-parallel "
            "ranks run documents together (--wlb-packing slim --wlb-dp-merge auto)")
        for name in ("wlb_cp_overlap_groups", "wlb_cp_keep_gathered", "wlb_cp_reduce_in_fp32")
    ),
    Refusal("pipeline_model_parallel_size", lambda f, pp: pp > f.m.num_layers and not f.split.given,
        "there are only {f.m.num_layers} layers", "use at most {f.m.num_layers} stages"),
    failing(Facts.check_split),
    Refusal("pipeline_model_parallel_layout", lambda f, _: f.without_layer,
        "it leaves pipeline rank {found} without a layer: Megatron saves checkpoints of a rank "
        "without weights, but cannot load them", "give each rank between the two ends a layer"),
    Refusal("microbatch_group_size_per_virtual_pipeline_stage",
        lambda f, v: v is not None and f.vpp is None,
        "there are no virtual stages",
        "give --num-virtual-stages-per-pipeline-rank too, or leave it out"),
    Refusal("num_virtual_stages_per_pipeline_rank", lambda f, vpp: vpp and f.pp == 1,
        "there is no pipeline", "leave it out or use --pipeline-model-parallel-size of at least 2"),
    Refusal("num_virtual_stages_per_pipeline_rank", lambda f, vpp: vpp == 1 and f.pp > 1,
        "that is a pipeline without virtual stages", "use at least 2, or leave it out"),
    # Both directions go to one peer in one batch, and the exchange cannot tell them apart.
    Refusal("wlb_verify_shapes", lambda f, v: v and f.vpp and f.pp == 2
        and f.p.no_overlap_p2p_communication,
        "with --pipeline-model-parallel-size 2, virtual stages and --no-overlap-p2p-communication "
        "Megatron's exchange of shapes mixes up activations and gradients",
        "leave one of the flags out",
    ),
    Refusal("sequence_parallel", lambda f, v: v and f.tp == 1,
        "it needs --tensor-model-parallel-size of at least 2"),
)  # fmt: skip

GENERAL: Rules = (
    # The model.
    Refusal("hidden_size", lambda f, v: f.m.kv_channels is None and v % f.m.num_attention_heads,
        "--num-attention-heads {f.m.num_attention_heads} does not divide it",
        "change one of them or give --kv-channels"),
    Refusal("position_embedding_type", lambda f, kind: kind in ("rope", "yarn") and f.head_dim % 2
        and not f.m.multi_latent_attention,
        "it needs an even head dimension, which is {f.head_dim}",
        "change --kv-channels or --num-attention-heads"),
    _divides("TP", lambda f: f.tp, "num_attention_heads"),
    _divides("TP", lambda f: f.tp, "ffn_hidden_size"),
    _divides("TP", lambda f: f.tp, "num_query_groups", lambda f: f.m.group_query_attention),
    _divides("--num-query-groups", lambda f: f.m.num_query_groups, "num_attention_heads",
        lambda f: f.m.group_query_attention),
    _divides("TP", lambda f: f.tp, "hidden_size", lambda f: f.p.sequence_parallel),
    # Settings of positions that Megatron would leave out without a word.
    Refusal("", lambda f, _: f.model_given(*_ROPE, but_for="rope"),
        "{found} counts only with --position-embedding-type rope, but that is "
        "{f.m.position_embedding_type}", _LEAVE_ONE),
    Refusal(  # Latents have flags of their own for the last three.
        "", lambda f, _: f.model_given(
            *_YARN[: 3 if f.m.multi_latent_attention else None], but_for="yarn"
        ),
        "{found} counts only with --position-embedding-type yarn, but that is "
        "{f.m.position_embedding_type}", _LEAVE_ONE,
    ),
    Refusal("rope_scaling_factor",
        lambda f, v: v != ModelConfig.rope_scaling_factor and not f.m.use_rope_scaling,
        "it counts only with --use-rope-scaling", "give both or neither"),
    Refusal("position_embedding_type",
        lambda f, kind: kind == "yarn" and (f.m.rotary_interleaved or f.m.rotary_percent != 1),
        "it rotates the whole head in halves",
        "leave --rotary-interleaved and --rotary-percent out"),
    failing(lambda f: windowed_layers(f.config.model)),
    Refusal("hybrid_layer_pattern",
        lambda f, v: v and (pattern.EXPERTS in v) != (f.m.num_experts is not None),
        "--num-experts is {f.m.num_experts}", "give layers E and --num-experts, or neither"),
    Refusal("hybrid_layer_pattern", lambda f, _: _has(pattern.DELTA)(f) and f.tp > 1
        and not f.p.sequence_parallel, "TP ranks would train the norms of layers G each by its "
        "own heads: Megatron adds up their gradients only with --sequence-parallel", "add it"),
    Refusal("hybrid_layer_pattern", lambda f, _: _has(pattern.DELTA)(f) and not f.m.swiglu,
        "Megatron's layers G have the activation of its MLP, and no other than SiLU runs there",
        "add --swiglu"),
    _divides("TP × CP", lambda f: f.tp * f.cp, "linear_num_key_heads", _has(pattern.DELTA)),
    _divides("--linear-num-key-heads", lambda f: f.m.linear_num_key_heads,
        "linear_num_value_heads", _has(pattern.DELTA)),
    _divides("TP × CP", lambda f: f.tp * f.cp, "mamba_num_heads", _has(pattern.MAMBA)),
    _divides("TP", lambda f: f.tp, "mamba_num_groups", _has(pattern.MAMBA)),
    _divides("--mamba-num-groups", lambda f: f.m.mamba_num_groups, "mamba_num_heads",
        _has(pattern.MAMBA)),
    Refusal("mamba_num_groups", lambda f, v: _has(pattern.MAMBA)(f) and (own := v // f.tp)
        and own % f.cp and f.cp % own and own,
        "each TP rank has {found} of them, and neither does CP {f.cp} divide that nor that CP",
        "use a multiple of TP × CP"),
    Refusal("use_rope_scaling", lambda f, v: v and f.p.hybrid_layer_pattern,
        "a HybridModel does not scale rotary frequencies", "leave it out"),
    Refusal("multi_latent_attention",
        lambda f, v: v and pattern.ATTENTION in (f.p.hybrid_layer_pattern or ""),
        "--hybrid-layer-pattern {f.p.hybrid_layer_pattern} has layers of plain attention *",
        "use + in their place"),
    Refusal("moe_layer_freq",
        lambda f, v: f.p.hybrid_layer_pattern and v != ModelConfig.moe_layer_freq,
        "--hybrid-layer-pattern says which layers have experts", _LEAVE_ONE),
    Refusal("moe_latent_size", lambda f, v: v is not None and f.m.num_experts is None,
        "there are no experts", "give --num-experts"),
    Refusal("max_position_embeddings", lambda f, v: v is not None and v < f.d.seq_length,
        "documents reach the window's length, --seq-length {f.d.seq_length}", "use at least that"),
    Refusal("moe_ffn_hidden_size", lambda f, v: v is not None and f.m.num_experts is None,
        "there are no experts", "give --num-experts"),
    Refusal("expert_model_parallel_size", lambda f, v: v > 1 and f.m.num_experts is None,
        "there are no experts", "give --num-experts"),
    *(
        Refusal[Facts](name, lambda f, v: v is not None and not f.recomputes_all,
            "it counts only with --recompute-granularity full", "give that too, or leave it out")
        for name in ("recompute_method", "recompute_num_layers")
    ),
    Refusal("recompute_granularity",
        lambda f, v: v == "full" and None in (f.t.recompute_method, f.t.recompute_num_layers),
        "it needs --recompute-method uniform or block, and --recompute-num-layers, e.g. 1",
        "give both"),
    Refusal(  # Megatron would index beyond the chunk's last layer.
        "recompute_num_layers", lambda f, each: each and f.recomputes_all
        and f.t.recompute_method == "uniform"
        and ", ".join(str(num) for num in sorted(set(f.chunks)) if num % each),
        "it does not divide the {found} layers of model chunks",
        "use a divisor of each, or --recompute-method block",
    ),
    Refusal("", lambda f, _: f.chunks and f.split.num_ahead not in (None, f.num_ahead),
        "--pipeline-model-parallel-layout {f.p.pipeline_model_parallel_layout} has "
        "{f.split.num_ahead} m, but --mtp-num-layers is {f.num_ahead}", "give as many"),
    # The optimizer.
    Refusal("min_lr", lambda f, v: not 0 <= v <= f.t.lr, "it must be in [0, {f.t.lr}], up to --lr",
        "change one of them"),
    Refusal("lr_warmup_iters", lambda f, v: v >= f.decay_iters,
        "the learning rate has decayed after {f.decay_iters} steps",
        "use fewer, or more --lr-decay-iters (--train-iters if not given)"),
    Refusal("use_distributed_optimizer", lambda f, v: v and f.t.optimizer == "sgd",
        "it shards the state of Adam only, and --optimizer is sgd", _LEAVE_ONE),
    Refusal("overlap_param_gather",
        lambda f, v: v and not (f.p.use_distributed_optimizer and f.p.overlap_grad_reduce),
        "it gathers what the distributed optimizer has updated in parts",
        "add --use-distributed-optimizer and --overlap-grad-reduce, or leave it out"),
    # Windows and packings.
    Refusal("wlb_max_tokens", lambda f, v: v is not None and v < f.d.seq_length,
        "that is below --seq-length {f.d.seq_length}: a document of a whole window would fit "
        "nowhere", "use at least the window, better twice"),
    Refusal("wlb_max_tokens", lambda f, v: v is not None and f.d.seq_length <= v < f.tokens,
        "a mean micro-batch has --micro-batch-size {f.t.micro_batch_size} × --seq-length "
        "{f.d.seq_length} = {f.tokens} tokens", "use at least that, better twice"),
    Refusal("wlb_queue_thresholds", lambda f, v: any(low >= high for low, high in pairwise(v)),
        "they must be strictly ascending", "order them and remove duplicates"),
    Refusal("wlb_host_gib", lambda f, v: v and f.t.fp8_format is not None,
        "what FP8 layers keep beside activations would go to the host with them",
        "leave it out, or --fp8-format"),
    Refusal("wlb_long_documents", lambda f, v: v == "slice" and f.w.wlb_packing != CHOSEN
        and not kind_of(f.w.wlb_packing).slices,
        "{f.w.wlb_packing} packing cuts no slices", "use --wlb-packing slim, or split"),
    failing(lambda f: check_shaping(f.w.wlb_packing) if f.w.wlb_shape == "on" else None),
    failing(lambda f: check_numbers(f.w.wlb_packing) if f.w.wlb_micro_batches == "auto" else None),
    # The data and the machine. Files are read now: a run needs them once the model is built.
    Refusal("mock_data", lambda f, v: v and f.d.data_path,
        "it stands for a corpus, and --data-path names one", _LEAVE_ONE),
    Refusal("wlb_mock_lengths", lambda f, v: v is not None and not f.d.mock_data,
        "it counts only with --mock-data", "give that too, or leave it out"),
    failing(lambda f: load("mock data").source(f.w.wlb_mock_lengths) if f.d.mock_data else None,
        "--wlb-mock-lengths: "),
    failing(lambda f: load_hardware(f.w.wlb_hardware), "--wlb-hardware: "),
)  # fmt: skip

LATENT: Rules = (
    Refusal("attention_output_gate", lambda f, v: v, "Megatron has no gate of latent attention",
        "leave it out"),
    Refusal("group_query_attention", given, "--multi-latent-attention has no query groups"),
    *(
        Refusal[Facts](name, lambda f, v: v in (True, "yarn"),
            "it does not work with --multi-latent-attention",
            "rotate with --rope-type rope or yarn")
        for name in ("rotary_interleaved", "position_embedding_type")
    ),
    Refusal("qk_pos_emb_head_dim", lambda f, v: v % 2, "rotary positions need an even one",
        "use a multiple of 2"),
    Refusal("v_head_dim", lambda f, v: v > f.key_dim,
        "kernels take values as wide as keys, --qk-head-dim + --qk-pos-emb-head-dim = {f.key_dim}",
        "use at most that"),
    # TransformerEngine has all of these on each rank.
    _divides("TP", lambda f: f.tp, "q_lora_rank",
        lambda f: f.m.transformer_impl != "transformer_engine"),
    Refusal("", lambda f, _: f.m.transformer_impl != "transformer_engine" and f.latent_dim % f.tp,
        "--kv-lora-rank + --qk-pos-emb-head-dim is {f.latent_dim}, which TP {f.tp} does not divide",
        "use a multiple of {f.tp}"),
    Refusal("wlb_cp_overlap_groups", lambda f, v: (v or 1) > 1,
        "with --multi-latent-attention ranks exchange one latent for all heads"),
    Refusal("window_size", lambda f, v: v and f.cp > 1,
        "with --multi-latent-attention and --context-parallel-size {f.cp} latents of all tokens "
        "are exchanged", _LEAVE_ONE),
    Refusal("fp8_format", lambda f, v: v is not None and f.cp > 1,
        "with --multi-latent-attention and --context-parallel-size {f.cp} keys and values are "
        "projected again in the backward pass, where nothing scales them", _LEAVE_ONE),
)  # fmt: skip

EXPERTS: Rules = (
    failing(lambda f: expert_layers(f.config.model)),
    _divides(
        "--expert-model-parallel-size", lambda f: f.p.expert_model_parallel_size, "num_experts"),
    Refusal("", lambda f, _: f.world_size % f.expert_shards,
        _STARTED + "--expert-model-parallel-size {f.p.expert_model_parallel_size} × "
        "--expert-tensor-parallel-size {f.etp} × PP {f.pp} = {f.expert_shards} does not divide "
        "that", "start a multiple of {f.expert_shards}, or lower one of them"),
    _divides("expert TP", lambda f: f.etp, "moe_ffn_hidden_size"),
    _divides("TP", lambda f: f.tp, "moe_shared_expert_intermediate_size"),
    Refusal(  # Whole ones under TP would be added up over its ranks once more.
        "", lambda f, _: max(f.etp, f.tp) > 1 and not f.m.disable_bias_linear,
        "--expert-tensor-parallel-size is {f.etp} and TP {f.tp}, but experts with a bias train "
        "right only where both are 1", "add --disable-bias-linear, or use 1 for both",
    ),
    Refusal("num_experts", lambda f, _: max(f.etp, f.tp) == 1 and not f.m.disable_bias_linear
        and f.m.transformer_impl != "transformer_engine",
        "biases of experts cannot be trained in --transformer-impl local: Megatron adds them in "
        "place, which autograd refuses", "add --disable-bias-linear"),
    Refusal("num_experts", lambda f, _: f.tp > 1 and not f.p.sequence_parallel,
        "with TP above 1 Megatron needs --sequence-parallel", "add it"),
    # The router.
    Refusal("moe_router_topk", lambda f, v: v > f.num_experts, "there are {f.num_experts} experts",
        "use at most that"),
    Refusal("", lambda f, _: (kinds := len(f.m.moe_router_load_balancing_type))
        != (weights := len(f.m.moe_aux_loss_coeff)) and (weights, kinds),
        "--moe-aux-loss-coeff has {found[0]} numbers for the {found[1]} kinds of "
        "--moe-router-load-balancing-type", "give one each"),
    Refusal("moe_router_topk", lambda f, v: v == 1 and f.softmax and not f.m.moe_router_pre_softmax
        and "sinkhorn" not in f.m.moe_router_load_balancing_type,
        "it leaves softmax no gradient", "add --moe-router-pre-softmax"),
    Refusal("moe_router_enable_expert_bias", lambda f, v: v and f.softmax,
        "it works with sigmoid scores only", "add --moe-router-score-function sigmoid"),
    Refusal("moe_router_group_topk", lambda f, v: v and v > f.num_groups,
        "there are {f.num_groups} groups", "give --moe-router-num-groups of at least that"),
    _divides("--moe-router-num-groups", lambda f: f.m.moe_router_num_groups, "num_experts"),
    Refusal("moe_router_topk", lambda f, v: f.num_experts >= v > f.num_reachable,
        "the {f.m.moe_router_group_topk} groups of --moe-router-group-topk have {f.num_reachable} "
        "experts", "use at most that"),
)  # fmt: skip

PREDICTION: Rules = (
    Refusal("mtp_num_layers", lambda f, v: (said := f.split.pattern) and said.depths != v,
        "--hybrid-layer-pattern {f.p.hybrid_layer_pattern} does not say of what layers",
        "add /, and the symbols of a depth, for each"),
    Refusal("mtp_num_layers", lambda f, _: f.m.position_embedding_type == "learned_absolute",
        "Megatron would not keep the last stage's table of --position-embedding-type "
        "learned_absolute like the first's", "use rope or none"),
    Refusal("mtp_num_layers", lambda f, _: f.m.window_attn_skip_freq is not None,
        "whether such a layer has a window by --window-attn-skip-freq {f.m.window_attn_skip_freq} "
        "differs between versions of Megatron", "leave that out, so that all layers have it"),
    Refusal("mtp_num_layers", lambda f, _: f.t.recompute_method == "uniform"
        and f.t.recompute_num_layers not in (None, 1),
        "Megatron recomputes each of its layers for itself",
        "use --recompute-num-layers 1 in place of {f.t.recompute_num_layers}"),
)  # fmt: skip

BATCHES: Rules = (
    failing(lambda f: f.batch),
    Refusal("", lambda f, _: not f.batch[0],
        "--global-batch-size is {f.t.global_batch_size}, below --micro-batch-size "
        "{f.t.micro_batch_size} × DP {f.dp} = {f.multiple}, so it would be rounded down to nothing",
        "use at least {f.multiple}"),
    Refusal("", lambda f, _: f.undivided_batch,
        "{found}, which --micro-batch-size {f.t.micro_batch_size} × DP {f.dp} = {f.multiple} does "
        "not divide; every data-parallel rank runs the same number of micro-batches",
        "use a multiple of {f.multiple}"),
    Refusal("", lambda f, _: f.is_interleaved and not f.pp <= f.group <= f.num_micro_batches,
        "--microbatch-group-size-per-virtual-pipeline-stage is {f.group}, but it must lie between "
        "PP {f.pp} and the {f.num_micro_batches} micro-batches of a rank", "change one of them"),
    Refusal("", lambda f, _: f.is_interleaved and f.left_of(f.num_micro_batches),
        "{f.num_micro_batches} micro-batches a rank leave {found} after groups of {f.group}, but "
        "the remainder must be 0 or at least PP {f.pp}", "change --global-batch-size"),
    Refusal("wlb_max_step_tokens",
        lambda f, v: 0 < (v or 0) < (arrive := f.batch[0] * f.d.seq_length) and arrive,
        "{found} tokens arrive in a step", "use at least that, or 0 for no such bound"),
)  # fmt: skip
"""Rules of batches, where the layout can run: only the first that applies is told."""

ALONE: Rules = (
    *(
        Refusal[Facts](name, given, f"it is for the launcher (docs/megatron-lm.md): here is {has}")
        for name, has in (
            ("step_batch_size_schedule", "one size of batches"),
            ("decrease_batch_size_if_needed", "one size of batches"),
            ("fp8_format", "no FP8"),
            ("use_torch_fsdp2", "no FSDP2"),
            ("wlb_strategies", "one layout"),
            ("wlb_metrics", "no log"),
        )
    ),
    Refusal("moe_token_dispatcher_type", lambda f, v: f.m.num_experts and v == "flex",
        "micro-batches have unequal lengths", "use alltoall"),
)  # fmt: skip
"""What cannot run without Megatron-LM's loop besides."""

RULES: dict[str, Rules] = {
    "multi_latent_attention": LATENT,
    "num_experts": EXPERTS,
    "mtp_num_layers": PREDICTION,
}
"""Rules of a part of the model, by the setting without which there is none."""
