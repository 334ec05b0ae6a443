"""What cost and memory depend on: the model's sizes, how it is divided, what is recomputed.

Names are Megatron's. Plain values; the runtime makes them from its settings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from megatron_wlb.cost.document import unseen
from megatron_wlb.cost.layers import Layer, Part, Runs, check_sizes, slices
from megatron_wlb.cost.parts import Attention, Experts, FeedForward, Latent, LatentAttention
from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import MOST_DEVICES, MOST_LAYERS, whole_number
from megatron_wlb.settings import split


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A GPT: the embedding, a list of layers, the LM head.

    Its layers are ``num_layers`` times attention and a dense MLP of the sizes given here, unless
    ``layers`` lists others. FLOPs depend on the first eight and on ``layers``, memory on all.

    Raises :class:`ConfigError` for a size below 1 or above any model's, heads that groups do not
    divide, other heads than those of ``latent``, or ``layers`` that are not ``num_layers``.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads; equal to ``num_attention_heads`` without grouped-query attention."""
    kv_channels: int
    """Dimension of one head."""
    vocab_size: int
    """Rows of the LM head, padding included."""
    gated: bool
    """Whether the MLP has a gate (SwiGLU): three matrices instead of two."""
    rms_norm: bool = False
    """RMSNorm instead of LayerNorm."""
    linear_bias: bool = True
    qkv_bias: bool = False
    """Bias of the QKV projection where ``linear_bias`` is off."""
    qk_norm: bool = False
    """Whether queries and keys are normalised."""
    output_gate: bool = False
    """Whether each number of attention's output is multiplied with one that the token gives."""
    rotary_percent: float = 1.0
    """Share of a head's dimension that is rotated; 0 is no rotary embedding."""
    learned_positions: int = 0
    """Rows of learned positions; 0 is none."""
    tied_embeddings: bool = True
    """Whether the LM head is the embedding."""
    dropout: bool = False
    """Whether there is dropout after attention and MLP."""
    reach_tokens: int | None = None
    """The most keys that a query sees, its own the last, with a sliding window; None: all of its
    document up to its own."""

    latent: Latent | None = None
    """Sizes of multi-latent attention; None without. Then ``kv_channels`` is a key's, and each head
    has a group of its own."""

    layers: Runs = ()
    """``(number, layer)`` in order, where layers are unlike. The choice of a context-parallel
    sharding goes by the sizes above all the same, but by the share of layers with a sliding
    window."""
    predictors: Runs = ()
    """The same of layers behind the last one that predict further ahead (multi-token prediction),
    each with an embedding, a projection and an LM head of its own. They are in the last stage."""

    def __post_init__(self) -> None:
        check_sizes(self)
        for num, _ in self.all_runs:
            whole_number("model shape: layers of a run", num, 1, MOST_LAYERS)
        total = sum(num for num, _ in self.runs)
        if total != self.num_layers:
            raise ConfigError(
                f"model shape: the runs of layers have {total}, but num_layers is "
                f"{self.num_layers}; give each layer once"
            )
        if self.latent and (self.kv_channels, self.num_query_groups) != (
            self.latent.key_dim,
            self.num_attention_heads,
        ):
            raise ConfigError(
                f"model shape: kv_channels {self.kv_channels} and num_query_groups "
                f"{self.num_query_groups} with latent; give {self.latent.key_dim} (qk_head_dim + "
                f"qk_pos_emb_head_dim) and {self.num_attention_heads}, one group for each head"
            )
        reaches = {part.reach_tokens for part in self.parts}
        reaches -= {None}
        if not reaches <= {self.reach_tokens}:
            raise ConfigError(
                f"model shape: layers reach {', '.join(map(str, sorted(filter(None, reaches))))} "
                f"tokens, but reach_tokens is {self.reach_tokens}; give all windowed layers that"
            )

    @property
    def layer(self) -> Layer:
        """A layer of the sizes given here."""
        attention = Attention(*(getattr(self, f.name) for f in fields(Attention)))
        if self.latent is not None:
            sizes = {f.name: getattr(self, f.name) for f in fields(LatentAttention)}
            attention = LatentAttention(**sizes)
        return Layer((attention, FeedForward(self.ffn_hidden_size, self.gated)))

    @property
    def runs(self) -> Runs:
        """All layers in order."""
        return self.layers or ((self.num_layers, self.layer),)

    @property
    def is_hybrid(self) -> bool:
        """Whether its layers are a HybridModel's, of one part each."""
        return all(len(layer.parts) == 1 for _, layer in self.runs)

    @property
    def all_runs(self) -> Runs:
        """All layers, and behind them those that predict further ahead."""
        return self.runs + self.predictors

    @property
    def parts(self) -> Iterator[Part]:
        """The parts of a layer of each run."""
        return (part for _, layer in self.all_runs for part in layer.parts)

    @property
    def num_ahead(self) -> int:
        """Layers that predict further ahead."""
        return sum(num for num, _ in self.predictors)

    def with_predictors(self, num: int) -> ModelShape:
        """The same model with so many layers like its last one that predict further ahead."""
        return replace(self, predictors=((num, self.runs[-1][1]),) if num else ())

    def with_experts(self, experts: Part, layers: Sequence[bool]) -> ModelShape:
        """The same model with experts, or another part, as the MLP where ``layers`` says so."""
        dense = (layer for num, layer in self.runs for _ in range(num))
        every = (
            replace(layer, parts=(*layer.parts[:-1], experts)) if has else layer
            for has, layer in zip(layers, dense, strict=True)
        )
        runs = tuple((len(list(own)), layer) for layer, own in itertools.groupby(every))
        return replace(self, layers=runs)

    @property
    def experts(self) -> frozenset[Experts]:
        """The kinds of experts that layers have; none in a dense model."""
        return frozenset(part for part in self.parts if isinstance(part, Experts))

    def row_multiple(self, *, spread: bool) -> int:
        """What a rank's tokens must be a multiple of; ``spread`` by sequence parallelism."""
        precisions = [layer.precisions for _, layer in self.all_runs if layer.precisions]
        return math.lcm(*(p.matrix.rows[spread] for p in precisions))

    @property
    def norm_vectors(self) -> int:
        """Parameters of a norm for each number: a factor, and of LayerNorm a shift."""
        return 1 if self.rms_norm else 2

    @property
    def head_linear_parameters(self) -> int:
        """Weights of the LM head."""
        return self.hidden_size * self.vocab_size

    @property
    def linear_parameters(self) -> int:
        """Weights that every token is multiplied with: all layers' and the LM head's, which is
        used once more for each layer that predicts further ahead.
        """
        weights = sum(num * layer.weights(self.hidden_size) for num, layer in self.all_runs)
        further = self.num_ahead * (self.joining_parameters + self.head_linear_parameters)
        return weights + self.head_linear_parameters + further

    @property
    def joining_parameters(self) -> int:
        """Weights by which a layer that predicts further ahead joins a hidden state and a token."""
        return 2 * self.hidden_size**2

    @property
    def linear_flops(self) -> int:
        """FLOPs of a token's forward: a multiplication and an addition a weight, or number of a
        document's state.
        """
        states = sum(num * layer.state_products for num, layer in self.all_runs)
        return 2 * (self.linear_parameters + states)

    def attention_flops(self, *lengths: int) -> int:
        """FLOPs of documents' forward: QKᵀ and PV over the causal half of ``length²`` pairs, less
        what a sliding window leaves out.
        """
        whole, windowed = self._query_sizes
        saved = windowed * sum(unseen(n, self.reach_tokens) for n in lengths) if windowed else 0
        return 2 * (whole * sum(n * n for n in lengths) - saved)

    @property
    def windowed_share(self) -> float:
        """The share of attention, over all layers, that has a sliding window."""
        whole, windowed = self._query_sizes
        return windowed / whole if whole else 0.0

    @property
    def _query_sizes(self) -> tuple[int, int]:
        """Numbers of a token's queries: all layers', and those of layers with a sliding window."""
        runs = self.all_runs
        return (
            sum(num * layer.query_size for num, layer in runs),
            sum(num * layer.windowed_query_size for num, layer in runs),
        )

    def training_flops(self, lengths: Iterable[int]) -> float:
        """FLOPs of documents' forward and backward; nothing that is computed twice."""
        lengths = list(lengths)
        return 3.0 * (self.linear_flops * sum(lengths) + self.attention_flops(*lengths))


@dataclass(frozen=True, slots=True)
class Stage:
    """A virtual stage: a slice of the model's layers, and which ends of the model it has."""

    layers: Runs
    first: bool
    """Whether it embeds."""
    last: bool
    """Whether it has the LM head and the loss."""

    @property
    def num_layers(self) -> int:
        return sum(num for num, _ in self.layers)


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How the model is divided over devices. Raises :class:`ConfigError` for a size below 1."""

    tp_size: int = 1
    cp_size: int = 1
    pp_size: int = 1
    vpp_size: int = 1
    """Model chunks a pipeline rank."""
    dp_size: int = 1
    sequence_parallel: bool = False
    group_size: int | None = None
    """Micro-batches that a chunk runs in a row with VPP; ``pp_size`` if not given."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each virtual stage (chunk ``c`` of rank ``r`` is ``c · PP + r``), where they are
    not all the same; some may have none."""
    ep_size: int = 1
    """Ranks of a pipeline stage over which experts are divided, also data-parallel ones."""
    etp_size: int | None = None
    """Ranks over which each expert is divided; ``tp_size`` if not given."""

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            whole_number(f"parallelism: {name}", size, 1, MOST_DEVICES)
        whole_number("parallelism: etp_size", self.expert_tp_size, 1, MOST_DEVICES)

    @property
    def sizes(self) -> dict[str, int]:
        """By name, but for those of an expert."""
        names = "tp_size", "cp_size", "pp_size", "vpp_size", "dp_size", "ep_size"
        return {name: getattr(self, name) for name in names}

    @property
    def expert_tp_size(self) -> int:
        return self.tp_size if self.etp_size is None else self.etp_size

    @property
    def expert_ranks(self) -> int:
        """Neighbouring ranks of a stage that have all experts among them."""
        return self.ep_size * self.expert_tp_size

    @property
    def expert_dp_size(self) -> int:
        """Ranks that have the same experts."""
        return max(1, self.tp_size * self.cp_size * self.dp_size // self.expert_ranks)

    @property
    def expert_replicas(self) -> int:
        """Neighbouring data-parallel replicas that exchange tokens with each other.

        Megatron numbers a stage's ranks over TP, CP and DP, and gives each ``expert_ranks`` of them
        in a row a copy of the experts. 1 where a replica has all experts.
        """
        replica = self.tp_size * self.cp_size
        return min(self.dp_size, math.lcm(replica, self.expert_ranks) // replica)

    def check_experts(self, shape: ModelShape | None = None) -> None:
        """Raises :class:`ConfigError` where ranks do not divide over the experts' groups, or a
        model that is known has none.
        """
        ranks, has_experts = self.tp_size * self.cp_size * self.dp_size, not shape or shape.experts
        if self.ep_size > 1 and not has_experts:
            raise ConfigError(f"EP is {self.ep_size}, but the model has no experts; leave it out")
        if has_experts and ranks % self.expert_ranks:
            raise ConfigError(
                f"EP {self.ep_size} × expert TP {self.expert_tp_size} does not divide the {ranks} "
                "ranks of a stage (TP × CP × DP); choose a divisor"
            )

    def check_latents(self, shape: ModelShape) -> None:
        """Raises :class:`ConfigError` for layers of latents that context parallelism cannot run."""
        if self.cp_size == 1:
            return
        made = (layer for _, layer in shape.all_runs if any(p.up_weights for p in layer.parts))
        for layer in made:
            for has, what in (
                (layer.windowed_query_size, "sliding windows"),
                (layer.precisions, "FP8"),
            ):
                if has:
                    raise ConfigError(
                        f"CP is {self.cp_size}, but multi-latent attention with {what} runs "
                        "without context parallelism only; use CP 1"
                    )

    @property
    def sequence_shards(self) -> int:
        """Over how many TP ranks norms and residuals are spread."""
        return self.tp_size if self.sequence_parallel else 1

    @property
    def num_stages(self) -> int:
        """Virtual stages: model chunks of all pipeline ranks."""
        return self.pp_size * self.vpp_size

    def layers_of_stages(self, shape: ModelShape) -> tuple[int, ...]:
        """Layers of each virtual stage.

        Raises :class:`ConfigError` where stages, heads, groups, FFN or vocabulary do not divide, or
        ``stage_layers`` are not those of the model.
        """
        num, chunks = self.num_stages, (self.pp_size, self.vpp_size)
        layers = self.stage_layers
        if layers is not None:
            fits = len(layers) == num and sum(layers) == shape.num_layers
            if not fits or min(layers) < 0:
                raise ConfigError(
                    f"stage_layers {', '.join(map(str, layers))} do not spread "
                    f"{shape.num_layers} layers over {num} model chunks (PP × VPP); give each its "
                    "number"
                )
        elif shape.num_layers % num:
            raise ConfigError(
                f"{shape.num_layers} layers do not divide over {num} model chunks (PP × VPP); "
                f"choose a multiple, or give {split.remedy(shape.num_layers, *chunks)}"
            )
        else:
            layers = (shape.num_layers // num,) * num
        sizes = itertools.chain(
            *(part.divided(self) for part in shape.parts),
            [("vocab_size", shape.vocab_size, "TP", self.tp_size)],
        )
        for name, size, what, shards in sizes:
            if size % shards:
                raise ConfigError(
                    f"{name} {size} does not divide over {what} {shards}; choose a multiple"
                )
        return layers

    def stages(self, shape: ModelShape) -> tuple[Stage, ...]:
        """What each virtual stage has. Raises :class:`ConfigError` as :meth:`layers_of_stages`."""
        last = self.num_stages - 1
        cut = slices(shape.runs, self.layers_of_stages(shape))
        return tuple(Stage(runs, at == 0, at == last) for at, runs in enumerate(cut))


VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of so many rows a TP rank."""


def padded_vocabulary(shape: ModelShape, tp_size: int) -> ModelShape:
    """Pads the shape to the rows of LM head and embedding that Megatron makes of them."""
    multiple = VOCAB_MULTIPLE * tp_size
    return replace(shape, vocab_size=-(-shape.vocab_size // multiple) * multiple)


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which activations the backward pass computes again, as Megatron's flags have it."""

    granularity: Literal["selective", "full", "mlp"] | None = None
    """``selective`` is core attention; ``full`` is whole layers; ``mlp`` is dense MLPs behind their
    norms, of single micro-batches of slices."""
    method: Literal["uniform", "block"] | None = None
    """``uniform``: all layers, in groups of ``num_layers`` of which only the input is kept.
    ``block``: the first ``num_layers`` of each model chunk, each for itself."""
    num_layers: int | None = None

    def __post_init__(self) -> None:
        full = self.granularity == "full"
        if full != (self.method is not None) or full != (self.num_layers is not None):
            raise ConfigError(
                f"recompute: granularity {self.granularity} with method {self.method} and "
                f"num_layers {self.num_layers}; full needs both, the others neither"
            )
        if self.num_layers is not None:
            whole_number("recompute: num_layers", self.num_layers, 1, MOST_LAYERS)

    def groups(self, num_layers: int) -> list[tuple[int, bool]]:
        """``(layers, recomputed)`` of one chunk of ``num_layers``, in order."""
        if self.granularity != "full":
            return [(1, False)] * num_layers
        assert self.num_layers is not None
        if self.method == "block":
            first = min(self.num_layers, num_layers)
            return [(1, True)] * first + [(1, False)] * (num_layers - first)
        starts = range(0, num_layers, self.num_layers)
        return [(min(self.num_layers, num_layers - start), True) for start in starts]

    @property
    def title(self) -> str:
        """``none``, ``selective``, ``full``, or ``full (block 2)`` of a part of the layers."""
        part = f" ({self.method} {self.num_layers})" if self.method == "block" else ""
        return f"{self.granularity or 'none'}{part}"

    @property
    def of_predictors(self) -> bool:
        """Whether layers that predict further ahead run forward once more."""
        return self.granularity == "full" and self.method == "uniform"

    def recomputed_layers(self, num_layers: int) -> int:
        """How many of a chunk's layers run forward once more."""
        return sum(layers for layers, recomputed in self.groups(num_layers) if recomputed)
