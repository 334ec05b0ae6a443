"""What context-parallel attention exchanges: its head groups, and the bytes that it holds beside
its inputs and output.

One collective and one copy: no more is alive but, in backward, the gradients of the copy. Of a
kernel that makes no copies of its own, in one head group; with ``g`` of them each part is ``1/g``
of it, and the next group's collective is alive besides.
"""

from __future__ import annotations

from dataclasses import dataclass


def default_head_groups(num_key_heads: int) -> int:
    """How many groups a GPU's key/value heads are gathered in: one runs while the next arrives."""
    return 2 if num_key_heads % 2 == 0 else 1


@dataclass(frozen=True, slots=True)
class ExchangeBytes:
    """Bytes on one rank, of one layer, by what is alive one after another."""

    gathering: float
    """The most until the copy is made: what is sent and received, then that and the copy."""
    copy: float
    """The copy, in the order of the kernel; also what it keeps if the copy is kept."""
    gradients: float
    """The most in backward: the copy and its gradients, or these, their sums by row, and what is
    received of them."""


def exchange_bytes(
    num_local: float,
    num_rows: float,
    num_keys: float,
    kv_bytes: float,
    sum_bytes: float | None = None,
) -> ExchangeBytes:
    """Counts the bytes; ``tests/distributed/test_context.py`` finds it to the byte.

    Tokens of the rank (T/CP) and of all (T), keys of the kernel call (Tk), bytes of one's K and V.
    ``sum_bytes`` are those of their gradients, if these are summed in another dtype.
    """
    collective = (num_local + num_rows) * kv_bytes
    sums = (num_local + num_rows) * (sum_bytes or kv_bytes)
    copy = num_keys * kv_bytes
    gathering = max(collective, num_rows * kv_bytes + copy)
    return ExchangeBytes(gathering, copy, max(2 * copy, copy + sums))
