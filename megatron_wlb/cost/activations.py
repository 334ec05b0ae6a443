"""The operations of a model chunk and the bytes that each keeps: what activation memory is made of.

Two ways to count, by the kernels that run:

* ``torch``: Megatron's local layer spec on the CPU: norms of several operations that keep fp32
  copies, unfused RoPE and SwiGLU, and attention document by document.
* ``fused``: kernels that keep their inputs only, as Transformer Engine's norms, flash attention,
  fused RoPE and fused SwiGLU do. Not measured; from their definitions (for a GPT with dropout it is
  the ``34·h`` bytes a token and layer of Korthikanti et al., 2022). Attention's backward works in
  memory of its own (:mod:`megatron_wlb.cost.workspace`): the most of all kernels, or that of a
  named one.

A number is kept in the precision of the operation that reads it again.

Experts keep the tokens that come to them, more than the mean rank's where routing is uneven by
``expert_imbalance``.

Legend: ``h`` hidden, ``f`` FFN, ``q``/``k`` numbers of a token's query/key on a TP rank. All bytes
are those of one device, a token of the micro-batch (padded, over CP).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megatron_wlb.cost.blocks import Blocks
from megatron_wlb.cost.layers import Layer, Runs, slices
from megatron_wlb.cost.tape import Operation, Tape, in_runs, scaled, with_more
from megatron_wlb.cost.workspace import FP32, INT64


class ActivationModel(Blocks):
    """Tapes of a model's chunks."""

    __slots__ = ()

    def tape(self, *, first: bool, last: bool, layers: Runs | None = None) -> Tape:
        """The tape of a chunk that embeds (``first``) or has the loss (``last``), or of another.

        ``layers`` are the chunk's; those of the first one if not given.
        """
        if layers is None:
            layers = self.parallelism.stages(self.shape)[0].layers
        groups = self.recompute.groups(sum(num for num, _ in layers))
        cut = slices(layers, (num for num, _ in groups))
        grouped = [(own, again, False) for (_, again), own in zip(groups, cut, strict=True)]
        if grouped and not last:  # what leaves the chunk is sent and freed
            grouped[-1] = (*grouped[-1][:2], True)
        runs = [(1, self._shared(self._embedding() if first else self._received()))]
        for num, pattern in in_runs(grouped):
            runs.append((num, tuple(o for one in pattern for o in _group(self, *one))))
        end = []
        rotary = self.shape.kv_channels * self.shape.rotary_percent
        if self.recompute.granularity == "full" and rotary:
            end.append(Operation("rotary angles", FP32 * rotary))
        if last:
            end += [*self._predictors(), *self._head()]
        return Tape((*runs, (1, self._shared(*end))))

    def _shared(self, *operations: Operation) -> tuple[Operation, ...]:
        """Operations on the tokens of a context-parallel rank."""
        return scaled(operations, 1 / self.parallelism.cp_size)

    def _embedding(self) -> Operation:
        shape = self.shape
        ids = 2 * INT64  # tokens and positions
        if self.parallelism.tp_size > 1:
            ids += INT64  # ids within this rank's part of the vocabulary
        kept = self.keeps_residual or self.recompute.granularity == "full"
        return Operation(
            "embedding",
            (self.hidden if kept else 0.0) + ids + self.dropout_mask,
            forward=self.gathered,
            backward=self.hidden + self.collective,
            weight_bytes=self.weight(shape.vocab_size, shape.hidden_size),
            stays=ids,
        )

    def _received(self) -> Operation:
        kept = self.hidden + INT64
        return Operation("received", kept, backward=self.hidden, stays=kept)

    def _layers(self, runs: Runs, *, keep_output: bool) -> tuple[Operation, ...]:
        """Layers one after another; the output of the last may be kept by nobody."""
        operations: tuple[Operation, ...] = ()
        for num, layer in runs:
            operations += replace(self, precisions=layer.precisions)._layer(layer) * num
        if keep_output:
            return operations
        return (*operations[:-1], Operation("output", self.dropout_mask))

    def _residual(self, name: str) -> Operation:
        kept = self.hidden if self.keeps_residual else 0.0
        return Operation(name, kept + self.dropout_mask)

    def _layer(self, layer: Layer) -> tuple[Operation, ...]:
        operations: list[Operation] = []
        for part in layer.parts:
            inner = part.operations(self)
            if self.recompute.granularity == "mlp" and part.is_mlp:
                # The norm has its input; in backward its output exists again.
                inner = [Operation("recomputed", backward=self.hidden, inner=tuple(inner))]
            operations += [self._layer_norm(), *inner, self._residual("output")]
        return tuple(operations)

    def _layer_norm(self) -> Operation:
        """A norm of the residual stream, with its output: the input of a matrix product."""
        rows = 1 / self.parallelism.sequence_shards
        norm = self.norm("norm", self.residual_numbers, num_rows=rows)
        kept = self.bytes.matrix.element_bytes * self.residual_numbers
        return with_more(norm, saved=kept, backward=self.hidden)

    def _predictors(self) -> list[Operation]:
        """Layers that predict further ahead, and their LM heads: Megatron's runs last."""
        num_ahead = self.shape.num_ahead
        if not num_ahead:
            return []
        # All depths' hidden states are copied into one tensor for the LM heads. Where these are
        # done in backward, its gradient takes as much until all the layers are.
        operations = [Operation("depths", (1 + num_ahead) * self.hidden)]
        for num, layer in self.shape.predictors:
            operations += replace(self, precisions=layer.precisions)._predictor(layer) * num
        operations += self._head() * num_ahead
        if self.element_bytes != FP32:  # Megatron holds the last depth's logits beside its own.
            logits = self.element_bytes * self.shape.vocab_size / self.parallelism.tp_size
            operations[-1] = replace(operations[-1], saved=operations[-1].saved + logits)
        return operations

    def _predictor(self, layer: Layer) -> tuple[Operation, ...]:
        """A layer that predicts further ahead, without its last norm and LM head."""
        rows = 2 / self.parallelism.sequence_shards
        # A hidden state and a token's embedding, and both side by side.
        norms = self.norm("joined norms", 2 * self.residual_numbers, num_rows=rows)
        matrix_bytes = self.bytes.matrix.element_bytes
        hidden = self.shape.hidden_size
        inner = (
            with_more(
                norms, saved=2 * matrix_bytes * self.residual_numbers, backward=2 * self.hidden
            ),
            Operation(
                "joining",
                self.hidden,
                forward=2 * self.collective + self.gathered,
                backward=2 * (self.gathered + self.collective) + self.hidden,
                weight_bytes=self.weight(2 * hidden, hidden),
            ),
            *self._layers(((1, layer),), keep_output=True),
        )
        if not self.recompute.of_predictors:
            return (self._embedding(), *inner)
        return (self._embedding(), _recomputed(inner, self.hidden, 0.0))

    def _head(self) -> list[Operation]:
        shape, p, e = self.shape, self.parallelism, self.element_bytes
        logits = shape.vocab_size / p.tp_size
        norm = self.norm("final norm", self.residual_numbers, num_rows=1 / p.sequence_shards)
        return [
            with_more(norm, saved=self.hidden),
            Operation(
                "output layer",
                forward=self.collective + e * logits,
                backward=e * logits + self.gathered + self.collective,
                weight_bytes=self.weight(shape.vocab_size, shape.hidden_size),
            ),
            # Its softmax is fp32 and takes the place of fp32 logits; of bf16 ones it is a copy.
            Operation(
                "cross entropy",
                FP32 * logits + 2 * INT64,  # the softmax; labels and mask
                forward=0.0 if e == FP32 else e * logits,
                backward=0.0 if e == FP32 else e * logits,
                stays=2 * INT64,
            ),
        ]


@lru_cache(maxsize=1024)  # most are alike, in other layouts too
def _group(
    model: ActivationModel, layers: Runs, recomputed: bool, leaves: bool
) -> tuple[Operation, ...]:
    """Layers that are recomputed together, or none; their output is kept unless it leaves."""
    if not recomputed:
        return model._shared(*model._layers(layers, keep_output=not leaves))
    inner = model._layers(layers, keep_output=False)
    kept, again = (0.0, model.hidden) if leaves else (model.hidden, 0.0)
    return model._shared(_recomputed(inner, kept, again))  # in backward its output exists again


def _recomputed(inner: tuple[Operation, ...], kept: float, again: float) -> Operation:
    """Layers that run once more in backward, where ``again`` is alive besides."""
    buffers = (sum(o.keys for o in inner), sum(o.gradients for o in inner))
    state = sum(o.state for o in inner)
    return Operation("recomputed", kept, 0.0, again, 0, inner, 0.0, *buffers, state=state)
