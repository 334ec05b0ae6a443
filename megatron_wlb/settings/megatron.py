"""Settings that Megatron-LM has too, with its names and meanings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_wlb.reading import MAX_SIZE, MOST_LAYERS, MOST_TOKENS
from megatron_wlb.settings.setting import (
    SAME,
    count,
    devices,
    factor,
    micro_batches,
    real,
    searched,
    setting,
    share,
    size,
)
from megatron_wlb.settings.split import PipelineSplit


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and parts of the GPT."""

    num_layers: int = setting(4, "transformer layers", least=1, most=MOST_LAYERS)
    hidden_size: int = size(64, "hidden size")
    ffn_hidden_size: int | None = size(None, "MLP size; 4 × hidden if not given")
    num_attention_heads: int = size(4, "query heads")
    group_query_attention: bool = setting(False, "grouped-query attention")
    num_query_groups: int = size(1, "key/value heads with --group-query-attention")
    kv_channels: int | None = size(None, "head dimension; hidden ÷ heads if not given")
    transformer_impl: Literal["local", "transformer_engine"] | None = setting(
        None,
        "layers of torch and Megatron, or of TransformerEngine; attention is ours in both. If not "
        "given, TransformerEngine on a GPU if it can be imported, else local",
        script_default="transformer_engine",
    )
    position_embedding_type: Literal["rope", "yarn", "learned_absolute", "none"] = setting(
        "rope",
        "positions count from the start of each document",
        script_default="learned_absolute",
    )
    max_position_embeddings: int | None = searched(
        None,
        "rows of learned positions; at least --seq-length",
        most=MAX_SIZE,
    )
    rotary_base: int = count(10000, "base of the rotary angles")
    rotary_percent: float = setting(1.0, "share of the head dimension that is rotated")
    rotary_interleaved: bool = setting(False, "rotate even/odd pairs instead of halves")
    rotary_seq_len_interpolation_factor: int | None = count(
        None, "positions are divided by this before they are rotated (linear scaling)", script=""
    )
    use_rope_scaling: bool = setting(False, "scale rotary frequencies as Llama 3.x does", script="")
    rope_scaling_factor: float = factor(8.0, "factor of --use-rope-scaling", script="")
    wlb_yarn_rotary_scaling_factor: float = factor(
        1.0, "with `yarn`: new length ÷ --wlb-yarn-original-max-position-embeddings"
    )
    wlb_yarn_original_max_position_embeddings: int = count(
        4096, "with `yarn`: length of the earlier training"
    )
    wlb_yarn_beta_fast: float = real(32.0, "with `yarn`: rotations above which nothing is scaled")
    wlb_yarn_beta_slow: float = real(1.0, "with `yarn`: rotations below which all is scaled")
    wlb_yarn_mscale: float = real(1.0, "with `yarn`: concentration of attention")
    wlb_yarn_mscale_all_dim: float = real(0.0, "with `yarn`: concentration that is divided by")
    multi_latent_attention: bool = setting(
        False,
        "multi-latent attention: keys and values of all heads come from one latent of a token",
    )
    q_lora_rank: int | None = size(
        None, "with --multi-latent-attention: rank of the projection of queries; full if not given"
    )
    kv_lora_rank: int = size(32, "with --multi-latent-attention: size of the latent")
    qk_head_dim: int = size(
        128, "with --multi-latent-attention: size of a head of queries and keys without position"
    )
    qk_pos_emb_head_dim: int = size(
        64,
        "with --multi-latent-attention: size of the rotated part of a head; all heads share "
        "that of keys",
    )
    v_head_dim: int = size(128, "with --multi-latent-attention: size of a head of values")
    rope_type: Literal["rope", "yarn"] | None = setting(
        None, "with --multi-latent-attention: how that part is rotated; yarn if not given"
    )
    rotary_scaling_factor: float = factor(
        1.0, "with yarn there: new length ÷ length of the earlier training"
    )
    mscale: float = real(1.0, "with yarn there: concentration of attention")
    mscale_all_dim: float = real(0.0, "with yarn there: concentration that is divided by")
    linear_num_key_heads: int = size(16, "with layers G: heads of queries and keys")
    linear_num_value_heads: int = size(32, "with layers G: heads of values")
    linear_key_head_dim: int = size(128, "with layers G: size of a head of queries and keys")
    linear_value_head_dim: int = size(128, "with layers G: size of a head of values")
    linear_conv_kernel_dim: int = size(4, "with layers G: taps of the convolution")
    mamba_num_heads: int | None = size(None, "with layers M: heads; 2 × hidden ÷ head if not given")
    mamba_head_dim: int = size(64, "with layers M: size of a head")
    mamba_state_dim: int = size(128, "with layers M: numbers of a state a channel")
    mamba_num_groups: int = size(8, "with layers M: groups of heads that share B and C")
    normalization: Literal["LayerNorm", "RMSNorm"] = setting("LayerNorm", "kind of layer norm")
    norm_epsilon: float = real(1e-5, "epsilon of the layer norm", script="layernorm_epsilon")
    qk_layernorm: bool = setting(False, "normalise queries and keys")
    attention_output_gate: bool = setting(
        False, "a gate of each number of attention's output, as in Qwen3.5"
    )
    swiglu: bool = setting(False, "gated MLP with SiLU")
    disable_bias_linear: bool = setting(False, "no bias in linear layers", script="")
    add_qkv_bias: bool = setting(False, "bias in the QKV projection only")
    window_size: tuple[int, ...] = setting(
        (),
        "W 0 or W,0: a sliding window: a query sees W keys of its document before its own. If not "
        "given, it sees all",
        script="",
        planned=True,
    )
    window_attn_skip_freq: str | None = setting(
        None,
        "with --window-size: N leaves every Nth layer without it; or a list of 1 (has it) and 0 "
        "for the layers, as in ([1]*3+[0])*2",
        script="",
        planned=True,
    )
    untie_embeddings_and_output_weights: bool = setting(False, "separate output weights")
    make_vocab_size_divisible_by: int = size(128, "vocabulary is padded to this × TP")
    hidden_dropout: float = share(
        0.0, "dropout after attention and MLP", resume="free", script_default=0.1
    )
    attention_dropout: float = share(
        0.0, "dropout of attention's probabilities", resume="free", script_default=0.1
    )
    init_method_std: float = real(
        0.02, "standard deviation of initial weights", script="", resume="free"
    )
    mtp_num_layers: int | None = setting(
        None,
        "layers after the last one; each predicts one token further ahead. No such layer if not "
        "given",
        least=1,
        most=MOST_LAYERS,
    )
    mtp_loss_scaling_factor: float = real(
        0.1, "weight of the mean loss of --mtp-num-layers beside the model's own"
    )
    num_experts: int | None = size(
        None, "experts of a layer of experts; all layers are dense if not given"
    )
    moe_layer_freq: str = setting(
        "1",
        "with --num-experts: N gives every Nth layer experts, from the first on; or a list "
        "of 1 (experts) and 0 (dense) for the layers, as in [0]*3+[1]*58",
        script="",
    )
    moe_ffn_hidden_size: int | None = size(
        None, "MLP size of an expert; --ffn-hidden-size if not given"
    )
    moe_shared_expert_intermediate_size: int | None = size(
        None, "MLP size of the shared expert, which every token passes; no such expert if not given"
    )
    moe_latent_size: int | None = size(
        None, "numbers of a token that experts take and give; the hidden size's if not given"
    )
    moe_router_topk: int = size(2, "experts that a token passes")
    moe_router_load_balancing_type: tuple[
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"], ...
    ] = setting(
        ("aux_loss",),
        "losses that spread tokens evenly over experts, with a coefficient each",
        script="",
    )
    moe_aux_loss_coeff: tuple[float, ...] = setting(
        (0.0,), "weight of each auxiliary loss", script=""
    )
    moe_z_loss_coeff: float | None = setting(None, "weight of the router's z-loss")
    moe_router_score_function: Literal["softmax", "sigmoid"] = setting(
        "softmax", "how the router scores experts"
    )
    moe_router_pre_softmax: bool = setting(False, "softmax before the top k, not after")
    moe_router_num_groups: int | None = size(
        None, "groups of experts; those of a token lie in --moe-router-group-topk groups"
    )
    moe_router_group_topk: int | None = size(None, "with --moe-router-num-groups")
    moe_router_topk_scaling_factor: float | None = setting(
        None, "factor of the scores of a token's experts"
    )
    moe_router_enable_expert_bias: bool = setting(
        False, "a bias of each expert moves every step and spreads tokens evenly without a loss"
    )
    moe_router_bias_update_rate: float = setting(1e-3, "how far one step moves that bias")
    moe_router_dtype: Literal["fp32", "fp64"] | None = setting(
        None, "precision of the router; that of the model if not given"
    )
    moe_grouped_gemm: bool = setting(False, "one kernel for all experts of a device")
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = setting(
        "alltoall", "how tokens reach their experts", script_default="allgather"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out over the processes that torchrun starts."""

    tensor_model_parallel_size: int = devices(
        1, "TP: ranks over which each layer is divided", short="tp_size", layout=True
    )
    pipeline_model_parallel_size: int = devices(1, "PP: stages", short="pp_size", layout=True)
    num_virtual_stages_per_pipeline_rank: int | None = devices(
        None,
        "VPP: model chunks a pipeline rank (interleaved 1F1B)",
        short="vpp_size",
        script="virtual_pipeline_model_parallel_size",
        layout=True,
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = searched(
        None,
        "micro-batches that a chunk runs in a row with VPP; PP if not given",
        script="microbatch_group_size_per_vp_stage",
    )
    decoder_first_pipeline_num_layers: int | None = setting(
        None, "layers of the first pipeline rank; the others share the rest", layout=True
    )
    decoder_last_pipeline_num_layers: int | None = setting(
        None, "layers of the last pipeline rank; the others share the rest", layout=True
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False, "the embedding counts as a layer when layers are divided over stages", layout=True
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, "LM head and loss count as a layer when layers are divided over stages", layout=True
    )
    pipeline_model_parallel_layout: str | None = setting(
        None,
        "stages one by one, of embedding E, layers t, --mtp-num-layers m and loss L, as in "
        "'Et*3|(t*4|)*2t*3L'",
        layout=True,
    )
    hybrid_layer_pattern: str | None = setting(
        None,
        "a HybridModel: a symbol a layer, of attention *, multi-latent attention +, a gated delta "
        "net G, Mamba-2 M, MLP -, experts E; | between stages; / before each depth that predicts "
        "further ahead, as in '*-*E|*E*E/*E'",
        layout=True,
    )
    context_parallel_size: int = devices(
        1, "CP: ranks that divide each micro-batch's tokens", short="cp_size", layout=True
    )
    expert_model_parallel_size: int = devices(
        1,
        "EP: ranks over which experts are divided, of data- and context-parallel ones too",
        short="ep_size",
        resume="same",
        searched=True,
    )
    expert_tensor_parallel_size: int | None = devices(
        None,
        "TP of experts; --tensor-model-parallel-size if not given",
        short="etp_size",
        resume="same",
        searched=True,
    )
    sequence_parallel: bool = searched(False, "shard norms and residuals over TP")
    no_overlap_p2p_communication: bool = setting(
        False, "with VPP: do not overlap pipeline communication with computation", script=""
    )
    use_distributed_optimizer: bool = searched(
        False, "shard optimizer state over DP", resume="same"
    )
    use_torch_fsdp2: bool = setting(False, "shard weights over DP by torch; for the launcher")
    overlap_grad_reduce: bool = searched(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = setting(
        False,
        "gather updated weights during the next forward pass; with --use-distributed-optimizer and "
        "--overlap-grad-reduce",
        script="",
    )
    distributed_backend: Literal["nccl", "gloo"] | None = setting(
        None, "nccl on GPUs, gloo on CPUs if not given"
    )
    distributed_timeout_minutes: int = count(
        10, "minutes after which a collective gives up", script=""
    )

    @property
    def split(self) -> PipelineSplit:
        """How layers are divided over stages."""
        return PipelineSplit.of(self)

    @property
    def vpp_size(self) -> int:
        """Model chunks a pipeline rank, of the layout or the flag; 1 where neither says any.

        Raises :class:`ConfigError` for a layout that cannot be.
        """
        of_layout = self.split.vpp_size(self.pipeline_model_parallel_size)
        return max(1, of_layout or self.num_virtual_stages_per_pipeline_rank or 1)


@dataclass(frozen=True)
class TrainingConfig:
    """Batch, precision, optimizer and schedule."""

    micro_batch_size: int = micro_batches(
        1,
        "windows of tokens that a micro-batch stands for",
        script=SAME,
        resume="same",
        searched=True,
    )
    global_batch_size: int = micro_batches(
        8,
        "windows of tokens that arrive in a step; divided by --micro-batch-size it is N, the "
        "number of micro-batches over DP",
        script=SAME,
        resume="same",
        searched=True,
    )
    step_batch_size_schedule: str | None = searched(
        None, '"TOKENS:WINDOWS …" from which batches grow; for the launcher'
    )
    decrease_batch_size_if_needed: bool = searched(
        False,
        "round batches down to what --micro-batch-size × DP divides; for the launcher",
        script=SAME,
    )
    train_iters: int = count(100, "steps of the learning rate's schedule", resume="same")
    seed: int = setting(
        1234, "seed of weights, dropout and document order", within=(0, 2**32), script=SAME
    )
    deterministic_mode: bool = setting(
        False,
        "the same bits each time, or an error: slower on GPUs, where it needs NCCL_ALGO",
        script=SAME,
    )
    bf16: bool = searched(
        False, "bfloat16 weights and activations, fp32 master weights", resume="same"
    )
    fp8_format: Literal["e4m3", "hybrid"] | None = setting(
        None,
        "matrix products of layers in FP8; for the launcher, like all other flags of FP8",
        script="fp8",
        planned=True,
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8", "custom"] = setting(
        "delayed",
        "scaling in FP8; micro-batches are padded to the lengths that it needs",
        planned=True,
    )
    fp8_param_gather: bool = setting(False, "keep and gather weights in FP8 alone", script=SAME)
    first_last_layers_bf16: bool = setting(
        False, "leave first and last layers out of FP8", script=SAME
    )
    num_layers_at_start_in_bf16: int = setting(
        1, "with --first-last-layers-bf16", least=0, script=SAME
    )
    num_layers_at_end_in_bf16: int = setting(
        1, "with --first-last-layers-bf16", least=0, script=SAME
    )
    recompute_granularity: Literal["full", "selective"] | None = searched(
        None, "recompute activations in the backward pass", script=SAME
    )
    recompute_method: Literal["uniform", "block"] | None = searched(
        None, "with full recompute", script=SAME
    )
    recompute_num_layers: int | None = count(
        None, "with full recompute", script=SAME, searched=True
    )
    optimizer: Literal["adam", "sgd"] = setting("adam", "optimizer", resume="same")
    lr: float = real(1e-3, "peak learning rate", resume="same")
    min_lr: float = setting(0.0, "learning rate after decay", resume="same")
    lr_decay_style: Literal["constant", "linear", "cosine"] = setting(
        "cosine", "decay", resume="same"
    )
    lr_decay_iters: int | None = count(
        None, "steps of the decay; --train-iters if not given", resume="same"
    )
    lr_warmup_iters: int = setting(0, "steps of linear warm-up", least=0, resume="same")
    weight_decay: float = real(0.01, "decoupled weight decay", resume="same")
    adam_beta1: float = share(0.9, "Adam's β₁", resume="same")
    adam_beta2: float = share(0.95, "Adam's β₂", resume="same")
    adam_eps: float = real(1e-8, "Adam's ε", resume="same")
    sgd_momentum: float = share(0.9, "momentum of SGD", resume="same")
    clip_grad: float = real(1.0, "global gradient norm is clipped to this; 0 is off")


@dataclass(frozen=True)
class DataConfig:
    """Documents."""

    data_path: tuple[str, ...] = setting(
        (),
        "prefixes of Megatron .bin/.idx corpora: A B …, or with weights: 0.3 A 0.7 B …",
        alike=False,
    )
    mock_data: bool = setting(
        False,
        "random tokens instead of corpora, in documents of --wlb-mock-lengths",
        script=SAME,
    )
    split: str = setting(
        "969,30,1", "shares of documents for training, validation and test", script=SAME
    )
    seq_length: int = searched(
        8192,
        "the window, in tokens",
        short="window",
        least=2,
        most=MOST_TOKENS,
        script=SAME,
        resume="same",
    )
    vocab_size: int | None = size(
        None,
        "vocabulary; read from PREFIX.json if it is there, needed with --mock-data",
        resume="same",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = setting(None, "folder to save checkpoints in")
    load: str | None = setting(None, "folder to resume from; an empty one starts afresh")
