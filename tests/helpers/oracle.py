"""What a step must compute, by the simplest means: one process, each document run alone.

Nothing of :mod:`megatron_wlb.runtime` is used. The model is Megatron's own, of its stock parts, but
without packing, pipelining or sharding; loss, clipping, AdamW and the learning rate are torch's.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.oracle_experts import OracleRouters, expert_settings, layer_specs
from helpers.workload import Tokens, Workload
from megatron_wlb.plan import StepPlan
from megatron_wlb.settings.config import Config

Array = npt.NDArray[np.float32]
State = dict[str, Array]
"""Arrays by the parameter names of the whole model."""


@dataclass(frozen=True)
class OracleStep:
    """One optimizer step."""

    loss: float
    """Σ token losses ÷ Σ labelled tokens, in nats."""
    gradients: State
    """Gradients of that loss, and of experts' auxiliary ones; not clipped."""
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
    config: Config, workload: Workload, plans: Sequence[StepPlan] | None = None
) -> OracleRun:
    """Trains one step for each of the workload's; runs in a world of one process.

    ``plans`` say for experts which documents share a micro-batch, and in which order these run.
    """
    import torch

    model = _stock_model(config, workload.vocab_size)
    routers = OracleRouters(model, config) if config.model.num_experts else None
    _slide(model, config)
    parameters = dict(model.named_parameters())
    initial = _randomise(parameters, config.training.seed)
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
        if routers is not None:
            assert plans is not None
            loss, auxiliary = routers.backward(workload, number, plans[number])
        else:
            loss, auxiliary = _backward(model, workload, number), {}
        gradients = {name: p.grad.numpy().copy() for name, p in parameters.items()}
        steps.append(OracleStep(loss, gradients, auxiliary))
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


def _backward(model: Any, workload: Workload, step: int) -> float:
    """Leaves the gradients of the step's loss in the model; returns the loss."""
    examples = workload.examples(step)
    num_labels = sum(int((labels >= 0).sum()) for _, labels in examples)
    total = 0.0
    for tokens, labels in examples:
        losses = sum_of_losses(model, tokens, labels)
        (losses / num_labels).backward()
        total += losses.item()
    return total / num_labels


def sum_of_losses(model: Any, tokens: Tokens, labels: Tokens) -> Any:
    """Σ token losses of a document that runs alone."""
    import torch

    length = len(tokens)
    # True is masked.
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    logits = model(
        input_ids=torch.from_numpy(tokens)[None],
        position_ids=torch.arange(length)[None],
        attention_mask=mask,
    )
    return torch.nn.functional.cross_entropy(
        logits[0], torch.from_numpy(labels), ignore_index=-1, reduction="sum"
    )


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

    for number, layer in enumerate(model.decoder.layers, start=1):
        if is_layer_window_attention(size, every, number):
            layer.register_forward_pre_hook(in_reach, with_kwargs=True)


def _stock_model(config: Config, vocab_size: int) -> Any:
    """Megatron's GPT from its stock local layer, undivided."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    m = config.model
    core = TransformerConfig(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.num_query_groups if m.group_query_attention else None,
        kv_channels=m.kv_channels,
        normalization=m.normalization,
        layernorm_epsilon=m.norm_epsilon,
        qk_layernorm=m.qk_layernorm,
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
        cuda_graph_scope=[],
        **expert_settings(m),
    )
    for name, value in dataclasses.asdict(m).items():
        if name.startswith("wlb_yarn_") and m.position_embedding_type == "yarn":
            setattr(core, name.removeprefix("wlb_"), value)
            core.yarn_correction_range_round_to_int = True
    multiple = m.make_vocab_size_divisible_by
    return GPTModel(
        config=core,
        transformer_layer_spec=layer_specs(core),
        vocab_size=math.ceil(vocab_size / multiple) * multiple,
        max_sequence_length=m.max_position_embeddings or config.data.seq_length,
        share_embeddings_and_output_weights=not m.untie_embeddings_and_output_weights,
        position_embedding_type=m.position_embedding_type,
        rotary_percent=m.rotary_percent,
        rotary_base=m.rotary_base,
        rope_scaling=m.use_rope_scaling,
        rope_scaling_factor=m.rope_scaling_factor,
        seq_len_interpolation_factor=m.rotary_seq_len_interpolation_factor,
    )


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
            values *= 0.3 if "embedding" in name else parameter.shape[1] ** -0.5
        elif name.endswith("norm.weight"):
            values = 1.0 + 0.2 * values
        else:
            values *= 0.1
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values))
    return _state(parameters)


def _state(parameters: dict[str, Any]) -> State:
    return {name: p.detach().numpy().copy() for name, p in parameters.items()}
