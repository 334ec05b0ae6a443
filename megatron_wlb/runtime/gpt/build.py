"""Settings -> Megatron's own GPT or HybridModel, whose layers know documents, wrapped for DP."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)

from megatron_wlb.cost.exchange import default_head_groups
from megatron_wlb.errors import CompatibilityError, ConfigError
from megatron_wlb.extensions import load
from megatron_wlb.planning.from_config import padded_vocab_size
from megatron_wlb.planning.layer_patterns import expert_layers, windowed_layers
from megatron_wlb.runtime import emulation
from megatron_wlb.runtime.compat.norm import TorchNorm
from megatron_wlb.runtime.gpt.attention.document_attention import (
    AttentionOptions,
    DocumentAttention,
    check_config,
    model_reach,
)
from megatron_wlb.runtime.gpt.attention.head_start import least_bytes
from megatron_wlb.runtime.gpt.attention.kernels import ChosenKernel, Demand, choose_kernel
from megatron_wlb.runtime.gpt.attention.latent_attention import DocumentLatentAttention
from megatron_wlb.runtime.gpt.attention.rope import use_document_positions
from megatron_wlb.runtime.gpt.hybrid import (
    attentions_of,
    depths_of,
    mixer_of,
    that_mix,
    with_layers,
)
from megatron_wlb.runtime.gpt.moe import route_by_document
from megatron_wlb.runtime.gpt.prediction import complete_layers
from megatron_wlb.runtime.ranks.transfer import of_all_ranks
from megatron_wlb.settings.config import Config
from megatron_wlb.settings.megatron import ModelConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """The model chunks of this rank (one, or VPP of them), wrapped, and what they share."""

    config: TransformerConfig
    groups: ProcessGroupCollection
    chunks: list[torch.nn.Module]
    gpts: list[GPTModel | HybridModel]

    @property
    def device(self) -> torch.device:
        """Where its weights are; a chunk may have none."""
        first: torch.Tensor = next(p for gpt in self.gpts for p in gpt.parameters())
        return first.device

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """All weights are up to date inside, and no forward pass gathers any.

        With ``--overlap-param-gather`` the optimizer leaves that to the next step's forward passes.
        """
        gathering: list[Any] = [chunk for chunk in self.chunks if chunk.use_forward_hook]
        for chunk in gathering:
            chunk.disable_forward_pre_hook()
        try:
            yield
        finally:
            for chunk in gathering:
                chunk.enable_forward_pre_hook()


BATCH_P2P_SYNC = False
"""Megatron's default synchronises the device after each batched exchange between stages, "to
protect against race condition when using batch_isend_irecv()", and says that a user with "a
modern enough PyTorch" need not. So are all that this package takes: there a request that was
waited for has its tensor in the order of the stream."""


def transformer_config(config: Config) -> TransformerConfig:
    """Megatron's configuration of the model, with what ragged micro-batches need."""
    model, parallel, training = config.model, config.parallel, config.training
    vpp = parallel.vpp_size if parallel.vpp_size > 1 else None
    overlap = vpp is not None and not parallel.no_overlap_p2p_communication
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    on_gpu = not emulation.installed()
    kind = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    ours = dict(
        num_query_groups=model.num_query_groups if model.group_query_attention else None,
        num_layers_in_first_pipeline_stage=parallel.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=parallel.decoder_last_pipeline_num_layers,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.swiglu,
        activation_func=torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu,
        # Compiled for GPUs. On the CPU nothing is, and its backward then has more passes than
        # torch's own. GELU's is an approximation, another model.
        bias_activation_fusion=on_gpu and model.swiglu,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        add_bias_linear=not model.disable_bias_linear,
        # TransformerEngine's kernel takes angles row by row, and ours are each token's own. It has
        # no factor, which YaRN needs, and old versions know no pairs. That of latents counts rows.
        apply_rope_fusion=on_gpu
        and not model.multi_latent_attention
        and model.position_embedding_type == "rope"
        and not model.rotary_interleaved
        and rope_utils.fused_apply_rotary_pos_emb is not None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Wherever the output layer, which is Megatron's own in both implementations, can have it.
        gradient_accumulation_fusion=layers._grad_accum_fusion_available,
        virtual_pipeline_model_parallel_size=vpp,
        microbatch_group_size_per_vp_stage=(
            parallel.microbatch_group_size_per_virtual_pipeline_stage
            or parallel.pipeline_model_parallel_size
        ),
        overlap_p2p_comm=overlap,
        # Batched p2p cannot overlap, and with VPP and PP=2 it mixes up activations and gradients.
        batch_p2p_comm=vpp is None,
        batch_p2p_sync=BATCH_P2P_SYNC,
        deallocate_pipeline_outputs=True,
        # Ragged micro-batches weigh tokens rightly only with one division, over the whole step.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        # Megatron refuses variable lengths with its default dispatcher, even for dense models.
        moe_token_dispatcher_type="alltoall",
        cuda_graph_modules=[],
        is_hybrid_model=parallel.hybrid_layer_pattern is not None,
        window_size=tuple(model.window_size) or None,
        window_attn_skip_freq=(
            list(map(int, windowed_layers(model))) if model.window_attn_skip_freq else None
        ),
        **(_of_experts(model) if model.num_experts else {}),
        **(_of_latents(model) if model.multi_latent_attention else {}),
    )
    core = kind(**_called_alike(config, kind) | ours)
    if model.position_embedding_type == "yarn":
        for name, value in config.flat().items():
            if name.startswith("wlb_yarn_"):
                # Where Megatron's GPT and its attention look for them, though they are no fields.
                setattr(core, name.removeprefix("wlb_"), value)
        core.yarn_correction_range_round_to_int = True
    return core


def _called_alike(config: Config, kind: type[TransformerConfig]) -> dict[str, Any]:
    """The settings that Megatron's configuration names as we do; without experts, not theirs."""
    settings = config.flat()
    return {
        f.name: settings[f.name]
        for f in fields(kind)
        if f.name in settings
        and f.name != "transformer_impl"  # which is what its layers are made of
        and (config.model.num_experts or not f.name.startswith(("moe_", "expert_")))
    }


def _of_latents(model: ModelConfig) -> dict[str, Any]:
    return {
        "rope_type": model.rope_type or "yarn",
        "original_max_position_embeddings": model.wlb_yarn_original_max_position_embeddings,
        "beta_fast": model.wlb_yarn_beta_fast,
        "beta_slow": model.wlb_yarn_beta_slow,
    }


def _of_experts(model: ModelConfig) -> dict[str, Any]:
    """What :func:`transformer_config` says of experts."""
    kinds, coeffs = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    return {
        "num_moe_experts": model.num_experts,
        "moe_layer_freq": list(map(int, expert_layers(model))),
        "moe_router_load_balancing_type": list(kinds) if len(kinds) > 1 else kinds[0],
        "moe_aux_loss_coeff": list(coeffs) if len(coeffs) > 1 else coeffs[0],
    }


def transformer_impl(config: Config) -> str:
    """Whose layers a model has: those asked for, or TransformerEngine's on a GPU that has them."""
    has_engine = gpt_layer_specs.HAVE_TE and not emulation.installed()
    return config.model.transformer_impl or ("transformer_engine" if has_engine else "local")


def layer_submodules(
    core: TransformerConfig, impl: str, options: AttentionOptions, *, has_experts: bool = False
) -> tuple[ModuleSpec, Any]:
    """The layer with our attention, and the final norm: of Megatron's modules or TransformerEngine.

    With ``has_experts`` its MLP is the model's experts.

    Raises :class:`CompatibilityError` where TransformerEngine is asked for and missing.
    """
    experts: dict[str, Any] = {}
    latent = core.multi_latent_attention
    if has_experts:
        grouped = core.moe_grouped_gemm
        experts = {"num_experts": core.num_moe_experts, "moe_grouped_gemm": grouped}
    if impl == "transformer_engine":
        if not gpt_layer_specs.HAVE_TE:
            raise CompatibilityError(
                "--transformer-impl is transformer_engine, which cannot be imported; install "
                "transformer-engine[pytorch], or use --transformer-impl local"
            )
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=core.qk_layernorm, **experts, multi_latent_attention=latent
        )
        return with_document_attention(spec, options), gpt_layer_specs.TENorm
    if core.moe_grouped_gemm:
        raise CompatibilityError(
            "--moe-grouped-gemm runs TransformerEngine's kernels, and the layers are Megatron's "
            "own; leave it out, or use --transformer-impl transformer_engine"
        )
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        qk_layernorm=core.qk_layernorm, **experts, multi_latent_attention=latent
    )
    # Megatron's own torch norm refuses sequence parallelism.
    spec.submodules.input_layernorm = TorchNorm
    spec.submodules.pre_mlp_layernorm = TorchNorm
    if core.qk_layernorm:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = TorchNorm
        of_keys = "kv_layernorm" if latent else "k_layernorm"
        setattr(attention, of_keys, TorchNorm)
    return with_document_attention(spec, options), TorchNorm


def prediction_submodules(
    core: TransformerConfig, layer: ModuleSpec, norm: Any, vp_stage: int | None
) -> Any:
    """The layers that predict further ahead, of the model's own ``layer`` and ``norm``; None on a
    chunk that has none.
    """
    block = gpt_layer_specs.get_gpt_mtp_block_spec(
        core, layer, use_transformer_engine=norm is not TorchNorm, vp_stage=vp_stage
    )
    for further in block.layer_specs if block else ():
        parts = further.submodules
        parts.enorm = parts.hnorm = parts.layer_norm = norm
    return block


_SCANS = {GatedDeltaNet, MambaMixer}
"""Megatron's mixers that carry a state; an extension named like each takes its place."""


def with_document_attention(spec: ModuleSpec, options: AttentionOptions) -> ModuleSpec:
    """``spec``, of a layer, with its core attention replaced by ours, or what carries a state
    through documents by what is told of them.

    Raises :class:`CompatibilityError` for a layer that mixes tokens in another way.
    """
    attention: Any = mixer_of(getattr(spec, "submodules", None))
    module = getattr(attention, "module", None)
    if module in _SCANS:
        attention.module = load(str(getattr(module, "__name__", "")))
        return spec
    core: Any = partial(DocumentAttention, options=options)
    if module is MLASelfAttention:  # which takes a spec, or a class, of its core
        attention.module = DocumentLatentAttention
        core = ModuleSpec(DocumentAttention, params={"options": options})
    elif module is not SelfAttention:
        raise CompatibilityError(
            f"the layer's attention is {getattr(module, '__name__', module)}, which cannot be told "
            "of documents; use SelfAttention, MLASelfAttention, GatedDeltaNet or MambaMixer"
        )
    attention.submodules.core_attention = core
    return spec


def packed(spec: Any, options: AttentionOptions) -> Any:
    """A copy of a layer's, block's or stack's spec with our attention in every layer.

    Raises :class:`CompatibilityError` as :func:`with_document_attention`.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        layers = [packed(layer, options) for layer in spec.layer_specs or []]
        return replace(spec, layer_specs=layers)
    stack = getattr(spec, "submodules", None)
    if isinstance(stack, HybridStackSubmodules):
        mixing = that_mix(stack).items()
        return with_layers(
            spec, {name: with_document_attention(of, options) for name, of in mixing}
        )
    return with_document_attention(copy.deepcopy(spec), options)


def require_document_attention(gpt: Any) -> None:
    """Raises :class:`CompatibilityError` where Megatron built another core attention than ours, or
    a layer that mixes tokens without attention.
    """
    for attention in attentions_of(gpt):
        installed = type(attention.core_attention)
        if installed is not DocumentAttention:
            raise CompatibilityError(
                f"Megatron built {installed.__name__} where DocumentAttention was specified; this "
                "Megatron is not one that megatron-wlb knows"
            )


def require_layers(config: Config, model: Model) -> None:
    """Raises :class:`CompatibilityError` where Megatron built chunks of other layers than plans,
    memory and costs are made for.
    """
    p = config.parallel
    stages = p.split.layers(config.model.num_layers, p.pipeline_model_parallel_size, p.vpp_size)
    planned = list(stages[model.groups.pp.rank() :: model.groups.pp.size()])
    built = [len(gpt.decoder.layers) for gpt in model.gpts]
    ends = [gpt.post_process * (config.model.mtp_num_layers or 0) for gpt in model.gpts]
    further = [len(depths_of(gpt)) for gpt in model.gpts]
    if further != ends:
        raise CompatibilityError(
            f"Megatron built model chunks of {further} layers that predict further ahead on "
            f"pipeline rank {model.groups.pp.rank()}, but plans are for {ends}; this Megatron "
            "places or shares them otherwise than one that megatron-wlb knows"
        )
    if built != planned:
        raise CompatibilityError(
            f"Megatron built model chunks of {built} layers on pipeline rank "
            f"{model.groups.pp.rank()}, but plans are for {planned}; this Megatron divides layers "
            "otherwise than one that megatron-wlb knows"
        )


def attention_options(
    config: Config,
    core: TransformerConfig,
    choose: Callable[[str, Demand], ChosenKernel] = choose_kernel,
) -> AttentionOptions:
    """Chooses the kernel for the device at hand, and how it overlaps with communication.

    ``choose`` calls :func:`choose_kernel`, in which all ranks agree, or knows what it gave. Raises
    :class:`CompatibilityError` for a kernel that cannot run or a setting that attention cannot
    honour, :class:`ConfigError` for head groups that do not divide the key/value heads.
    """
    check_config(core)
    # What TransformerEngine may choose from is said in the environment: as it will be in training.
    LanguageModule._set_attention_backend(SimpleNamespace(config=core))
    tp = core.tensor_model_parallel_size
    device = torch.empty(0, device="cuda").device  # the CPU, under emulation
    num_groups = core.num_query_groups // tp
    latent = core.multi_latent_attention
    demand = Demand(
        device,
        core.params_dtype,
        core.num_attention_heads // tp,
        num_groups,
        core.qk_head_dim + core.qk_pos_emb_head_dim if latent else core.kv_channels,
        core.deterministic_mode,
        core.attention_dropout,
        model_reach(core),
        core.v_head_dim if latent else None,
    )
    num_head_groups = 1 if latent else config.wlb.wlb_cp_overlap_groups
    if num_head_groups is None:
        num_head_groups = default_head_groups(num_groups) if device.type == "cuda" else 1
    if num_groups % num_head_groups:
        raise ConfigError(
            f"--wlb-cp-overlap-groups is {num_head_groups}, which does not divide the {num_groups} "
            "key/value heads of a TP rank; use a divisor"
        )
    name, kernel, dropping = choose(config.wlb.wlb_attention_kernel, demand)
    wlb = config.wlb
    return AttentionOptions(
        kernel,
        name,
        dropping,
        config.training.seed,
        num_head_groups=num_head_groups,
        keep_gathered=wlb.wlb_cp_keep_gathered,
        reduce_in_fp32=wlb.wlb_cp_reduce_in_fp32,
        head_start_bytes=None if latent else least_bytes(kernel, demand),
    )


def has_head_start(model: Model) -> bool:
    """Whether any layer may begin with near keys."""
    return any(layer.options.head_start_bytes is not None for layer in _document_layers(model))


def _document_layers(model: Model) -> list[DocumentAttention]:
    modules = (module for chunk in model.chunks for module in chunk.modules())
    return [module for module in modules if isinstance(module, DocumentAttention)]


def settle_kernel(config: Config, model: Model, saved: str | None) -> str:
    """Names the kernel that all layers run from now on; called by every rank.

    ``saved`` is what the loaded checkpoint says, None without one. A resumed run takes its kernel,
    since another one gives other bits: times at start may order kernels otherwise than before. A
    kernel that was asked for stays. So does the present one, with a warning, where the
    checkpoint's cannot run. A model without attention has none: "".
    """
    layers = _document_layers(model)
    # A pipeline stage may have none.
    names = of_all_ranks(layers[0].options.kernel_name if layers else None)
    present: str = next(filter(None, names), "")
    if saved in (None, present) or not present or config.wlb.wlb_attention_kernel != "auto":
        return present
    try:
        options = attention_options(config, model.config, lambda _, d: choose_kernel(saved, d))
    except CompatibilityError as error:
        tell_other_kernel(saved, error)
        return present
    use_kernel(model, options)
    logger.info("attention kernel: %s in place of %s, as in the checkpoint", saved, present)
    return saved


def use_kernel(model: Model, options: AttentionOptions) -> None:
    """Lets all layers attend so; a layer keeps what it gathers by its own recomputation."""
    for layer in _document_layers(model):
        layer.options = replace(options, keep_gathered=layer.options.keep_gathered)


def tell_other_kernel(saved: str | None, error: CompatibilityError) -> None:
    logger.warning(
        "the checkpoint's steps ran attention kernel %s, which is not available here (%s); "
        "rounding will differ from now on",
        saved,
        error,
    )


def build_model(
    config: Config,
    vocab_size: int,
    choose: Callable[[str, Demand], ChosenKernel] = choose_kernel,
    *,
    wrapped: bool = True,
) -> Model:
    """Builds this rank's chunks; Megatron's process groups must exist.

    ``vocab_size`` is the tokenizer's, padded here; ``choose`` is as in :func:`attention_options`.
    Chunks that are not ``wrapped`` for data parallelism leave gradients to the caller. Raises
    :class:`CompatibilityError` where Megatron built another core attention than ours.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    core = transformer_config(config)
    options = attention_options(config, core, choose)
    pp_rank, pp_size = groups.pp.rank(), groups.pp.size()
    vpp = core.virtual_pipeline_model_parallel_size or 1
    make = _gpt if config.parallel.hybrid_layer_pattern is None else _hybrid
    gpts = []
    for chunk in range(vpp):
        gpt = make(
            config,
            options,
            chunk * pp_size + pp_rank,
            config=core,
            vocab_size=padded_vocab_size(config, vocab_size),
            max_sequence_length=config.model.max_position_embeddings or config.data.seq_length,
            pre_process=pp_rank == 0 and chunk == 0,
            post_process=pp_rank == pp_size - 1 and chunk == vpp - 1,
            share_embeddings_and_output_weights=(
                not config.model.untie_embeddings_and_output_weights
            ),
            position_embedding_type=config.model.position_embedding_type,
            rotary_percent=config.model.rotary_percent,
            rotary_base=config.model.rotary_base,
            seq_len_interpolation_factor=config.model.rotary_seq_len_interpolation_factor,
            pg_collection=groups,
            vp_stage=chunk if vpp > 1 else None,
        )
        use_document_positions(gpt)
        complete_layers(gpt)
        route_by_document(gpt)
        require_document_attention(gpt)
        gpts.append(gpt.to("cuda"))
    chunks: list[torch.nn.Module] = list(gpts)
    if config.training.bf16:
        chunks = [Float16Module(core, chunk) for chunk in chunks]
    model = Model(core, groups, _wrap(config, core, chunks) if wrapped else chunks, gpts)
    require_layers(config, model)
    return model


def _gpt(settings: Config, options: AttentionOptions, stage: int, **given: Any) -> GPTModel:
    """The chunk of a virtual stage; ``given`` is what Megatron's models have in common."""
    core, model = given["config"], settings.model
    p = settings.parallel
    stages = p.split.layers(model.num_layers, p.pipeline_model_parallel_size, p.vpp_size)
    experts = expert_layers(model)
    first = sum(stages[:stage])
    own = experts[first : first + stages[stage]]
    build = partial(layer_submodules, core, transformer_impl(settings), options)
    layers = {kind: build(has_experts=kind) for kind in {*own, experts[-1]}}
    last, final_norm = layers[experts[-1]]
    mtp = None
    if core.mtp_num_layers:
        mtp = prediction_submodules(core, last, final_norm, given["vp_stage"])
    return GPTModel(
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layers[kind][0] for kind in own],
            layer_norm=final_norm,
        ),
        mtp_block_spec=mtp,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        **given,
    )


def _hybrid(settings: Config, options: AttentionOptions, _stage: int, **given: Any) -> HybridModel:
    """The same of a HybridModel, which finds its stage by itself.

    Raises :class:`CompatibilityError` where its layers would not be those asked for.
    """
    if transformer_impl(settings) == "local" and not emulation.installed():
        raise CompatibilityError(
            "a HybridModel has TransformerEngine's layers on a GPU; install "
            "transformer-engine[pytorch], and leave out --transformer-impl local"
        )
    # Its import makes TransformerEngine's modules, or those of the emulation.
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    return HybridModel(
        hybrid_stack_spec=packed(hybrid_stack_spec, options),
        hybrid_layer_pattern=settings.parallel.hybrid_layer_pattern,
        **given,
    )


def _wrap(
    config: Config, core: TransformerConfig, chunks: list[torch.nn.Module]
) -> list[torch.nn.Module]:
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
    )
    wrapped = [
        DistributedDataParallel(core, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        # All replicas start from the weights of the first one.
        chunk.broadcast_params()
    core.finalize_model_grads_func = finalize_model_grads
    if config.parallel.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        start = [chunk.start_grad_sync for chunk in wrapped]
        core.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
        core.grad_sync_func = start if len(wrapped) > 1 else start[0]
    return wrapped
