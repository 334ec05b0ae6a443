"""What a step must compute, by the simplest means: one process, each document run alone.

Nothing of :mod:`megatron_wlb.runtime` is used. The model is Megatron's own, of its stock parts, but
without packing, pipelining or sharding; loss, clipping, AdamW and the learning rate are torch's.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from helpers.oracle_experts import OracleRouters, expert_settings, layer_specs
from helpers.workload import Workload
from megatron_wlb.plan import StepPlan
from megatron_wlb.settings.config import Config

Array = npt.NDArray[np.floating[Any]]
State = dict[str, Array]
"""Arrays by the parameter names of the whole model."""


@dataclass(frozen=True)
class OracleStep:
    """One optimizer step."""

    loss: float
    """Σ token losses ÷ Σ labelled tokens, in nats."""
    gradients: State
    """Gradients of that loss, of what predicts further ahead and of experts' auxiliary losses; not
    clipped."""
    ahead: tuple[float, ...] = ()
    """The mean loss of each layer that predicts further ahead."""
    auxiliary: dict[str, list[float]] = field(default_factory=dict)
    """The auxiliary losses of each layer, without their coefficients, by Megatron's names."""


@dataclass(frozen=True)
class OracleRun:
    """A run from given weights."""

    initial: State
    steps: tuple[OracleStep, ...]
    final: State
    biases: State = field(default_factory=dict)
    """Of the routers of layers of experts, after the last step."""


def run_oracle(
    config: Config,
    workload: Workload,
    plans: Sequence[StepPlan] | None = None,
    dtype: str = "float32",
) -> OracleRun:
    """Trains one step for each of the workload's; runs in a world of one process.

    ``plans`` say for experts which documents share a micro-batch, and in which order these run.
    ``dtype`` is that of all numbers; the first weights are the same in each.
    """
    import torch

    model = _stock_model(config, workload.vocab_size)
    routers = OracleRouters(model, config) if config.model.num_experts else None
    _slide(model, config)
    parameters = dict(model.named_parameters())
    initial = _randomise(parameters, config.training.seed)
    model.to(getattr(torch, dtype))
    t = config.training
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters.values() if p.ndim > 1]},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,  # as Megatron: no decay of biases and norms
        lr=t.lr,
        betas=(t.adam_beta1, t.adam_beta2),
        eps=t.adam_eps,
        weight_decay=t.weight_decay,
    )
    steps = []
    for number in range(len(workload.steps)):
        optimizer.zero_grad()
        whole, *means = _losses(model, workload, number, config.model.mtp_loss_scaling_factor)
        auxiliary: dict[str, list[float]] = {}
        if routers is not None:
            assert plans is not None
            more, auxiliary = routers.losses(workload, number, plans[number])
            whole = whole + more
        whole.backward()
        if routers is not None:
            routers.move_biases()
        gradients = {name: p.grad.numpy().copy() for name, p in parameters.items()}
        steps.append(OracleStep(means[0], gradients, tuple(means[1:]), auxiliary))
        if t.clip_grad:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), t.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, number)
        optimizer.step()
    return OracleRun(initial, tuple(steps), _state(parameters), routers.biases if routers else {})


def initial_weights(config: Config, vocab_size: int) -> State:
    """The weights that :func:`run_oracle` starts from; runs in a world of one process."""
    model = _stock_model(config, vocab_size)
    return _randomise(dict(model.named_parameters()), config.training.seed)


def learning_rate(config: Config, step: int) -> float:
    """Megatron's schedules without warm-up, in steps."""
    t = config.training
    share = min(step / (t.lr_decay_iters or t.train_iters), 1.0)
    remaining = {
        "constant": 1.0,
        "linear": 1.0 - share,
        "cosine": (1.0 + math.cos(math.pi * share)) / 2.0,
    }[t.lr_decay_style]
    assert t.lr_warmup_iters == 0
    return t.min_lr + (t.lr - t.min_lr) * remaining


def _losses(model: Any, workload: Workload, step: int, factor: float) -> list[Any]:
    """The step's loss, as a tensor; then the mean loss of the model itself, and of each layer that
    predicts further ahead.
    """
    import torch

    examples = workload.examples(step)
    depths = 1 + (model.config.mtp_num_layers or 0)
    shares = [1.0, *(factor / (depths - 1) for _ in range(depths - 1))]
    counted = workload.counted(step)
    divisors = [sum(float(own[depth:].sum()) for own in counted) for depth in range(depths)]
    whole, means = torch.zeros(()), [0.0] * depths
    documents = workload.steps[step]
    for document, (tokens, labels), own in zip(documents, examples, counted, strict=True):
        length = len(tokens)
        # True is masked.
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        for depth, logits in enumerate(_logits(model, torch.from_numpy(tokens)[None], mask)):
            losses = torch.nn.functional.cross_entropy(
                logits[0, : max(length - depth, 0)],
                torch.from_numpy(labels[depth:]),
                ignore_index=-1,
                reduction="none",
            )
            if workload.loss is not None and not depth:
                places = torch.arange(1, length + 1) + document.offset
                numbers = torch.full((length,), document.number)
                losses = workload.loss(-losses, numbers, places)
            mean = losses @ torch.from_numpy(own[depth:]).to(losses) / divisors[depth]
            whole = whole + shares[depth] * mean
            means[depth] += mean.item()
    return [whole, *means]


def _logits(model: Any, tokens: Any, mask: Any) -> Iterator[Any]:
    """Logits of one document, of the model itself and of each layer that predicts further ahead.

    Megatron shifts tokens inside such a layer; its losses are not used.
    """
    import torch

    seen: dict[str, Any] = {}

    def before(_module: Any, _given: Any, named: dict[str, Any]) -> None:
        seen["rotary"] = named.get("rotary_pos_emb")

    def after(_module: Any, _given: Any, hidden: Any) -> None:
        seen["hidden"] = hidden

    hooks = [
        model.decoder.register_forward_pre_hook(before, with_kwargs=True),
        model.decoder.register_forward_hook(after),
    ]
    positions = torch.arange(tokens.shape[1])[None]
    alone = mock.patch.object(model, "mtp_process", False)
    with alone, mock.patch.object(model.config, "mtp_num_layers", None):
        yield model(input_ids=tokens, position_ids=positions, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    hidden = seen["hidden"]
    tied = model.share_embeddings_and_output_weights
    for layer in model.mtp.layers if model.mtp_process else ():
        hidden, tokens, positions = layer(
            input_ids=tokens,
            position_ids=positions,
            hidden_states=hidden,
            attention_mask=mask,
            rotary_pos_emb=seen["rotary"],
            embedding=model.embedding,
        )[:3]
        weight = model.embedding.word_embeddings.weight if tied else None
        yield model.output_layer(hidden, weight=weight)[0].transpose(0, 1)


def _slide(model: Any, config: Config) -> None:
    """Gives layers with a sliding window a mask of it: which ones, is Megatron's own rule."""
    import torch
    from megatron.core.transformer.utils import is_layer_window_attention

    size, skipped = config.model.window_size, config.model.window_attn_skip_freq
    every = None if skipped is None else ast.literal_eval(skipped)

    def in_reach(_layer: Any, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        causal = named["attention_mask"]
        far = torch.ones_like(causal).tril(-size[0] - 1)  # more than W keys before the query
        return given, {**named, "attention_mask": causal | far}

    further = model.mtp.layers if model.mtp_process else ()
    layers = [*model.decoder.layers, *(layer.mtp_model_layer for layer in further)]
    for number, layer in enumerate(layers, start=1):
        if is_layer_window_attention(size, every, number):
            layer.register_forward_pre_hook(in_reach, with_kwargs=True)


def _stock_model(config: Config, vocab_size: int) -> Any:
    """Megatron's GPT or HybridModel of its stock local layers, undivided."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.hybrid import hybrid_layer_specs
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    m, pattern = config.model, config.parallel.hybrid_layer_pattern
    latent: dict[str, Any] = {}
    if m.multi_latent_attention:
        latent = {name: getattr(m, name) for name in LATENT.split()}
        latent |= {"rope_type": m.rope_type or "yarn", "rotary_base": m.rotary_base}
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
            latent[name] = getattr(m, f"wlb_yarn_{name}")
    core = (MLATransformerConfig if latent else TransformerConfig)(
        **latent,
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.num_query_groups if m.group_query_attention else None,
        kv_channels=m.kv_channels,
        normalization=m.normalization,
        layernorm_epsilon=m.norm_epsilon,
        qk_layernorm=m.qk_layernorm,
        attention_output_gate=m.attention_output_gate,
        gated_linear_unit=m.swiglu,
        activation_func=torch.nn.functional.silu if m.swiglu else torch.nn.functional.gelu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        add_bias_linear=not m.disable_bias_linear,
        add_qkv_bias=m.add_qkv_bias,
        rotary_interleaved=m.rotary_interleaved,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        cuda_graph_modules=[],
        mtp_num_layers=m.mtp_num_layers,
        is_hybrid_model=pattern is not None,
        **{
            name: value for name, value in vars(m).items() if name.startswith(("linear_", "mamba_"))
        },
        **expert_settings(m),
    )
    for name, value in dataclasses.asdict(m).items():
        if name.startswith("wlb_yarn_") and m.position_embedding_type == "yarn":
            setattr(core, name.removeprefix("wlb_"), value)
            core.yarn_correction_range_round_to_int = True
    multiple = m.make_vocab_size_divisible_by
    common: dict[str, Any] = dict(
        config=core,
        vocab_size=math.ceil(vocab_size / multiple) * multiple,
        max_sequence_length=m.max_position_embeddings or config.data.seq_length,
        share_embeddings_and_output_weights=not m.untie_embeddings_and_output_weights,
        position_embedding_type=m.position_embedding_type,
        rotary_percent=m.rotary_percent,
        rotary_base=m.rotary_base,
        seq_len_interpolation_factor=m.rotary_seq_len_interpolation_factor,
    )
    if pattern is not None:
        stack = hybrid_layer_specs.hybrid_stack_spec
        undivided = pattern.replace("|", "")
        return HybridModel(hybrid_stack_spec=stack, hybrid_layer_pattern=undivided, **common)
    spec = layer_specs(core)
    for layer in getattr(spec, "layer_specs", [spec]) if latent else ():
        layer.submodules.self_attention.submodules.core_attention = _plain_attention()
    further = None
    if m.mtp_num_layers:
        further = get_gpt_mtp_block_spec(core, spec, use_transformer_engine=False)
    # Without TransformerEngine Megatron asks whether layers are of a class of it that is a mock.
    with mock.patch.object(multi_latent_attention, "HAVE_TE", False):
        return GPTModel(
            transformer_layer_spec=spec,
            mtp_block_spec=further,
            rope_scaling=m.use_rope_scaling,
            rope_scaling_factor=m.rope_scaling_factor,
            **common,
        )


LATENT = (
    "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_scaling_factor "
    "mscale mscale_all_dim"
)


def _plain_attention() -> Any:
    """Attention written out, as Megatron's own takes no values that are narrower than keys."""
    import torch

    class PlainAttention(torch.nn.Module):
        def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
            super().__init__()
            self.scale = softmax_scale

        def forward(self, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
            query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # b, h, s, d
            scores = (query @ key.mT * self.scale).masked_fill(mask, -math.inf)
            return (scores.softmax(-1) @ value).permute(2, 0, 1, 3).flatten(2)

    return PlainAttention


def _randomise(parameters: dict[str, Any], seed: int) -> State:
    """Sets and returns weights at which everything matters, unlike initial ones.

    Attention scores are of order 1 (with Megatron's 0.02 they are nearly uniform, and a wrong
    position hardly shows), no bias is 0 and no norm's weight 1.
    """
    import torch

    random = np.random.RandomState(seed)
    for name, parameter in sorted(parameters.items()):
        values = random.standard_normal(tuple(parameter.shape))
        if parameter.ndim > 1:
            values *= 0.3 if "embedding" in name else parameter[0].numel() ** -0.5
        elif name.endswith(("norm.weight", "mixer.D")):
            values = 1.0 + 0.2 * values
        else:
            values *= 0.1
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values))
    return _state(parameters)


def _state(parameters: dict[str, Any]) -> State:
    return {name: p.detach().numpy().copy() for name, p in parameters.items()}
