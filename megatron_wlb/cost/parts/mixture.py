"""A mixture of experts: a router, experts over ranks, and a shared one beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_wlb.cost.layers import Divided, Part, check_sizes
from megatron_wlb.cost.parts.feed_forward import FeedForward
from megatron_wlb.cost.tape import Operation
from megatron_wlb.cost.workspace import FP32, INT64
from megatron_wlb.errors import ConfigError

if TYPE_CHECKING:
    from megatron_wlb.cost.blocks import Blocks
    from megatron_wlb.cost.execution import Executed
    from megatron_wlb.cost.shape import Parallelism


@dataclass(frozen=True, slots=True)
class Experts(Part):
    """A router and experts, of which a token passes ``topk``, beside a shared one that all pass.

    ``columns`` and ``rows`` are the shared expert's: tensor parallelism divides it as a dense MLP.
    Raises :class:`ConfigError` for more experts a token than there are.
    """

    num_experts: int
    topk: int
    expert_hidden_size: int
    """MLP size of one expert."""
    gated: bool
    shared_hidden_size: int = 0
    """MLP size of the shared expert; 0 without one."""
    latent_size: int | None = None
    """Numbers of a token that experts take and give, between two products that all tokens pass; if
    not given they take the hidden state."""

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.topk > self.num_experts:
            raise ConfigError(
                f"model shape: a token passes {self.topk} experts, but there are "
                f"{self.num_experts}; give at most that"
            )

    @property
    def _matrices(self) -> int:
        return 2 if self.gated else 1

    @property
    def columns(self) -> int:
        return self._matrices * self.shared_hidden_size

    @property
    def rows(self) -> int:
        return self.shared_hidden_size

    @property
    def expert_columns(self) -> int:
        """Columns of one expert's first product."""
        return self._matrices * self.expert_hidden_size

    @property
    def expert_numbers(self) -> int:
        """Weights of one expert for each number that it takes."""
        return self.expert_columns + self.expert_hidden_size

    def weights(self, hidden_size: int) -> int:
        """And those of the router and around latents."""
        routed = self.routed_weights(hidden_size)
        return Part.weights(self, hidden_size) + hidden_size * self._chosen + routed

    @property
    def _chosen(self) -> int:
        """Weights for each number of the hidden state that tensor parallelism does not divide."""
        return self.num_experts + 2 * (self.latent_size or 0)

    def routed_weights(self, hidden_size: int) -> int:
        return self.topk * self.expert_numbers * (self.latent_size or hidden_size)

    @property
    def elementwise_numbers(self) -> int:
        """Read and written a token by the router's softmax and the shared expert's activation."""
        return 2 * self.num_experts + self.columns + self.rows

    @property
    def routed_elementwise_numbers(self) -> int:
        """Read and written a token by its experts' activations."""
        return self.topk * self.expert_numbers

    def product_numbers(self, hidden_size: int, p: Parallelism) -> float:
        width = self.latent_size or hidden_size
        each = 2 * width + (self.expert_columns + self.expert_hidden_size) / p.expert_tp_size
        shared = Part.product_numbers(self, hidden_size, p)
        around = 2 * (hidden_size + self.latent_size) if self.latent_size else 0
        return shared + hidden_size + self.num_experts + around + self.topk * each

    def num_kernels(self, p: Parallelism) -> int:
        """Besides a dense MLP's: the router, permutations, and each expert's products."""
        return 30 + 4 * self.num_experts // p.ep_size

    def divided(self, p: Parallelism) -> Divided:
        yield "num_experts", self.num_experts, "EP", p.ep_size
        yield "expert_hidden_size", self.expert_hidden_size, "expert TP", p.expert_tp_size
        yield "shared_hidden_size", self.shared_hidden_size, "TP", p.tp_size

    def parameters(self, on: Executed) -> int:
        """The shared expert's, the router's and those around latents."""
        bias, h = on.shape.linear_bias, on.shape.hidden_size
        biases = self.latent_size + h if bias and self.latent_size else 0
        return self.matrix_parameters(on, bias=bias) + h * self._chosen + biases

    def routed_parameters(self, on: Executed) -> int:
        width, p = self.latent_size or on.shape.hidden_size, on.parallelism
        each = width * self.expert_numbers
        if on.shape.linear_bias:
            each += self.expert_columns + width * p.expert_tp_size
        return self.num_experts * each // p.expert_ranks

    def dispatched_numbers(self, p: Parallelism, hidden_size: int) -> tuple[int, float, float]:
        width = (self.latent_size or hidden_size) / p.sequence_shards
        copied = 2 * (1 + self.topk) * width
        if self.num_experts > p.ep_size:  # and again by those of the rank
            copied += 4 * self.topk * width * p.expert_tp_size
        return self.topk, self.topk * width, copied

    def operations(self, on: Blocks) -> list[Operation]:
        shared = FeedForward(self.shared_hidden_size, self.gated) if self.columns else None
        return [*(shared.operations(on) if shared else ()), *self._routed(on)]

    def _routed(self, on: Blocks) -> list[Operation]:
        """Lists the operations from the norm's output to the sum of what a token's experts give.

        A rank's experts get ``got`` tokens for each of the micro-batch: with experts divided by
        tensor parallelism also those of the ranks that have the other parts.
        """
        p, e, hidden_size = on.parallelism, on.elementwise, on.shape.hidden_size
        h = self.latent_size or hidden_size
        sent = self.topk / p.sequence_shards
        got = sent * on.execution.expert_imbalance * p.expert_tp_size
        f, columns = self.expert_hidden_size / p.expert_tp_size, self.expert_columns
        columns_here = columns / p.expert_tp_size
        # Kernels of all experts at once have all their gradients; one by one, one.
        num = self.num_experts // p.ep_size if on.fused else 1
        weights = on.element_bytes * num * h // p.expert_tp_size
        matrix = on.bytes.matrix.element_bytes
        logits = FP32 * self.num_experts / p.sequence_shards
        copies, arrived = e * h * sent, e * h * got
        # The copies that are sent, those that have come, and these sorted by expert.
        moved = copies + (2 if self.num_experts > p.ep_size else 1) * arrived
        # Scores, the chosen ones, and where each copy went.
        routing = 2 * logits + (FP32 + INT64) * sent + self.num_experts / p.sequence_shards
        act = 2 * e * f * got if self.gated and not on.fused else 0.0
        latents = (self.latent_size or 0) / p.sequence_shards
        around = on.element_bytes * hidden_size * (self.latent_size or 0)
        into_latents, out_of_latents = (
            [Operation(name, kept, e * latents, on.hidden + e * latents, around)] if around else []
            for name, kept in (("into latents", 0.0), ("out of latents", matrix * latents))
        )
        return [
            Operation(
                "router",
                routing,
                forward=logits,
                backward=on.hidden + 2 * logits,
                weight_bytes=on.element_bytes * hidden_size * self.num_experts,
                stays=INT64 * sent,
            ),
            *into_latents,
            Operation(
                "dispatch",
                matrix * h * got,
                forward=max(0.0, moved - matrix * h * got),
                backward=on.hidden + moved,
            ),
            Operation(
                "expert fc1",
                e * columns_here * got,
                forward=on.quantised(h) * got,
                backward=on.hidden
                + (e * columns_here + e * h) * got
                + (on.quantised(h) + on.quantised(columns_here)) * got,
                weight_bytes=weights * columns,
            ),
            Operation(
                "expert activation",
                act + FP32 * got,
                backward=on.hidden + e * (columns_here + f) * got,
            ),
            Operation(
                "expert fc2",
                matrix * f * got,
                forward=arrived + on.quantised(f) * got,
                backward=on.hidden + arrived + e * f * got + on.quantised(h) * got,
                weight_bytes=weights * self.expert_hidden_size,
            ),
            Operation("combine", forward=moved, backward=on.hidden + moved),
            *out_of_latents,
        ]
