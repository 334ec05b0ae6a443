"""Multi-latent attention: keys and values of all heads come of one latent of a token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_wlb.cost.layers import check_sizes
from megatron_wlb.cost.parts.attention import Attention
from megatron_wlb.cost.tape import Operation, with_more
from megatron_wlb.cost.workspace import FP32
from megatron_wlb.errors import ConfigError

if TYPE_CHECKING:
    from megatron_wlb.cost.blocks import Blocks
    from megatron_wlb.cost.execution import Executed
    from megatron_wlb.cost.shape import Parallelism


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-latent attention, which Megatron calls so. Raises :class:`ConfigError` for
    values that are wider than keys.
    """

    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    """None: queries are projected at once."""

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.v_head_dim > self.key_dim:
            raise ConfigError(
                f"model shape: v_head_dim {self.v_head_dim} is above a key's "
                f"{self.key_dim} (qk_head_dim + qk_pos_emb_head_dim); give at most that"
            )

    @property
    def key_dim(self) -> int:
        """Numbers of a query's head and of a key's."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def numbers(self) -> int:
        """A token's latent and the key that heads share: what CP ranks exchange."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Attention):
    """Multi-latent attention, of as many key/value heads as query heads. ``kv_channels`` is
    :attr:`Latent.key_dim`; norms are the latents'.
    """

    latent: Latent

    @property
    def query_size(self) -> int:
        """Numbers of a token's query and value in the mean, all heads: FLOPs go by them."""
        return self.num_attention_heads * (self.latent.key_dim + self.latent.v_head_dim) // 2

    @property
    def key_size(self) -> int:
        """Numbers of a token's key and value in the mean."""
        return self.query_size

    @property
    def columns(self) -> int:
        """What the hidden state is projected down to; without a rank, whole queries."""
        queries = self.latent.q_lora_rank or self.num_attention_heads * self.latent.key_dim
        return queries + self.latent.numbers

    @property
    def rows(self) -> int:
        return self.num_attention_heads * self.latent.v_head_dim

    @property
    def up_weights(self) -> int:
        """Weights that project latents up to keys and values."""
        heads = self.num_attention_heads * (self.latent.qk_head_dim + self.latent.v_head_dim)
        return self.latent.kv_lora_rank * heads

    @property
    def inner_weights(self) -> int:
        """All weights that neither take nor give the hidden state."""
        queries = self.num_attention_heads * self.latent.key_dim
        return (self.latent.q_lora_rank or 0) * queries + self.up_weights

    @property
    def elementwise_numbers(self) -> int:
        """Read and written a token: queries and keys put together, values copied, latents
        normalised.
        """
        heads = self.num_attention_heads * (2 * self.latent.key_dim + self.latent.v_head_dim)
        return 2 * (heads + self.latent.numbers + (self.latent.q_lora_rank or 0))

    def parameters(self, on: Executed) -> int:
        """The last product alone has a bias."""
        h, tp_size, low = on.shape.hidden_size, on.parallelism.tp_size, self.latent.q_lora_rank or 0
        total = (h * (self.columns + self.rows) + self.inner_weights) // tp_size
        if on.execution.kernels == "fused":  # whose layers have whole down projections on each rank
            down = h * (low + self.latent.numbers)
            total += down - down // tp_size
        norms = low + self.latent.kv_lora_rank if self.qk_norm else 0
        return total + on.shape.norm_vectors * norms + (h if on.shape.linear_bias else 0)

    def sent_numbers(self, p: Parallelism) -> float:
        return self.latent.numbers / p.sequence_shards

    def copied_numbers(self, p: Parallelism) -> float:
        """Keys and values are made of latents before."""
        return 8 * self.key_size / p.tp_size

    def head_groups(self, tp_size: int, asked: int | None) -> int:
        return 1

    def operations(self, on: Blocks) -> list[Operation]:
        """The same of multi-latent attention: products down, norms, products up with the rotation,
        attention.

        Over CP ranks latents are kept, and keys and values of all tokens made anew. A slice's
        buffer has values as wide as keys.
        """
        p, e, sizes = on.parallelism, on.bytes.attention.element_bytes, self.latent
        heads, shards = self.num_attention_heads / p.tp_size, p.sequence_shards
        query, value = heads * sizes.key_dim, heads * sizes.v_head_dim
        up = heads * (sizes.qk_head_dim + sizes.v_head_dim)
        low, joint = (sizes.q_lora_rank or 0) / shards, sizes.numbers / shards
        normed = (sizes.q_lora_rank or 0) + sizes.kv_lora_rank
        # Of queries that are projected at once the products are no latents, and not kept.
        down = on.into("down", e * (low + joint), self.columns, bias=False)
        # Column-parallel products are of all tokens, on each rank, before they are spread.
        whole = e * (shards - 1) * (low + joint)
        operations = [replace(down, forward=down.forward + whole, backward=down.backward + whole)]
        if self.qk_norm:
            rows = (1 + (sizes.q_lora_rank is not None)) / shards
            norm = on.norm("latent norm", normed / shards, num_rows=rows)
            operations.append(with_more(norm, saved=e * normed / shards, backward=on.hidden))
        divided = p.cp_size > 1
        made = 0.0 if divided else e * (query + value)
        operations.append(
            Operation(
                "up",
                e * query + made + e * joint,
                forward=e * (query + (0.0 if divided else up)),
                backward=on.hidden + 2 * e * query + made + (0.0 if divided else e * up),
                weight_bytes=on.element_bytes * self.inner_weights // p.tp_size,
            )
        )
        kept = FP32 * heads
        workspace, prefix = self._workspace(on, 1) or (e * (2 * query + value), 0.0)
        gradients = on.hidden + e * (value + query)
        if divided:
            attention = self._exchanged(on, kept, gradients)
        elif on.recompute.granularity == "selective":
            again = gradients + e * (query + value) + workspace + kept + e * value
            attention = Operation("attention", forward=kept, backward=again)
        else:
            backward = gradients + e * (query + value) + workspace
            attention = Operation("attention", kept, backward=backward)
        keys, totals = 2 * e * query, 2 * FP32 * query
        attention = replace(attention, keys=keys, gradients=totals, prefix=prefix)
        if on.recompute.granularity != "selective":
            attention = replace(attention, joined=e * value)
            operations[-1] = replace(operations[-1], cached=made)
        matrix = on.bytes.matrix
        copy = matrix.element_bytes * value if matrix.keeps_copies else 0.0
        return [*operations, attention, on.out_of("projection", e * value + copy, self.rows)]

    def _exchanged(self, on: Blocks, kept: float, gradients: float) -> Operation:
        """As :meth:`Attention._exchanged`: what is made of all ranks' latents is the most."""
        p, e, sizes = on.parallelism, on.bytes.attention.element_bytes, self.latent
        heads, num_keys = self.num_attention_heads / p.tp_size, p.cp_size + 0.5
        key, value = e * heads * sizes.key_dim, e * heads * sizes.v_head_dim
        row = 2 * key  # with values as wide as keys
        product = e * heads * (sizes.qk_head_dim + sizes.v_head_dim)
        # The product, keys and values of it, values widened, and both in one.
        making = p.cp_size * (product + key + value + key + row)
        copy = num_keys * row
        gathering = max(making, p.cp_size * row + copy)
        sums = p.cp_size * row * (max(e, FP32) / e if on.execution.reduce_in_fp32 else 1.0)
        latents = p.cp_size * e * (sizes.numbers / p.sequence_shards + sizes.kv_lora_rank)
        workspace = self._workspace(on, num_keys)
        in_kernel = num_keys * (key + value) + (workspace[0] if workspace else copy)
        # The rows wait with their graph: for the kernel, for sums of its gradients, for their own.
        backward = gradients + p.cp_size * row + latents
        backward += max(copy + in_kernel, copy + num_keys * (key + value) + sums, sums + making)
        if on.recompute.granularity == "selective":
            forward, backward = max(gathering, copy + kept), kept + backward
            return Operation("attention", forward=forward, backward=backward)
        if on.execution.keep_gathered:
            kept += copy + p.cp_size * row + latents
            return Operation("attention", kept, forward=gathering, backward=backward - copy)
        return Operation("attention", kept, forward=gathering, backward=backward)
