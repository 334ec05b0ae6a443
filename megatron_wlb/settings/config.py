"""One tree of settings: the command line, its help and the YAML file are made of the dataclasses
below (:mod:`megatron_wlb.settings.command_line`).

Names and meanings are Megatron's (``--num-layers`` is ``Config.model.num_layers``); ours begin
with ``wlb_``.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_wlb.reading import typed
from megatron_wlb.settings.split import PipelineSplit


def setting(default: Any, help: str) -> Any:
    """A dataclass field with the text that ``--help`` shows."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and parts of the GPT."""

    num_layers: int = setting(4, "transformer layers")
    hidden_size: int = setting(64, "hidden size")
    ffn_hidden_size: int | None = setting(None, "MLP size; 4 × hidden if not given")
    num_attention_heads: int = setting(4, "query heads")
    group_query_attention: bool = setting(False, "grouped-query attention")
    num_query_groups: int = setting(1, "key/value heads with --group-query-attention")
    kv_channels: int | None = setting(None, "head dimension; hidden ÷ heads if not given")
    transformer_impl: Literal["local", "transformer_engine"] | None = setting(
        None,
        "layers of torch and Megatron, or of TransformerEngine; attention is ours in both. "
        "TransformerEngine on a GPU where it can be imported, else local, if not given",
    )
    position_embedding_type: Literal["rope", "yarn", "learned_absolute", "none"] = setting(
        "rope", "positions count from the start of each document"
    )
    max_position_embeddings: int | None = setting(
        None, "rows of learned positions; at least --seq-length"
    )
    rotary_base: int = setting(10000, "base of the rotary angles")
    rotary_percent: float = setting(1.0, "share of the head dimension that is rotated")
    rotary_interleaved: bool = setting(False, "rotate even/odd pairs instead of halves")
    rotary_seq_len_interpolation_factor: int | None = setting(
        None, "positions are divided by this before they are rotated (linear scaling)"
    )
    use_rope_scaling: bool = setting(False, "scale rotary frequencies as Llama 3.x does")
    rope_scaling_factor: float = setting(8.0, "factor of --use-rope-scaling")
    wlb_yarn_rotary_scaling_factor: float = setting(
        1.0, "with `yarn`: length that is aimed at ÷ --wlb-yarn-original-max-position-embeddings"
    )
    wlb_yarn_original_max_position_embeddings: int = setting(
        4096, "with `yarn`: length that the model was trained for before"
    )
    wlb_yarn_beta_fast: float = setting(
        32.0, "with `yarn`: rotations above which nothing is scaled"
    )
    wlb_yarn_beta_slow: float = setting(1.0, "with `yarn`: rotations below which all is scaled")
    wlb_yarn_mscale: float = setting(1.0, "with `yarn`: concentration of attention")
    wlb_yarn_mscale_all_dim: float = setting(0.0, "with `yarn`: concentration that is divided by")
    multi_latent_attention: bool = setting(
        False, "multi-latent attention: keys and values of all heads come of one latent of a token"
    )
    q_lora_rank: int | None = setting(
        None, "with --multi-latent-attention: rank of queries' projection; whole if not given"
    )
    kv_lora_rank: int = setting(32, "with --multi-latent-attention: numbers of the latent")
    qk_head_dim: int = setting(
        128, "with --multi-latent-attention: numbers of a query's and key's head without a position"
    )
    qk_pos_emb_head_dim: int = setting(
        64,
        "with --multi-latent-attention: numbers besides, which are rotated; all heads' keys "
        "share them",
    )
    v_head_dim: int = setting(128, "with --multi-latent-attention: numbers of a value's head")
    rope_type: Literal["rope", "yarn"] | None = setting(
        None, "with --multi-latent-attention: how these are rotated; yarn if not given"
    )
    rotary_scaling_factor: float = setting(
        1.0, "with yarn there: length that is aimed at ÷ that which it was trained for before"
    )
    mscale: float = setting(1.0, "with yarn there: concentration of attention")
    mscale_all_dim: float = setting(0.0, "with yarn there: concentration that is divided by")
    normalization: Literal["LayerNorm", "RMSNorm"] = setting("LayerNorm", "kind of layer norm")
    norm_epsilon: float = setting(1e-5, "epsilon of the layer norm")
    qk_layernorm: bool = setting(False, "normalise queries and keys")
    swiglu: bool = setting(False, "gated MLP with SiLU")
    disable_bias_linear: bool = setting(False, "no bias in linear layers")
    add_qkv_bias: bool = setting(False, "bias in the QKV projection only")
    window_size: tuple[int, ...] = setting(
        (),
        "W 0 or W,0: a sliding window; a query sees W keys of its document before its own. All if "
        "not given",
    )
    window_attn_skip_freq: str | None = setting(
        None,
        "with --window-size: N leaves every Nth layer without it; or a list of 1 (has it) and 0 "
        "for the layers, as in ([1]*3+[0])*2",
    )
    untie_embeddings_and_output_weights: bool = setting(False, "separate output weights")
    make_vocab_size_divisible_by: int = setting(128, "vocabulary is padded to this × TP")
    hidden_dropout: float = setting(0.0, "dropout after attention and MLP")
    attention_dropout: float = setting(0.0, "dropout of attention's probabilities")
    init_method_std: float = setting(0.02, "standard deviation of initial weights")
    mtp_num_layers: int | None = setting(
        None,
        "layers after the last one, each predicting one token further ahead; none if not given",
    )
    mtp_loss_scaling_factor: float = setting(
        0.1, "what the mean loss of --mtp-num-layers counts beside the model's own"
    )
    num_experts: int | None = setting(
        None, "experts of a layer of experts; all layers are dense if not given"
    )
    moe_layer_freq: str = setting(
        "1",
        "with --num-experts: N makes every Nth layer one of experts, from the first on; or a list "
        "of 1 (experts) and 0 (dense) for the layers, as in [0]*3+[1]*58",
    )
    moe_ffn_hidden_size: int | None = setting(
        None, "MLP size of an expert; --ffn-hidden-size if not given"
    )
    moe_shared_expert_intermediate_size: int | None = setting(
        None, "MLP size of the shared expert, which every token passes; none if not given"
    )
    moe_router_topk: int = setting(2, "experts that a token passes")
    moe_router_load_balancing_type: tuple[
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"], ...
    ] = setting(
        ("aux_loss",), "what evens out tokens over experts; several with a coefficient each"
    )
    moe_aux_loss_coeff: tuple[float, ...] = setting((0.0,), "weight of each auxiliary loss")
    moe_z_loss_coeff: float | None = setting(None, "weight of the router's z-loss")
    moe_router_score_function: Literal["softmax", "sigmoid"] = setting(
        "softmax", "how the router scores experts"
    )
    moe_router_pre_softmax: bool = setting(False, "softmax before the top k, not after")
    moe_router_num_groups: int | None = setting(
        None, "groups of experts, of which a token's experts lie in --moe-router-group-topk"
    )
    moe_router_group_topk: int | None = setting(None, "with --moe-router-num-groups")
    moe_router_topk_scaling_factor: float | None = setting(
        None, "factor of the scores of a token's experts"
    )
    moe_router_enable_expert_bias: bool = setting(
        False, "a bias of each expert, moved every step, evens out tokens without a loss"
    )
    moe_router_bias_update_rate: float = setting(1e-3, "how far a step moves that bias")
    moe_router_dtype: Literal["fp32", "fp64"] | None = setting(
        None, "precision of the router; that of the model if not given"
    )
    moe_grouped_gemm: bool = setting(False, "one kernel for all experts of a device")
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = setting(
        "alltoall", "how tokens reach their experts"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out over the processes that torchrun starts."""

    tensor_model_parallel_size: int = setting(1, "TP")
    pipeline_model_parallel_size: int = setting(1, "PP")
    num_virtual_stages_per_pipeline_rank: int | None = setting(
        None, "VPP: model chunks a pipeline rank (interleaved 1F1B)"
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = setting(
        None, "micro-batches that a chunk runs in a row with VPP; PP if not given"
    )
    decoder_first_pipeline_num_layers: int | None = setting(
        None, "layers of the first pipeline rank; the others share the rest"
    )
    decoder_last_pipeline_num_layers: int | None = setting(
        None, "layers of the last pipeline rank; the others share the rest"
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False, "the embedding counts as a layer where layers are divided over stages"
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, "LM head and loss count as a layer where layers are divided over stages"
    )
    pipeline_model_parallel_layout: str | None = setting(
        None,
        "stages one by one, of embedding E, layers t, --mtp-num-layers m and loss L, as in "
        "'Et*3|(t*4|)*2t*3L'",
    )
    context_parallel_size: int = setting(
        1, "CP: ranks over which each micro-batch's tokens are divided"
    )
    expert_model_parallel_size: int = setting(
        1, "EP: ranks over which experts are divided, of data- and context-parallel ones too"
    )
    expert_tensor_parallel_size: int | None = setting(
        None, "TP of experts; --tensor-model-parallel-size if not given"
    )
    sequence_parallel: bool = setting(False, "shard norms and residuals over TP")
    no_overlap_p2p_communication: bool = setting(
        False, "with VPP: do not overlap pipeline communication with computation"
    )
    use_distributed_optimizer: bool = setting(False, "shard optimizer state over DP")
    overlap_grad_reduce: bool = setting(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = setting(
        False,
        "gather updated weights during the next forward pass; with --use-distributed-optimizer and "
        "--overlap-grad-reduce",
    )
    distributed_backend: Literal["nccl", "gloo"] | None = setting(
        None, "nccl on GPUs, gloo on CPUs if not given"
    )
    distributed_timeout_minutes: int = setting(10, "after which a collective gives up")

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

    micro_batch_size: int = setting(1, "windows of tokens that a micro-batch stands for")
    global_batch_size: int = setting(
        8,
        "windows of tokens that arrive a step; by --micro-batch-size it is N, the number of "
        "micro-batches over DP",
    )
    rampup_batch_size: tuple[int, ...] = setting(
        (), "START INCREMENT SAMPLES: batches that grow to the global one; for the launcher"
    )
    step_batch_size_schedule: str | None = setting(
        None, '"TOKENS:WINDOWS …" from which batches grow; for the launcher, from Megatron-LM 0.18'
    )
    decrease_batch_size_if_needed: bool = setting(
        False, "round batches down to what --micro-batch-size × DP divides; for the launcher"
    )
    train_iters: int = setting(100, "steps to train; less if --wlb-epochs ends the data before")
    exit_interval: int | None = setting(None, "leave at a step that this divides, after saving")
    exit_signal_handler: bool = setting(
        False, "at SIGTERM, to any rank, save after the step under way and leave with exit code 0"
    )
    seed: int = setting(1234, "seed of weights, dropout and document order")
    deterministic_mode: bool = setting(
        False, "the same bits each time, or an error: slower on GPUs, where it needs NCCL_ALGO"
    )
    bf16: bool = setting(False, "bfloat16 weights and activations, fp32 master weights")
    fp8_format: Literal["e4m3", "hybrid"] | None = setting(
        None, "matrix products of layers in FP8; for the launcher, as all that follow of FP8"
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8", "custom"] = setting(
        "delayed", "scaling in FP8; each needs lengths of its own, to which lengths are padded"
    )
    fp8_param_gather: bool = setting(False, "keep and gather weights in FP8 alone")
    first_last_layers_bf16: bool = setting(False, "leave first and last layers out of FP8")
    num_layers_at_start_in_bf16: int = setting(1, "with --first-last-layers-bf16")
    num_layers_at_end_in_bf16: int = setting(1, "with --first-last-layers-bf16")
    recompute_granularity: Literal["full", "selective"] | None = setting(
        None, "recompute activations in the backward pass"
    )
    recompute_method: Literal["uniform", "block"] | None = setting(None, "with full recompute")
    recompute_num_layers: int | None = setting(None, "with full recompute")
    optimizer: Literal["adam", "sgd"] = setting("adam", "optimizer")
    lr: float = setting(1e-3, "peak learning rate")
    min_lr: float = setting(0.0, "learning rate after decay")
    lr_decay_style: Literal["constant", "linear", "cosine"] = setting("cosine", "decay")
    lr_decay_iters: int | None = setting(None, "steps of the decay; --train-iters if not given")
    lr_warmup_iters: int = setting(0, "steps of linear warm-up")
    weight_decay: float = setting(0.01, "decoupled weight decay")
    adam_beta1: float = setting(0.9, "Adam's β₁")
    adam_beta2: float = setting(0.95, "Adam's β₂")
    adam_eps: float = setting(1e-8, "Adam's ε")
    sgd_momentum: float = setting(0.9, "momentum of SGD")
    clip_grad: float = setting(1.0, "global gradient norm is clipped to this; 0 is off")


@dataclass(frozen=True)
class DataConfig:
    """Documents."""

    data_path: tuple[str, ...] = setting(
        (), "prefixes of Megatron .bin/.idx corpora: A B …, or with weights: 0.3 A 0.7 B …"
    )
    mock_data: bool = setting(
        False, "random tokens instead of corpora, in documents as --wlb-mock-lengths says"
    )
    split: str = setting("969,30,1", "shares of documents for training, validation and test")
    seq_length: int = setting(8192, "the window, in tokens")
    vocab_size: int | None = setting(
        None, "vocabulary; read from PREFIX.json if it is there, needed with --mock-data"
    )
    eval_interval: int = setting(0, "evaluate every so many steps; 0 is never")
    eval_iters: int = setting(4, "steps an evaluation")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = setting(None, "folder to save checkpoints in")
    load: str | None = setting(None, "folder to resume from; an empty one starts afresh")
    save_interval: int | None = setting(None, "save every so many steps; also at the end")


@dataclass(frozen=True)
class LoggingConfig:
    """What is written where."""

    log_interval: int = setting(1, "log every so many steps")
    tensorboard_dir: str | None = setting(None, "folder for TensorBoard")


@dataclass(frozen=True)
class WlbConfig:
    """Workload balance: everything that stock Megatron does not have."""

    wlb_packing: Literal["original", "fixed-greedy", "fixed-solver", "wlb", "hold", "slim"] = (
        setting(
            "hold",
            "original: Megatron's fixed windows. fixed-greedy, fixed-solver: fixed windows, "
            "repacked over --wlb-fixed-batches. wlb: Algorithm 1 of WLB-LLM, with delay queues. "
            "hold: holds back the fewest heaviest documents. slim: cuts long documents into slices "
            "(SlimPack), and holds none back",
        )
    )
    wlb_max_tokens: int | None = setting(
        None, "S_max: most tokens of a micro-batch, as memory allows; 2 windows if not given"
    )
    wlb_memory_gib: float | None = setting(
        None,
        "memory of a device for tensors, in GiB: S_max is what fits, and a larger "
        "--wlb-max-tokens an error",
    )
    wlb_max_step_tokens: int | None = setting(
        None,
        "most tokens of a step, to even out steps; documents that have waited --wlb-max-age steps "
        "may run above it. N × S_max if not given",
    )
    wlb_queue_thresholds: tuple[int, ...] = setting(
        (), "L_1 L_2 …: shortest document of each delay queue of `wlb`; derived if not given"
    )
    wlb_expert_imbalance: float = setting(
        1.0,
        "with --num-experts: memory is planned for a rank whose experts get so many times the "
        "tokens of the mean rank; 1 is even routing",
    )
    wlb_hold_tau: float = setting(
        1.0, "`hold`: imbalance of a step below which nothing is gained; at least 1"
    )
    wlb_delay_price: float | None = setting(
        None,
        "`hold`: imbalance that delaying a whole step's tokens by one step may save; 0.15 if not "
        "given, 0.45 with --wlb-look-ahead",
    )
    wlb_look_ahead: int = setting(
        0, "`hold`: steps from which documents may run early; that counts as delay too"
    )
    wlb_shape: Literal["on", "off"] = setting(
        "off",
        "`hold`, `wlb` with a pipeline: small micro-batches first and last, sizes and order chosen "
        "by simulated step time instead of equal work",
    )
    wlb_micro_batches: Literal["fixed", "auto"] = setting(
        "fixed",
        "`original`, `hold`, `wlb` with a pipeline: how many micro-batches a step has. fixed: by "
        "the batch size. auto: as many as make the simulated step of its documents shortest",
    )
    wlb_fixed_batches: int = setting(
        1, "`fixed-greedy`, `fixed-solver`: global batches that are repacked together"
    )
    wlb_fixed_grouping: Literal["sorted", "arrival"] = setting(
        "sorted",
        "`fixed-greedy`: which windows of several global batches run in a step: those of like "
        "work, or those that arrived together",
    )
    wlb_solver_limit: float = setting(
        10.0,
        "`fixed-solver`: search a step or group of steps, in deterministic time: about so many "
        "seconds, but the same plan on every rank",
    )
    wlb_units: int | None = setting(
        None,
        "`slim`: micro-batches to cut a data-parallel rank's step into; chosen by simulated step "
        "time if not given",
    )
    wlb_slice_multiple: int | None = setting(
        None,
        "`slim`: documents are cut at multiples of so many tokens; 128 if not given, or a 64th of "
        "the window where that is less",
    )
    wlb_dp_merge: Literal["auto", "off"] = setting(
        "auto",
        "`slim`: a document that outweighs a data-parallel rank's mean runs on several of them "
        "together, as context-parallel ranks, where that is faster in simulation",
    )
    wlb_max_age: int = setting(12, "steps after which a delayed document runs whatever it costs")
    wlb_long_documents: Literal["split", "slice", "truncate", "error"] = setting(
        "split",
        "what becomes of documents longer than the window; slice: `slim` trains them whole",
    )
    wlb_mock_lengths: str | None = setting(
        None,
        "with --mock-data: a distribution (reference, stdlib, magi, slimpack) or a file of "
        "lengths, one a line or an .npy array; reference if not given",
    )
    wlb_epochs: int | None = setting(None, "end after so many passes over the data, all trained")
    wlb_cp_sharding: Literal["per-sequence", "per-document", "adaptive", "hybrid"] = setting(
        "adaptive",
        "with CP: how a micro-batch is divided. per-sequence: 2·CP pieces of the whole. "
        "per-document: 2·CP pieces of each document. adaptive: of these two the one whose slowest "
        "rank has the faster attention, as predicted. hybrid: also per-document for long documents "
        "only, from a length on that is chosen likewise",
    )
    wlb_strategies: str | None = setting(
        None,
        "replicas of unlike layouts, chosen step by step (Hydraulis): a YAML file such as "
        "`wlb plan --strategies --out` writes, or auto, which proposes them at start; for the "
        "embedded trainer",
    )
    wlb_cost: str = setting(
        "analytic",
        "analytic: from the model's shape. measured: timed at start. Or a JSON or YAML file of "
        "coefficients or measured tables",
    )
    wlb_hardware: str = setting(
        "h100-sxm",
        "machine of the analytic cost and of --wlb-cp-sharding: h100-sxm, h200, a100, a800, cpu, "
        "or a YAML file such as `wlb profile` writes",
    )
    wlb_cost_extrapolate: bool = setting(
        False, "go beyond the longest length of measured tables; otherwise that is an error"
    )
    wlb_attention_kernel: Literal[
        "auto", "torch", "flash-attn-2", "flash-attn-3", "transformer-engine", "torch-cpu", "sdpa"
    ] = setting(
        "auto",
        "attention kernel; auto is the fastest that can run here, on GPUs by timing, and the log "
        "says which and why",
    )
    wlb_cp_overlap_groups: int | None = setting(
        None,
        "with CP or --wlb-dp-merge: groups of key/value heads; one is gathered while the one "
        "before is attended to. A divisor of a TP rank's key/value heads; on GPUs 2 where that "
        "divides, else 1",
    )
    wlb_cp_keep_gathered: bool = setting(
        False,
        "with CP or --wlb-dp-merge: keep gathered keys and values for the backward pass instead "
        "of gathering twice: memory for communication",
    )
    wlb_cp_reduce_in_fp32: bool = setting(
        False,
        "with CP or --wlb-dp-merge: sum the gradients of keys and values in fp32 over chunks and "
        "ranks instead of in bf16: twice the bytes of that exchange",
    )
    wlb_device: Literal["auto", "cuda", "cpu"] = setting(
        "auto", "cpu runs Megatron under the CPU emulation; auto never does where a GPU is"
    )
    wlb_verify_plan_interval: int = setting(
        1,
        "compare the plan's digest over all ranks every so many steps, and what ranks that need "
        "the same tokens read in the step before; 0 is never",
    )
    wlb_allow_untested_megatron: bool = setting(
        False, "go on with a megatron-core that is not in the table of versions, with a warning"
    )
    wlb_hang_seconds: float = setting(
        600.0,
        "end where a micro-batch takes longer, and say whom this rank waits for; 6 times as long "
        "for a plan, the first step or a checkpoint; 0 is never",
    )
    wlb_no_checksums: bool = setting(
        False,
        "neither save checksums of a checkpoint's files nor compare them before it is loaded: "
        "spares a second reading of huge ones, but a damaged one may train on unnoticed",
    )
    wlb_no_ledger: bool = setting(
        False,
        "do not write which documents ran at which step to wlb_ledger.txt in the folder of --save, "
        "which `wlb audit` reads",
    )
    wlb_verify_shapes: bool = setting(
        False,
        "debug: stages also tell each other the shape, sum and crc32 of each activation and "
        "gradient that they send, and compare; slow",
    )
    wlb_metrics: str | None = setting(None, "file for one JSON line a step")
    wlb_config: str | None = setting(None, "YAML file of settings, under the command line")

    @property
    def numbers_by_step(self) -> bool:
        """Whether a plan, and not the batch size, says how many micro-batches its step has."""
        return self.wlb_packing == "slim" or self.wlb_micro_batches == "auto"

    @property
    def simulates(self) -> bool:
        """Whether steps are simulated to plan them."""
        return self.wlb_shape == "on" or self.numbers_by_step


@dataclass(frozen=True)
class Config:
    """Everything a training run is told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    wlb: WlbConfig = field(default_factory=WlbConfig)

    def flat(self) -> dict[str, Any]:
        """Settings by name, JSON-able: what is saved with a run."""
        return {k: v for group in dataclasses.asdict(self).values() for k, v in group.items()}


def groups_of_settings() -> dict[str, type]:
    return typing.get_type_hints(Config)


def flag_of(name: str) -> str:
    """``num_layers`` -> ``--num-layers``."""
    return "--" + name.replace("_", "-")


def from_flat(values: dict[str, Any]) -> Config:
    """A :class:`Config` from settings by name; what is missing keeps its default.

    Raises :class:`ConfigError` for values of another type than the setting's.
    """
    groups = {
        name: group(
            **{
                setting: typed(flag_of(setting), values[setting], hint)
                for setting, hint in typing.get_type_hints(group).items()
                if setting in values
            }
        )
        for name, group in groups_of_settings().items()
    }
    return Config(**groups)
