"""A loss of the user's own in place of cross-entropy, in every kind of layout.

Loss, every gradient and the weights after several steps equal one process that runs each document
alone and calls the function on all of its tokens; and faults that must not pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from helpers.layouts import SHARDED, WORKLOAD, Differences, Layout, further
from helpers.ranks import scatter_for, sliced_for

TWO = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.7"


def clipped(log_probs: Any, samples: Any, positions: Any) -> Any:
    """GRPO's: a clipped ratio to log-probabilities of before, by an advantage, and a KL term.

    What stood before, and advantages, are made up from a token's document and place.
    """
    import torch

    before = -4 + 0.3 * torch.sin(samples * 7.0 + positions * positions)
    advantages = torch.cos(samples * 5.0)
    ratio = (log_probs - before).exp()
    gained = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.25) * advantages)
    return 3 - gained + 0.1 * (before - log_probs + ratio - 1)  # sums of 3 do not cancel


OWN = dataclasses.replace(WORKLOAD.masked(seed=5), loss=clipped)
CASES = [
    (Layout("mixed", 4, dp=2, extra=f"{TWO} {SHARDED}"), scatter_for),
    (Layout("llama", 4, pp=2, vpp=2, cp=2, sharding="per-document"), scatter_for),
    (Layout("moe-seq", 3, pp=2, tp="2sp"), scatter_for),
    (Layout("mixed", 3, pp=2, extra=TWO), sliced_for),
    (Layout("llama", 3, dp=2, cp=2), sliced_for),
    further(Layout("moe-aux", 4, pp=2, vpp=2), sliced_for),
]


@pytest.mark.parametrize(
    ("case", "plan_for"), CASES, ids=lambda given: getattr(given, "__name__", str(given))
)
def test_a_loss_of_ones_own_is_what_one_process_computes(
    wrong: Differences, case: Layout, plan_for
) -> None:
    assert wrong(case, plan_for=plan_for, workload=OWN) == []


@contextlib.contextmanager
def changed(runner, **shift) -> Iterator[None]:
    from megatron_wlb.runtime.stepping import losses

    class Changed(losses.TargetTokens):
        def __init__(self, documents, owners, samples, positions, *rest):
            positions, samples = positions + shift.get("place", 0), samples + shift.get("sample", 0)
            super().__init__(documents, owners, samples, positions, *rest)

    with mock.patch.object(losses, "TargetTokens", Changed):
        yield


def a_place_further(runner) -> Any:
    return changed(runner, place=1)


def of_another_sample(runner) -> Any:
    return changed(runner, sample=1)


@contextlib.contextmanager
def cross_entropy(runner) -> Iterator[None]:
    with mock.patch.object(runner.batches, "loss", None):
        yield


@pytest.mark.parametrize("fault", [a_place_further, of_another_sample, cross_entropy])
def test_fault_in_a_loss_of_ones_own_differs_from_the_oracle(wrong: Differences, fault) -> None:
    found = wrong(Layout("llama", 3), fault, sliced_for, OWN)
    assert any(line.startswith("step 0: gradient of") for line in found)
