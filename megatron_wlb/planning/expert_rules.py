"""Which layers have experts, and whether experts can be divided over ranks as flags say."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_wlb.cost.model_file import layers_with_experts
from megatron_wlb.cost.parts import Experts
from megatron_wlb.cost.shape import ModelShape
from megatron_wlb.errors import ConfigError
from megatron_wlb.settings.config import Config, flag_of
from megatron_wlb.settings.megatron import ModelConfig


def expert_layers(model: ModelConfig) -> list[bool]:
    """Whether each layer has experts. Raises :class:`ConfigError` for no pattern of the layers."""
    num_layers = model.num_layers
    if model.num_experts is None:
        return [False] * num_layers
    return layers_with_experts(flag_of("moe_layer_freq"), model.moe_layer_freq, num_layers)


def with_experts(shape: ModelShape, model: ModelConfig) -> ModelShape:
    """``shape``, of ``model``, with experts in place of the dense MLP where layers have them.

    Raises :class:`ConfigError` as :func:`expert_layers`, and for sizes that cannot be.
    """
    if model.num_experts is None:
        return shape
    experts = Experts(
        model.num_experts,
        model.moe_router_topk,
        model.moe_ffn_hidden_size or shape.ffn_hidden_size,
        shape.gated,
        model.moe_shared_expert_intermediate_size or 0,
    )
    return shape.with_experts(experts, expert_layers(model))


def refusals(config: Config, world_size: int) -> Iterator[str]:
    """Lists what of experts cannot run, each as the line that a user reads."""
    m, p = config.model, config.parallel
    ep, num = p.expert_model_parallel_size, m.num_experts
    if num is None:
        yield from _without_experts(config)
        return
    try:
        expert_layers(m)
    except ConfigError as error:
        yield str(error)
    if num % ep:
        yield (
            f"--num-experts is {num}, which --expert-model-parallel-size {ep} does not divide; use "
            f"a multiple of {ep}"
        )
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    etp = p.expert_tensor_parallel_size or tp
    if world_size % (ep * etp * pp):
        yield (
            f"{world_size} processes were started, but --expert-model-parallel-size {ep} × "
            f"--expert-tensor-parallel-size {etp} × PP {pp} = {ep * etp * pp} does not divide "
            f"that; start a multiple of {ep * etp * pp}, or lower one of them"
        )
    for name, value, shards in (
        ("moe_ffn_hidden_size", m.moe_ffn_hidden_size, etp),
        ("moe_shared_expert_intermediate_size", m.moe_shared_expert_intermediate_size, tp),
    ):
        if value is not None and value % shards:
            yield (
                f"{flag_of(name)} is {value}, which the {shards} ranks of its tensor parallelism "
                f"do not divide; use a multiple of {shards}"
            )
    if max(etp, tp) > 1 and not m.disable_bias_linear:
        # Whole ones under TP would be added up over its ranks once more.
        yield (
            f"--expert-tensor-parallel-size is {etp} and TP {tp}, but experts with a bias train "
            "right only where both are 1; add --disable-bias-linear, or use 1 for both"
        )
    elif not m.disable_bias_linear and m.transformer_impl != "transformer_engine":
        yield (
            "--num-experts with biases of experts cannot be trained in --transformer-impl local: "
            "Megatron adds them in place, which autograd refuses; add --disable-bias-linear"
        )
    if tp > 1 and not p.sequence_parallel:
        yield "--num-experts with TP above 1 needs --sequence-parallel in Megatron; add it"
    yield from _router(m, num)


def _router(m: ModelConfig, num_experts: int) -> Iterator[str]:
    if m.moe_router_topk > num_experts:
        yield (
            f"--moe-router-topk is {m.moe_router_topk}, but there are {num_experts} experts; use "
            "at most that"
        )
    kinds, weights = m.moe_router_load_balancing_type, m.moe_aux_loss_coeff
    if len(kinds) != len(weights):
        yield (
            f"--moe-aux-loss-coeff has {len(weights)} numbers for the {len(kinds)} kinds of "
            "--moe-router-load-balancing-type; give one each"
        )
    softmax = m.moe_router_score_function == "softmax"
    constant = softmax and not m.moe_router_pre_softmax and "sinkhorn" not in kinds
    if m.moe_router_topk == 1 and constant:
        yield "--moe-router-topk 1 leaves softmax no gradient; add --moe-router-pre-softmax"
    if m.moe_router_enable_expert_bias and softmax:
        yield (
            "--moe-router-enable-expert-bias works with sigmoid scores only; add "
            "--moe-router-score-function sigmoid"
        )
    groups, chosen = m.moe_router_num_groups, m.moe_router_group_topk
    if chosen and not groups:
        yield (
            f"--moe-router-group-topk is {chosen}, but there are no groups; give "
            "--moe-router-num-groups too"
        )
    if groups and num_experts % groups:
        yield (
            f"--num-experts is {num_experts}, which --moe-router-num-groups {groups} does not "
            f"divide; use a multiple of {groups}"
        )
    if groups and chosen and chosen > groups:
        yield (
            f"--moe-router-group-topk is {chosen}, above --moe-router-num-groups {groups}; use at "
            "most that"
        )
    elif groups and chosen and m.moe_router_topk > (most := chosen * (num_experts // groups)):
        yield (
            f"--moe-router-topk is {m.moe_router_topk}, but the {chosen} groups of "
            f"--moe-router-group-topk have {most} experts; use at most that"
        )


def _without_experts(config: Config) -> Iterator[str]:
    """What says sizes of experts that are not there."""
    for name, value, default in (
        ("moe_ffn_hidden_size", config.model.moe_ffn_hidden_size, None),
        ("expert_model_parallel_size", config.parallel.expert_model_parallel_size, 1),
    ):
        if value != default:
            yield f"{flag_of(name)} is {value}, but there are no experts; give --num-experts"
