"""Peaks of a tape against a walk over its operations, where weights count and where they do not."""

from __future__ import annotations

import pytest

from megatron_wlb.cost.tape import Operation, Tape

INNER = (
    Operation("up", saved=3.0, forward=7.0, backward=5.0, weight_bytes=9000),
    Operation("down", saved=2.0, forward=1.0, backward=11.0),
)
TAPE = Tape.of(
    (
        Operation("embedding", saved=1.0, backward=2.0, weight_bytes=50_000),
        Operation("attention", saved=6.0, forward=4.0, backward=13.0),
        Operation("recomputed", saved=2.0, forward=3.0, backward=1.0, inner=INNER),
        Operation("head", saved=4.0, forward=20.0, backward=8.0, weight_bytes=2000),
    )
)


def walked(tape: Tape, num_tokens: int) -> tuple[float, float]:
    """The most of a forward and of a backward."""
    kept, forward = 0.0, [0.0]
    for one in tape.operations:
        working = max((o.forward + o.saved for o in one.inner), default=one.forward)
        kept += one.saved * num_tokens
        forward.append(kept + working * num_tokens)
    backward = [kept]
    for one in reversed(tape.operations):
        again = max(walked(Tape.of(one.inner), num_tokens)) if one.inner else 0.0
        backward.append(kept + one.backward * num_tokens + one.weight_bytes + again)
        kept -= one.saved * num_tokens
    return max(forward), max(backward)


@pytest.mark.parametrize("tape", [TAPE, Tape.of(INNER), Tape.of(())])
def test_peaks_are_those_of_a_walk(tape: Tape) -> None:
    sizes = [0, 1, 100, 1000, 3000, 10_000, 1_000_000]
    for backward, most in enumerate(zip(*(walked(tape, size) for size in sizes), strict=True)):
        assert tape.peak_bytes(sizes, backward=backward > 0).tolist() == [*most]
