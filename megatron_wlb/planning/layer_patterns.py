"""Which layers have a sliding window, how far it reaches, and which layers have experts.

``--window-size W,0`` is flash-attention's ``(left, right)``: a query sees the W keys of its
document before its own, and its own. ``--window-attn-skip-freq`` says which layers have it.
"""

from __future__ import annotations

import dataclasses
import itertools

from megatron_wlb.cost.layers import Layer, Part
from megatron_wlb.cost.parts import Experts, GatedDelta, Mamba
from megatron_wlb.cost.shape import ModelShape
from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import MOST_TOKENS, read_pattern, shown
from megatron_wlb.settings.megatron import ModelConfig
from megatron_wlb.settings.pattern import DELTA, EXPERTS, MAMBA, MLP, HybridPattern


def reach_tokens(model: ModelConfig) -> int | None:
    """The most keys that a query sees, its own too, in layers of a sliding window.

    None where no layer has one. Raises :class:`ConfigError` as :func:`windowed_layers`.
    """
    return model.window_size[0] + 1 if any(windowed_layers(model)) else None


def windowed_layers(model: ModelConfig) -> list[bool]:
    """Whether each layer has a sliding window.

    Raises :class:`ConfigError` for flags that say nothing that can run.
    """
    size, given = model.window_size, model.window_attn_skip_freq
    if not size:
        if given is not None:
            raise ConfigError(
                "--window-attn-skip-freq counts only with --window-size; give both or neither"
            )
        return [False] * model.num_layers
    # TransformerEngine takes any right side as 0; Megatron's own attention looks ahead with it.
    if len(size) != 2 or size[1] != 0 or not 0 <= size[0] <= MOST_TOKENS:
        raise ConfigError(
            f"--window-size is {','.join(map(str, size))}; give W,0, where W is the number of "
            f"keys before a query's own, from 0 to {MOST_TOKENS}; attention is causal, so no key "
            "comes behind it"
        )
    return [True] * model.num_layers if given is None else _pattern(given, model.num_layers)


def with_windows(shape: ModelShape, model: ModelConfig) -> ModelShape:
    """``shape``, of ``model``, with its sliding windows.

    Raises :class:`ConfigError` as :func:`windowed_layers`.
    """
    windowed = windowed_layers(model)
    slides = dataclasses.replace(shape, reach_tokens=reach_tokens(model))
    if len(set(windowed)) == 1:
        return slides
    kinds = {True: slides.layer, False: shape.layer}
    runs = [(len(list(own)), kinds[kind]) for kind, own in itertools.groupby(windowed)]
    return dataclasses.replace(slides, layers=tuple(runs))


def expert_layers(model: ModelConfig) -> list[bool]:
    """Whether each layer has experts. Raises :class:`ConfigError` for no pattern of the layers."""
    num_layers, said = model.num_layers, model.moe_layer_freq
    if model.num_experts is None:
        return [False] * num_layers
    pattern = read_pattern(said)
    if isinstance(pattern, int) and pattern >= 1:  # every Nth layer, from the first on
        return [layer % pattern == 0 for layer in range(num_layers)]
    if isinstance(pattern, list) and len(pattern) == num_layers and set(pattern) <= {0, 1}:
        return [bool(one) for one in pattern]
    raise ConfigError(
        f"--moe-layer-freq is {shown(said)}; give N of at least 1, or a list of 1 (experts) and 0 "
        f"(dense) for each of the {num_layers} layers, as in [0]+[1]*3"
    )


def with_experts(shape: ModelShape, model: ModelConfig) -> ModelShape:
    """``shape``, of ``model``, with experts in place of the dense MLP where layers have them.

    Raises :class:`ConfigError` as :func:`expert_layers`, and for sizes that cannot be.
    """
    if model.num_experts is None:
        return shape
    return shape.with_experts(_experts(shape, model, model.num_experts), expert_layers(model))


def mamba_heads(model: ModelConfig) -> int:
    return model.mamba_num_heads or 2 * model.hidden_size // model.mamba_head_dim


def with_pattern(shape: ModelShape, model: ModelConfig, pattern: HybridPattern) -> ModelShape:
    """``shape``, of ``model``, with the layers of a HybridModel: each of one part. All parts of a
    depth that predicts further ahead are one layer.

    Raises :class:`ConfigError` as :func:`windowed_layers`.
    """
    slides = dataclasses.replace(shape, reach_tokens=reach_tokens(model))

    def part(sign: str, windowed: bool) -> Part:
        attention, dense = (slides if windowed else shape).layer.parts
        if sign == EXPERTS:
            assert model.num_experts is not None, "a rule refuses layers of no experts"
            return _experts(shape, model, model.num_experts)
        if sign == DELTA:
            return GatedDelta(*(getattr(model, f.name) for f in dataclasses.fields(GatedDelta)))
        if sign == MAMBA:
            sizes = model.mamba_head_dim, model.mamba_state_dim, model.mamba_num_groups
            return Mamba(mamba_heads(model), *sizes)
        return dense if sign == MLP else attention

    every = zip(pattern.layers, windowed_layers(model), strict=True)
    runs = tuple((len(list(own)), Layer((part(*kind),))) for kind, own in itertools.groupby(every))
    ahead = Layer(tuple(part(sign, bool(model.window_size)) for sign in pattern.ahead or MLP))
    predictors = ((pattern.depths, ahead),) if pattern.depths else ()
    return dataclasses.replace(slides, layers=runs, predictors=predictors)


def _experts(shape: ModelShape, model: ModelConfig, num_experts: int) -> Experts:
    return Experts(
        num_experts,
        model.moe_router_topk,
        model.moe_ffn_hidden_size or shape.ffn_hidden_size,
        shape.gated,
        model.moe_shared_expert_intermediate_size or 0,
        model.moe_latent_size,
    )


def _pattern(text: str, num_layers: int) -> list[bool]:
    """What ``--window-attn-skip-freq`` says of each layer: N, or a list of 0 and 1 that Python
    would make of sums and multiples of lists.
    """
    said = read_pattern(text)
    if isinstance(said, int) and said >= 1:  # every Nth layer sees all
        return [layer % said != 0 for layer in range(1, num_layers + 1)]
    if isinstance(said, list) and len(said) == num_layers and set(said) <= {0, 1}:
        return [bool(one) for one in said]
    raise ConfigError(
        f"--window-attn-skip-freq is {shown(text)}; give N of at least 1, or a list of 1 (window) "
        f"and 0 (none) for each of the {num_layers} layers, as in ([1]*3+[0])*2"
    )
