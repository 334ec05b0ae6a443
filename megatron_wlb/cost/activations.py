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

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from megatron_wlb.cost.exchange import exchange_bytes
from megatron_wlb.cost.layers import (
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Precisions,
    Runs,
    slices,
)
from megatron_wlb.cost.shape import ModelShape, Parallelism, Recompute
from megatron_wlb.cost.tape import Operation, Tape, scaled, with_more
from megatron_wlb.cost.workspace import FP32, WORKSPACES, Workspace

Kernels: TypeAlias = Literal["torch", "fused"]

INT64 = 8
DOCUMENT_TOKENS = 1024
"""Tokens of a document in the mean, for what kernels add to each; real corpora have more."""


@dataclass(frozen=True, slots=True)
class ActivationModel:
    """Tapes of a model's chunks.

    ``element_bytes`` is 2 in bf16 and 4 in fp32, for weights' gradients, the model's ends, and
    layers without precisions of their own.
    """

    shape: ModelShape
    parallelism: Parallelism
    recompute: Recompute
    element_bytes: int
    kernels: Kernels
    keep_gathered: bool = False
    """Under CP: whether gathered keys and values are kept for the backward pass."""
    attention_kernel: str | None = None
    """The name of attention's kernel; without one the most of all that may run is counted of the
    fused ones, and attention document by document of torch's."""
    document_tokens: float = DOCUMENT_TOKENS
    reduce_in_fp32: bool = False
    """Under CP: whether their gradients are summed in fp32."""
    expert_imbalance: float = 1.0
    """How many times the mean rank's tokens the experts of this rank get."""
    precisions: Precisions | None = None
    """The precisions of the layer at hand."""

    def tape(self, *, first: bool, last: bool, layers: Runs | None = None) -> Tape:
        """The tape of a chunk that embeds (``first``) or has the loss (``last``), or of another.

        ``layers`` are the chunk's; those of the first one if not given.
        """
        if layers is None:
            layers = self.parallelism.stages(self.shape)[0].layers
        operations = [self._embedding() if first else self._received()]
        groups = self.recompute.groups(sum(num for num, _ in layers))
        cut = slices(layers, (num for num, _ in groups))
        for number, ((_, recomputed), group_layers) in enumerate(zip(groups, cut, strict=True)):
            # What leaves a chunk that is not the last is sent and freed.
            leaves = number == len(groups) - 1 and not last
            if recomputed:
                inner = self._layers(group_layers, keep_output=False)
                kept, again = (0.0, self._hidden) if leaves else (self._hidden, 0.0)
                # In backward its output exists again.
                buffers = (sum(o.keys for o in inner), sum(o.gradients for o in inner))
                operations.append(
                    Operation("recomputed", kept, 0.0, again, 0, inner, 0.0, *buffers)
                )
            else:
                operations += self._layers(group_layers, keep_output=not leaves)
        rotary = self.shape.kv_channels * self.shape.rotary_percent
        if self.recompute.granularity == "full" and rotary:
            operations.append(Operation("rotary angles", FP32 * rotary))
        if last:
            operations += [*self._predictors(), *self._head()]
        return Tape(scaled(operations, 1 / self.parallelism.cp_size))

    # Sizes on this rank, in numbers or bytes a token.

    @property
    def _bytes(self) -> Precisions:
        return self.precisions or Precisions.same(self.element_bytes)

    @property
    def _elementwise(self) -> int:
        return self._bytes.elementwise.element_bytes

    @property
    def _fused(self) -> bool:
        return self.kernels == "fused"

    @property
    def _residual_numbers(self) -> float:
        return self.shape.hidden_size / self.parallelism.sequence_shards

    @property
    def _hidden(self) -> float:
        """Bytes of a hidden state where sequence parallelism spreads it."""
        return self._elementwise * self._residual_numbers

    @property
    def _gathered(self) -> float:
        """Bytes of a hidden state of all tokens, as matrix products give it."""
        return float(self._elementwise * self.shape.hidden_size)

    def _quantised(self, numbers: float) -> float:
        """Bytes of a product's input in fewer bits, as it is and transposed; 0 in those it has."""
        matrix = self._bytes.matrix.element_bytes
        return 2.0 * matrix * numbers if matrix < self._elementwise else 0.0

    @property
    def _collective(self) -> float:
        """What sequence parallelism needs beside a matrix product's input and output."""
        spread = self.parallelism.sequence_shards > 1
        return self._bytes.collective.element_bytes * self.shape.hidden_size if spread else 0.0

    @property
    def _keeps_residual(self) -> bool:
        """Torch's RMSNorm keeps an fp32 copy of a bf16 input instead of the input."""
        return self._fused or not self.shape.rms_norm or self._elementwise == FP32

    def _weight(self, rows: int, columns: int) -> int:
        return self.element_bytes * rows * columns // self.parallelism.tp_size

    # Operations.

    def _embedding(self) -> Operation:
        shape = self.shape
        ids = 2 * INT64  # tokens and positions
        if self.parallelism.tp_size > 1:
            ids += INT64  # ids within this rank's part of the vocabulary
        kept = self._keeps_residual or self.recompute.granularity == "full"
        return Operation(
            "embedding",
            (self._hidden if kept else 0.0) + ids + self._dropout_mask,
            forward=self._gathered,
            backward=self._hidden + self._collective,
            weight_bytes=self._weight(shape.vocab_size, shape.hidden_size),
        )

    def _received(self) -> Operation:
        return Operation("received", self._hidden + INT64, backward=self._hidden)

    def _layers(self, runs: Runs, *, keep_output: bool) -> tuple[Operation, ...]:
        """Layers one after another; the output of the last may be kept by nobody."""
        operations: tuple[Operation, ...] = ()
        for num, layer in runs:
            operations += replace(self, precisions=layer.precisions)._layer(layer) * num
        if keep_output:
            return operations
        return (*operations[:-1], Operation("output", self._dropout_mask))

    def _norm(self, name: str, numbers: float, *, num_rows: float = 1.0) -> Operation:
        """A norm of ``numbers`` in ``num_rows`` rows a token, without its input and output."""
        e, statistics = self._elementwise, FP32 * num_rows
        if not self.shape.rms_norm:
            return Operation(name, 2 * statistics, backward=2 * e * numbers)
        if self._fused:
            return Operation(name, statistics, backward=2 * e * numbers)
        normalised = FP32 * numbers
        copy = FP32 * numbers if e != FP32 else 0.0
        # Its backward is several operations, each with a result of its own.
        return Operation(name, normalised + copy + statistics, backward=(e + 4 * FP32) * numbers)

    @property
    def _dropout_mask(self) -> float:
        """Torch's CPU keeps the mask as numbers, a fused kernel as a byte each."""
        if not self.shape.dropout:
            return 0.0
        return self._residual_numbers if self._fused else self._hidden

    def _residual(self, name: str) -> Operation:
        kept = self._hidden if self._keeps_residual else 0.0
        return Operation(name, kept + self._dropout_mask)

    def _layer(self, layer: Layer) -> tuple[Operation, ...]:
        operations: list[Operation] = []
        for part in layer.parts:
            if isinstance(part, Attention):
                inner = self._attention(part)
            else:
                inner = self._mlp(part) if part.columns else []
            if isinstance(part, Experts):
                inner += self._experts(part)
            operations += [self._layer_norm(), *inner, self._residual("output")]
        return tuple(operations)

    def _layer_norm(self) -> Operation:
        """A norm of the residual stream, with its output: the input of a matrix product."""
        rows = 1 / self.parallelism.sequence_shards
        norm = self._norm("norm", self._residual_numbers, num_rows=rows)
        kept = self._bytes.matrix.element_bytes * self._residual_numbers
        return with_more(norm, saved=kept, backward=self._hidden)

    def _into(self, name: str, product: float, columns: int, *, bias: bool) -> Operation:
        """A matrix product from the hidden state to ``product`` bytes, which are kept."""
        taken = self._quantised(self.shape.hidden_size)
        gradient = self._quantised(columns / self.parallelism.tp_size)
        return Operation(
            name,
            product,
            forward=self._collective + (product if bias else 0.0) + taken,
            backward=self._hidden + product + self._gathered + self._collective + taken + gradient,
            weight_bytes=self._weight(self.shape.hidden_size, columns),
        )

    def _out_of(self, name: str, product: float, rows: int) -> Operation:
        """A matrix product from ``product`` bytes, which are kept, to the hidden state.

        Its output's gradient is that of the residual path.
        """
        return Operation(
            name,
            product,
            forward=self._gathered + self._quantised(rows / self.parallelism.tp_size),
            backward=self._hidden
            + self._collective
            + product
            + self._quantised(self.shape.hidden_size),
            weight_bytes=self._weight(rows, self.shape.hidden_size),
        )

    def _workspace(self, part: Attention, num_keys: float) -> tuple[float, float] | None:
        """Bytes in which the kernel's backward works: a local token with so many keys a token, and
        a key. None of kernels that run document by document.
        """
        if self.attention_kernel is not None:
            names = [name for name in WORKSPACES if name == self.attention_kernel]
        else:
            names = list(WORKSPACES) if self._fused else []
        # On each context-parallel rank a document may have two chunks.
        cp_size, tp_size = self.parallelism.cp_size, self.parallelism.tp_size
        chunks = (2 * cp_size if cp_size > 1 else 1) / self.document_tokens
        heads, groups = part.num_attention_heads / tp_size, part.num_query_groups / tp_size
        sizes = heads, groups, part.kv_channels, self._bytes.attention.element_bytes

        def total(space: Workspace) -> float:
            return space.total(1, num_keys, chunks)

        most = max((WORKSPACES[name](*sizes) for name in names), key=total, default=None)
        return None if most is None else (total(most), most.key_bytes + most.key_row_bytes)

    def _attention(self, part: Attention) -> list[Operation]:
        """Lists the operations from the norm's output to the projection."""
        if isinstance(part, LatentAttention):
            return self._latent_attention(part)
        tp_size, e = self.parallelism.tp_size, self._bytes.attention.element_bytes
        q, k = part.query_size / tp_size, part.key_size / tp_size
        heads, groups = part.num_attention_heads / tp_size, part.num_query_groups / tp_size
        bias = self.shape.linear_bias or part.qkv_bias
        # V stays a view of the product, and so keeps all of it.
        operations = [self._into("qkv", e * (q + 2 * k), part.columns, bias=bias)]

        rotary = part.kv_channels * part.rotary_percent
        rotated = rotary > 0
        # Queries of several heads a group are copied out; somebody may keep the copy.
        copied = e * q if heads != groups and not self._fused else 0.0
        if part.qk_norm:
            norm = self._norm("qk norm", q + k, num_rows=heads + groups)
            kept_input = copied if self._keeps_residual else 0.0
            kept_output = 0.0 if rotated else e * (q + k)
            operations.append(
                with_more(norm, saved=kept_input + kept_output, backward=self._hidden + e * k)
            )
        if rotated:
            tables = 0.0 if self._fused else 4 * e * rotary  # cos and sin, for q and for k
            operations.append(
                Operation(
                    "rotary",
                    e * (q + k) + tables,
                    forward=2 * e * q + FP32 * rotary,
                    backward=self._hidden + 4 * e * q + 2 * e * k,
                )
            )
        elif not part.qk_norm:
            operations.append(Operation("query", copied))

        # Of its output and log-sum-exp the first is the projection's input.
        kept = FP32 * heads
        # Gradients of the output, of q, k, v, and of one document's again or what the kernel needs.
        workspace, prefix = self._workspace(part, 1) or (e * (q + 2 * k), 0.0)
        gradients = self._hidden + e * q + e * (q + 2 * k) + workspace
        if self.parallelism.cp_size > 1:
            attention = self._context_attention(part, kept, self._hidden + e * q)
        elif self.recompute.granularity == "selective":
            attention = Operation("attention", forward=kept, backward=gradients + kept + e * q)
        else:
            attention = Operation("attention", kept, backward=gradients)
        attention = replace(attention, keys=2 * e * k, gradients=2 * FP32 * k, prefix=prefix)
        if self.recompute.granularity != "selective":  # which keeps what attention is given
            # Keys of their own, and the product of which queries are no view.
            apart = rotated or part.qk_norm
            product = e * (q + 2 * k) if not part.qk_norm and (rotated or copied) else 0.0
            attention = replace(attention, joined=e * q)
            operations[0] = replace(operations[0], cached=product)
            operations[-1] = replace(
                operations[-1], cached=operations[-1].cached + (e * k if apart else 0.0)
            )
        matrix = self._bytes.matrix
        copy = matrix.element_bytes * q if matrix.keeps_copies else 0.0
        return [*operations, attention, self._out_of("projection", e * q + copy, part.rows)]

    def _latent_attention(self, part: LatentAttention) -> list[Operation]:
        """The same of multi-latent attention: products down, norms, products up with the rotation,
        attention.

        Over CP ranks latents are kept, and keys and values of all tokens made anew. A slice's
        buffer has values as wide as keys.
        """
        p, e, sizes = self.parallelism, self._bytes.attention.element_bytes, part.latent
        heads, shards = part.num_attention_heads / p.tp_size, p.sequence_shards
        query, value = heads * sizes.key_dim, heads * sizes.v_head_dim
        up = heads * (sizes.qk_head_dim + sizes.v_head_dim)
        low, joint = (sizes.q_lora_rank or 0) / shards, sizes.numbers / shards
        normed = (sizes.q_lora_rank or 0) + sizes.kv_lora_rank
        # Of queries that are projected at once the products are no latents, and not kept.
        down = self._into("down", e * (low + joint), part.columns, bias=False)
        # Column-parallel products are of all tokens, on each rank, before they are spread.
        whole = e * (shards - 1) * (low + joint)
        operations = [replace(down, forward=down.forward + whole, backward=down.backward + whole)]
        if part.qk_norm:
            rows = (1 + (sizes.q_lora_rank is not None)) / shards
            norm = self._norm("latent norm", normed / shards, num_rows=rows)
            operations.append(with_more(norm, saved=e * normed / shards, backward=self._hidden))
        divided = p.cp_size > 1
        made = 0.0 if divided else e * (query + value)
        operations.append(
            Operation(
                "up",
                e * query + made + e * joint,
                forward=e * (query + (0.0 if divided else up)),
                backward=self._hidden + 2 * e * query + made + (0.0 if divided else e * up),
                weight_bytes=self.element_bytes * part.inner_weights // p.tp_size,
            )
        )
        kept = FP32 * heads
        workspace, prefix = self._workspace(part, 1) or (e * (2 * query + value), 0.0)
        gradients = self._hidden + e * (value + query)
        if divided:
            attention = self._exchanged_latents(part, kept, gradients)
        elif self.recompute.granularity == "selective":
            again = gradients + e * (query + value) + workspace + kept + e * value
            attention = Operation("attention", forward=kept, backward=again)
        else:
            backward = gradients + e * (query + value) + workspace
            attention = Operation("attention", kept, backward=backward)
        keys, totals = 2 * e * query, 2 * FP32 * query
        attention = replace(attention, keys=keys, gradients=totals, prefix=prefix)
        if self.recompute.granularity != "selective":
            attention = replace(attention, joined=e * value)
            operations[-1] = replace(operations[-1], cached=made)
        matrix = self._bytes.matrix
        copy = matrix.element_bytes * value if matrix.keeps_copies else 0.0
        return [*operations, attention, self._out_of("projection", e * value + copy, part.rows)]

    def _exchanged_latents(self, part: LatentAttention, kept: float, gradients: float) -> Operation:
        """As :meth:`_context_attention`: what is made of all ranks' latents is the most."""
        p, e, sizes = self.parallelism, self._bytes.attention.element_bytes, part.latent
        heads, num_keys = part.num_attention_heads / p.tp_size, p.cp_size + 0.5
        key, value = e * heads * sizes.key_dim, e * heads * sizes.v_head_dim
        row = 2 * key  # with values as wide as keys
        product = e * heads * (sizes.qk_head_dim + sizes.v_head_dim)
        # The product, keys and values of it, values widened, and both in one.
        making = p.cp_size * (product + key + value + key + row)
        copy = num_keys * row
        gathering = max(making, p.cp_size * row + copy)
        sums = p.cp_size * row * (max(e, FP32) / e if self.reduce_in_fp32 else 1.0)
        latents = p.cp_size * e * (sizes.numbers / p.sequence_shards + sizes.kv_lora_rank)
        workspace = self._workspace(part, num_keys)
        in_kernel = num_keys * (key + value) + (workspace[0] if workspace else copy)
        # The rows wait with their graph: for the kernel, for sums of its gradients, for their own.
        backward = gradients + p.cp_size * row + latents
        backward += max(copy + in_kernel, copy + num_keys * (key + value) + sums, sums + making)
        if self.recompute.granularity == "selective":
            forward, backward = max(gathering, copy + kept), kept + backward
            return Operation("attention", forward=forward, backward=backward)
        if self.keep_gathered:
            kept += copy + p.cp_size * row + latents
            return Operation("attention", kept, forward=gathering, backward=backward - copy)
        return Operation("attention", kept, forward=gathering, backward=backward)

    def _context_attention(self, part: Attention, kept: float, gradients: float) -> Operation:
        """Attention over CP ranks, in one head group.

        ``kept`` is what the kernel keeps beside keys and values, ``gradients`` are those of its
        output and queries. Keys are counted as of documents sharded per document, on the ranks
        that need most; the shardings that plans choose need no more.
        """
        cp_size, tp_size = self.parallelism.cp_size, self.parallelism.tp_size
        e = self._bytes.attention.element_bytes
        # Of a local token: there are CP times as many of all ranks.
        num_keys = cp_size + 0.5
        numbers = 2 * part.key_size / tp_size
        exchange = exchange_bytes(
            1,
            cp_size,
            num_keys,
            e * numbers,
            max(e, FP32) * numbers if self.reduce_in_fp32 else None,
        )
        gathering, copy = exchange.gathering, exchange.copy
        backward = gradients + exchange.gradients
        workspace = self._workspace(part, num_keys)
        if workspace is not None:
            in_kernel = 2 * copy + e * part.query_size / tp_size + workspace[0]
            backward = max(backward, gradients + in_kernel)
        else:
            # A chunk's gradients, and then all chunks' in one.
            backward = max(backward + e * part.query_size / tp_size, gradients + 3 * copy)
        if self.recompute.granularity == "selective":
            # The copy of the forward pass that is run again serves the backward pass.
            return Operation(
                "attention", forward=max(gathering, copy + kept), backward=kept + backward
            )
        if self.keep_gathered:
            return Operation(
                "attention", kept + copy, forward=gathering - copy, backward=backward - copy
            )
        return Operation("attention", kept, forward=max(gathering - kept, copy), backward=backward)

    def _experts(self, part: Experts) -> list[Operation]:
        """Lists the operations from the norm's output to the sum of what a token's experts give.

        A rank's experts get ``got`` tokens for each of the micro-batch: with experts divided by
        tensor parallelism also those of the ranks that have the other parts.
        """
        p, e, h = self.parallelism, self._elementwise, self.shape.hidden_size
        sent = part.topk / p.sequence_shards
        got = sent * self.expert_imbalance * p.expert_tp_size
        f, columns = part.expert_hidden_size / p.expert_tp_size, part.expert_columns
        columns_here = columns / p.expert_tp_size
        # Kernels of all experts at once have all their gradients; one by one, one.
        num = part.num_experts // p.ep_size if self._fused else 1
        weights = self.element_bytes * num * h // p.expert_tp_size
        matrix = self._bytes.matrix.element_bytes
        logits = FP32 * part.num_experts / p.sequence_shards
        copies, arrived = e * h * sent, e * h * got
        # The copies that are sent, those that have come, and these sorted by expert.
        moved = copies + (2 if part.num_experts > p.ep_size else 1) * arrived
        # Scores, the chosen ones, and where each copy went.
        routing = 2 * logits + (FP32 + INT64) * sent + part.num_experts / p.sequence_shards
        act = 2 * e * f * got if part.gated and not self._fused else 0.0
        return [
            Operation("router", routing, forward=logits, backward=self._hidden + 2 * logits),
            Operation(
                "dispatch",
                matrix * h * got,
                forward=max(0.0, moved - matrix * h * got),
                backward=self._hidden + moved,
            ),
            Operation(
                "expert fc1",
                e * columns_here * got,
                forward=self._quantised(h) * got,
                backward=self._hidden
                + (e * columns_here + e * h) * got
                + (self._quantised(h) + self._quantised(columns_here)) * got,
                weight_bytes=weights * columns,
            ),
            Operation(
                "expert activation",
                act + FP32 * got,
                backward=self._hidden + e * (columns_here + f) * got,
            ),
            Operation(
                "expert fc2",
                matrix * f * got,
                forward=arrived + self._quantised(f) * got,
                backward=self._hidden + arrived + e * f * got + self._quantised(h) * got,
                weight_bytes=weights * part.expert_hidden_size,
            ),
            Operation("combine", forward=moved, backward=self._hidden + moved),
        ]

    def _mlp(self, part: FeedForward | Experts) -> list[Operation]:
        """Lists the operations from the norm's output to the second product."""
        tp_size, e = self.parallelism.tp_size, self._elementwise
        f, columns = part.rows / tp_size, part.columns / tp_size
        return [
            self._into("fc1", e * columns, part.columns, bias=self.shape.linear_bias),
            Operation(
                "activation",
                # Torch keeps SiLU's output and its factor.
                2 * e * f if part.gated and not self._fused else 0.0,
                backward=self._hidden + e * (columns + f),
            ),
            self._out_of("fc2", self._bytes.matrix.element_bytes * f, part.rows),
        ]

    def _predictors(self) -> list[Operation]:
        """Layers that predict further ahead, and their LM heads: Megatron's runs last."""
        num_ahead = self.shape.num_ahead
        if not num_ahead:
            return []
        # All depths' hidden states are copied into one tensor for the LM heads. Where these are
        # done in backward, its gradient takes as much until all the layers are.
        operations = [Operation("depths", (1 + num_ahead) * self._hidden)]
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
        norms = self._norm("joined norms", 2 * self._residual_numbers, num_rows=rows)
        matrix_bytes = self._bytes.matrix.element_bytes
        hidden = self.shape.hidden_size
        inner = (
            with_more(
                norms, saved=2 * matrix_bytes * self._residual_numbers, backward=2 * self._hidden
            ),
            Operation(
                "joining",
                self._hidden,
                forward=2 * self._collective + self._gathered,
                backward=2 * (self._gathered + self._collective) + self._hidden,
                weight_bytes=self._weight(2 * hidden, hidden),
            ),
            *self._layers(((1, layer),), keep_output=True),
        )
        if not self.recompute.of_predictors:
            return (self._embedding(), *inner)
        buffers = (sum(o.keys for o in inner), sum(o.gradients for o in inner))
        recomputed = Operation("recomputed", self._hidden, 0.0, 0.0, 0, inner, 0.0, *buffers)
        return (self._embedding(), recomputed)

    def _head(self) -> list[Operation]:
        shape, p, e = self.shape, self.parallelism, self.element_bytes
        logits = shape.vocab_size / p.tp_size
        norm = self._norm("final norm", self._residual_numbers, num_rows=1 / p.sequence_shards)
        return [
            with_more(norm, saved=self._hidden),
            Operation(
                "output layer",
                forward=self._collective + e * logits,
                backward=e * logits + self._gathered + self._collective,
                weight_bytes=self._weight(shape.vocab_size, shape.hidden_size),
            ),
            # Its softmax is fp32 and takes the place of fp32 logits; of bf16 ones it is a copy.
            Operation(
                "cross entropy",
                FP32 * logits + 2 * INT64,  # the softmax; labels and mask
                forward=0.0 if e == FP32 else e * logits,
                backward=0.0 if e == FP32 else e * logits,
            ),
        ]
