"""What adapters of other trainers share: plans whose micro-batches all have a sample."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_wlb.api import plan_batch
from megatron_wlb.cost import DocumentCost, Parallelism
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import StepPlan

FLOPS_A_US = 4e8
"""What a device does in a µs; only ratios of times matter."""
TOKENS = 1024


def cost_of_flops(short_flops: float, long_flops: float) -> DocumentCost:
    """``linear · n + quadratic · n²`` from the forward FLOPs of samples of ``TOKENS`` and of twice
    as many. A backward takes twice the time.
    """
    short, long = short_flops / FLOPS_A_US, long_flops / FLOPS_A_US
    quadratic = max(0.0, long - 2 * short) / (2 * TOKENS**2)
    linear = short / TOKENS - quadratic * TOKENS
    return DocumentCost(linear, quadratic, 2 * linear, 2 * quadratic)


def filled_plan(
    lengths: Sequence[int],
    max_tokens: int,
    layout: Parallelism,
    cost: DocumentCost,
    *,
    most_samples: int | None = None,
) -> StepPlan:
    """Plans a step of whole samples with as many micro-batches on each rank, none empty.

    A sample above ``max_tokens`` fills a micro-batch, so that it is alone there. With
    ``most_samples`` no micro-batch has more of them.

    Raises :class:`ConfigError` where a rank has fewer samples than micro-batches, or where none of
    the numbers of micro-batches that were tried leaves at most ``most_samples`` in each.
    """
    clipped = [min(length, max_tokens) for length in lengths]
    group = (layout.group_size or layout.pp_size) if layout.vpp_size > 1 else 1

    def plan(number: int | None) -> StepPlan:
        return plan_batch(
            clipped, max_tokens=max_tokens, layout=layout, cost=cost, num_micro_batches=number
        )

    found = plan(None)
    number = len(found.micro_batches[0])

    def crowded() -> bool:
        return most_samples is not None and max(len(m.samples) for m in found) > most_samples

    while crowded() and number * layout.dp_size < len(lengths):
        # By a sixteenth each time: few tries, and few more micro-batches than are needed.
        number = -(-(number + max(1, number // 16)) // group) * group
        found = plan(number)
    while not all(m.samples for m in found) and number > group:
        number -= group
        found = plan(number)
    if crowded():
        raise ConfigError(
            f"{len(lengths)} samples on {layout.dp_size} data-parallel ranks do not fit "
            f"micro-batches of at most {most_samples} samples; raise that or give a step fewer"
        )
    if not all(m.samples for m in found):
        raise ConfigError(
            f"{len(lengths)} samples are too few for micro-batches of at most {max_tokens} tokens "
            f"on each of {layout.dp_size} data-parallel ranks; give a step more of them"
        )
    return found
