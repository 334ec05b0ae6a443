"""Self-attention: its sizes, weights, exchange and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_wlb.cost.exchange import default_head_groups, exchange_bytes
from megatron_wlb.cost.layers import Divided, Part, check_sizes
from megatron_wlb.cost.tape import Operation, with_more
from megatron_wlb.cost.workspace import FP32, WORKSPACES, Workspace
from megatron_wlb.errors import ConfigError

if TYPE_CHECKING:
    from megatron_wlb.cost.blocks import Blocks
    from megatron_wlb.cost.execution import Executed
    from megatron_wlb.cost.shape import Parallelism


@dataclass(frozen=True, slots=True)
class Attention(Part):
    """Self-attention. Raises :class:`ConfigError` for heads that groups do not divide."""

    num_attention_heads: int
    num_query_groups: int
    """Key/value heads; equal to ``num_attention_heads`` without grouped-query attention."""
    kv_channels: int
    """Dimension of one head."""
    qkv_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    rotary_percent: float = 1.0
    reach_tokens: int | None = None
    """The most keys that a query sees, its own the last, with a sliding window; None: all of its
    document up to its own."""

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"model shape: {self.num_attention_heads} attention heads do not divide into "
                f"{self.num_query_groups} query groups; give a divisor"
            )

    @property
    def query_size(self) -> int:
        """Numbers of a token's query, all heads."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_size(self) -> int:
        """Numbers of a token's key, and of its value."""
        return self.num_query_groups * self.kv_channels

    @property
    def columns(self) -> int:
        return (2 if self.output_gate else 1) * self.query_size + 2 * self.key_size

    @property
    def rows(self) -> int:
        return self.query_size

    @property
    def elementwise_numbers(self) -> int:
        """Read and written a token: q, k, v taken out of one tensor, rotated, normalised."""
        times = (self.rotary_percent > 0) + self.qk_norm
        gated = 2 * self.query_size if self.output_gate else 0
        return 2 * self.columns + times * 2 * (self.query_size + self.key_size) + gated

    def divided(self, p: Parallelism) -> Divided:
        yield "num_attention_heads", self.num_attention_heads, "TP", p.tp_size
        yield "num_query_groups", self.num_query_groups, "TP", p.tp_size

    def parameters(self, on: Executed) -> int:
        norms = 2 * self.kv_channels * on.shape.norm_vectors if self.qk_norm else 0
        return self.matrix_parameters(on, bias=on.shape.linear_bias or self.qkv_bias) + norms

    def sent_numbers(self, p: Parallelism) -> float:
        return 2 * self.key_size / p.tp_size

    def copied_numbers(self, p: Parallelism) -> float:
        return 4 * self.key_size / p.tp_size

    def head_groups(self, tp_size: int, asked: int | None) -> int:
        return asked or default_head_groups(self.num_query_groups // tp_size or 1)

    def operations(self, on: Blocks) -> list[Operation]:
        """Lists the operations from the norm's output to the projection."""
        tp_size, e = on.parallelism.tp_size, on.bytes.attention.element_bytes
        q, k = self.query_size / tp_size, self.key_size / tp_size
        heads, groups = self.num_attention_heads / tp_size, self.num_query_groups / tp_size
        bias = on.shape.linear_bias or self.qkv_bias
        # V stays a view of the product, and so keeps all of it.
        taken = e * self.columns / tp_size
        operations = [on.into("qkv", taken, self.columns, bias=bias)]

        rotary = self.kv_channels * self.rotary_percent
        rotated = rotary > 0
        # Queries of several heads a group are copied out; somebody may keep the copy.
        copied = e * q if heads != groups and not on.fused else 0.0
        if self.qk_norm:
            norm = on.norm("qk norm", q + k, num_rows=heads + groups)
            kept_input = copied if on.keeps_residual else 0.0
            kept_output = 0.0 if rotated else e * (q + k)
            operations.append(
                with_more(norm, saved=kept_input + kept_output, backward=on.hidden + e * k)
            )
        if rotated:
            tables = 0.0 if on.fused else 4 * e * rotary  # cos and sin, for q and for k
            operations.append(
                Operation(
                    "rotary",
                    e * (q + k) + tables,
                    forward=2 * e * q + FP32 * rotary,
                    backward=on.hidden + 4 * e * q + 2 * e * k,
                )
            )
        elif not self.qk_norm:
            operations.append(Operation("query", copied))

        # Of its output and log-sum-exp the first is the projection's input.
        kept = FP32 * heads
        # Gradients of the output, of q, k, v, and of one document's again or what the kernel needs.
        workspace, prefix = self._workspace(on, 1) or (e * (q + 2 * k), 0.0)
        gradients = on.hidden + e * q + e * (q + 2 * k) + workspace
        if on.parallelism.cp_size > 1:
            attention = self._exchanged(on, kept, on.hidden + e * q)
        elif on.recompute.granularity == "selective":
            attention = Operation("attention", forward=kept, backward=gradients + kept + e * q)
        else:
            attention = Operation("attention", kept, backward=gradients)
        attention = replace(attention, keys=2 * e * k, gradients=2 * FP32 * k, prefix=prefix)
        if on.recompute.granularity != "selective":  # which keeps what attention is given
            # Keys of their own, and the product of which neither queries nor a gate is a view.
            apart = rotated or self.qk_norm
            viewed = self.qk_norm or self.output_gate or not (rotated or copied)
            product = 0.0 if viewed else taken
            attention = replace(attention, joined=e * q)
            operations[0] = replace(operations[0], cached=product)
            operations[-1] = replace(
                operations[-1], cached=operations[-1].cached + (e * k if apart else 0.0)
            )
        matrix = on.bytes.matrix
        copy = matrix.element_bytes * q if matrix.keeps_copies else 0.0
        return [
            *operations,
            attention,
            *self._gate(on, q),
            on.out_of("projection", e * q + copy, self.rows),
        ]

    def _gate(self, on: Blocks, q: float) -> list[Operation]:
        """The product of attention's output, which is kept, and the sigmoid of the gate."""
        if not self.output_gate:
            return []
        e, fp32 = on.bytes.attention.element_bytes, FP32 * q
        kept = e * q + (0.0 if on.fused else fp32)
        return [Operation("gate", kept, forward=fp32, backward=on.hidden + e * q + 2 * fp32)]

    def _exchanged(self, on: Blocks, kept: float, gradients: float) -> Operation:
        """Attention over CP ranks, in one head group.

        ``kept`` is what the kernel keeps beside keys and values, ``gradients`` are those of its
        output and queries. Keys are counted as of documents sharded per document, on the ranks
        that need most; the shardings that plans choose need no more.
        """
        cp_size, tp_size = on.parallelism.cp_size, on.parallelism.tp_size
        e = on.bytes.attention.element_bytes
        # Of a local token: there are CP times as many of all ranks.
        num_keys = cp_size + 0.5
        numbers = 2 * self.key_size / tp_size
        exchange = exchange_bytes(
            1,
            cp_size,
            num_keys,
            e * numbers,
            max(e, FP32) * numbers if on.execution.reduce_in_fp32 else None,
        )
        gathering, copy = exchange.gathering, exchange.copy
        backward = gradients + exchange.gradients
        workspace = self._workspace(on, num_keys)
        if workspace is not None:
            in_kernel = 2 * copy + e * self.query_size / tp_size + workspace[0]
            backward = max(backward, gradients + in_kernel)
        else:
            # A chunk's gradients, and then all chunks' in one.
            backward = max(backward + e * self.query_size / tp_size, gradients + 3 * copy)
        if on.recompute.granularity == "selective":
            # The copy of the forward pass that is run again serves the backward pass.
            return Operation(
                "attention", forward=max(gathering, copy + kept), backward=kept + backward
            )
        if on.execution.keep_gathered:
            return Operation(
                "attention", kept + copy, forward=gathering - copy, backward=backward - copy
            )
        return Operation("attention", kept, forward=max(gathering - kept, copy), backward=backward)

    def _workspace(self, on: Blocks, num_keys: float) -> tuple[float, float] | None:
        """Bytes in which the kernel's backward works: by local token with so many keys, and by key.

        None for kernels that run document by document.
        """
        if on.execution.attention_kernel is not None:
            names = [name for name in WORKSPACES if name == on.execution.attention_kernel]
        else:
            names = list(WORKSPACES) if on.fused else []
        # On each context-parallel rank a document may have two chunks.
        cp_size, tp_size = on.parallelism.cp_size, on.parallelism.tp_size
        chunks = (2 * cp_size if cp_size > 1 else 1) / on.execution.document_tokens
        heads, groups = self.num_attention_heads / tp_size, self.num_query_groups / tp_size
        sizes = heads, groups, self.kv_channels, on.bytes.attention.element_bytes

        def total(space: Workspace) -> float:
            return space.total(1, num_keys, chunks)

        most = max((WORKSPACES[name](*sizes) for name in names), key=total, default=None)
        return None if most is None else (total(most), most.key_bytes + most.key_row_bytes)
