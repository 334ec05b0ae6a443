"""Lengths in FP8, where a model of Megatron's says what it runs in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.enums import Fp8Recipe

from megatron_wlb.cost.fp8 import row_multiple
from megatron_wlb.runtime.measuring.measure import _multiple


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_rows_are_at_least_what_megatron_pads_to(recipe: str) -> None:
    from megatron.core.fp8_utils import get_fp8_align_size

    for spread in (False, True):
        assert row_multiple(recipe, spread=spread) % get_fp8_align_size(Fp8Recipe[recipe]) == 0


def test_lengths_to_measure_are_whole_rows() -> None:
    one, two = (SimpleNamespace(size=lambda n=n: n) for n in (1, 2))
    for fp8, recipe, multiple in (
        (None, Fp8Recipe.delayed, 2),
        ("e4m3", Fp8Recipe.delayed, 2 * 16),
        ("hybrid", "blockwise", 2 * 128),
    ):
        config = SimpleNamespace(sequence_parallel=True, fp8=fp8, fp8_recipe=recipe)
        model: Any = SimpleNamespace(groups=SimpleNamespace(tp=two, cp=one), config=config)
        assert _multiple(model) == multiple
