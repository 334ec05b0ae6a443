"""A cost from first principles: the model's operations at the rates of a machine.

Per device and layer, forward, of a micro-batch (``h`` hidden, bytes of ``e`` a number):

* matrix products: 2 FLOPs a weight and token, over TP and CP;
* causal attention: ``2 · heads · dim · d²`` FLOPs a document, over TP and CP;
* TP: four all-gathers or reduce-scatters of ``[tokens / CP, h]`` (two all-reduces are as much),
  less what is hidden behind matrix products;
* CP: the other ranks' K and V, less what is hidden behind attention, and the copy of all ranks'
  into the order that the attention kernel takes;
* element-wise operations: what they read and write, at memory bandwidth.

The first stage has the embedding besides, the last one the LM head and its fp32 loss. Sends between
stages belong to the schedule, so :mod:`megatron_wlb.simulator` has them. Backward takes twice the
forward's linear work and 2.5 times its attention work (flash attention computes the scores again),
and once more the forward of what is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_wlb.cost.document import DocumentCost
from megatron_wlb.cost.hardware import Hardware
from megatron_wlb.cost.shape import ModelShape, Parallelism, Recompute

BACKWARD_LINEAR, BACKWARD_ATTENTION = 2.0, 2.5
"""Work of the backward pass, in forwards."""

_FP32 = 4
_LOSS_BYTES = 9 * _FP32
"""A logit's fp32 traffic: cast, maximum, subtraction, exponential, sum, division."""


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """Forward of one layer, or of what a stage has besides layers: µs on each device."""

    matrix_us: float
    """A token, as are those that follow."""
    elementwise_us: float
    tp_us: float
    """Tensor-parallel collectives that are not hidden."""
    cp_us: float = 0.0
    """Context-parallel exchange that is not hidden."""
    cp_copy_us: float = 0.0
    """The copy of what it brings."""
    attention_us: float = 0.0
    """A token²."""

    @property
    def linear_us(self) -> float:
        """All that grows with the tokens."""
        return self.matrix_us + self.elementwise_us + self.tp_us + self.cp_us + self.cp_copy_us


@dataclass(frozen=True, slots=True)
class AnalyticModel:
    """Times of a model's parts on a machine. ``element_bytes`` is 2 with bf16, 4 with fp32."""

    shape: ModelShape
    hardware: Hardware
    parallelism: Parallelism
    recompute: Recompute
    element_bytes: int = 2

    def layer(self) -> ForwardTimes:
        """One transformer layer."""
        shape, p = self.shape, self.parallelism
        # Numbers read and written a token. Norms: 2 each; residual additions: 3 each.
        spread = 10 * shape.hidden_size / p.sequence_shards
        attention_numbers = shape.query_size + shape.key_size
        local = 2 * (attention_numbers + shape.key_size)  # q, k, v taken out of one tensor
        if shape.rotary_percent:
            local += 2 * attention_numbers
        if shape.qk_norm:
            local += 2 * attention_numbers
        local += (3 if shape.gated else 2) * shape.ffn_hidden_size
        kv_bytes = 2 * shape.key_size / p.tp_size * self.element_bytes
        gathered_bytes = kv_bytes * (p.cp_size - 1) / p.cp_size
        exchange_us = self.hardware.transfer_us(gathered_bytes, p.tp_size * p.cp_size)
        # Each rank copies the keys and values of all ranks into the order of its kernel.
        copied_bytes = 2 * kv_bytes if p.cp_size > 1 else 0.0
        return ForwardTimes(
            self._matrix_us(shape.layer_linear_parameters),
            self._elementwise_us((spread + local / p.tp_size) * self.element_bytes),
            self._tp_us(num_collectives=4),
            (1 - self.hardware.cp_overlap) * exchange_us,
            self.hardware.memory_us(copied_bytes),
            2 * shape.query_size / (self._devices * self.hardware.attention_tflops * 1e6),
        )

    def embedding(self) -> ForwardTimes:
        """What the first stage has besides its layers."""
        spread = 2 * self.shape.hidden_size / self.parallelism.sequence_shards
        return ForwardTimes(
            0.0, self._elementwise_us(spread * self.element_bytes), self._tp_us(num_collectives=1)
        )

    def head(self) -> ForwardTimes:
        """What the last stage has besides its layers: norm, LM head, loss."""
        shape, p = self.shape, self.parallelism
        norm_bytes = 2 * shape.hidden_size / p.sequence_shards * self.element_bytes
        loss_bytes = shape.vocab_size / p.tp_size * (self.element_bytes + _LOSS_BYTES)
        return ForwardTimes(
            self._matrix_us(shape.head_linear_parameters),
            self._elementwise_us(norm_bytes + loss_bytes),
            self._tp_us(num_collectives=1),
        )

    def chunk_cost(self, num_layers: int, *, first: bool, last: bool) -> DocumentCost:
        """Cost of a document in a model chunk that embeds, has the loss, both or neither."""
        layer = self.layer()
        again = self.recompute.recomputed_layers(num_layers)
        again_attention = num_layers if self.recompute.granularity == "selective" else again
        linear_us, attention_us = num_layers * layer.linear_us, num_layers * layer.attention_us
        ends = [part for part, has in ((self.embedding(), first), (self.head(), last)) if has]
        linear_us += sum(part.linear_us for part in ends)
        return DocumentCost(
            linear_us,
            attention_us,
            BACKWARD_LINEAR * linear_us + again * layer.linear_us,
            BACKWARD_ATTENTION * attention_us + again_attention * layer.attention_us,
        )

    def stage_costs(self) -> tuple[DocumentCost, ...]:
        """Cost in each virtual stage (chunk ``c`` of rank ``r`` is ``c · PP + r``)."""
        layers = self.parallelism.layers_of_stages(self.shape)
        last = len(layers) - 1
        return tuple(
            self.chunk_cost(num, first=stage == 0, last=stage == last)
            for stage, num in enumerate(layers)
        )

    def cost(self) -> DocumentCost:
        """Cost of a document in the whole model: the sum over its stages."""
        stages = self.stage_costs()
        return DocumentCost(
            sum(stage.forward_linear_us for stage in stages),
            sum(stage.forward_quadratic_us for stage in stages),
            sum(stage.backward_linear_us for stage in stages),
            sum(stage.backward_quadratic_us for stage in stages),
        )

    @property
    def _devices(self) -> int:
        """Devices that share a layer."""
        return self.parallelism.tp_size * self.parallelism.cp_size

    def _matrix_us(self, num_weights: int) -> float:
        return 2 * num_weights / (self._devices * self.hardware.linear_tflops * 1e6)

    def _elementwise_us(self, num_bytes: float) -> float:
        return self.hardware.memory_us(num_bytes / self.parallelism.cp_size)

    def _tp_us(self, num_collectives: int) -> float:
        p = self.parallelism
        hidden_bytes = self.shape.hidden_size * self.element_bytes / p.cp_size
        received = num_collectives * hidden_bytes * (p.tp_size - 1) / p.tp_size
        return (1 - self.hardware.tp_overlap) * self.hardware.transfer_us(received, p.tp_size)


def analytic_cost(
    shape: ModelShape,
    hardware: Hardware,
    parallelism: Parallelism | None = None,
    recompute: Recompute | None = None,
    *,
    element_bytes: int = 2,
) -> DocumentCost:
    """The cost of a document in the whole model; good for balance before measuring.

    Raises :class:`ConfigError` for a model that the layout does not divide.
    """
    return AnalyticModel(
        shape, hardware, parallelism or Parallelism(), recompute or Recompute(), element_bytes
    ).cost()
