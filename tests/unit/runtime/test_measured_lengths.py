"""Lengths in FP8, where a model of Megatron's says what it runs in."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.enums import Fp8Recipe

from megatron_wlb.cost.fp8 import row_multiple
from megatron_wlb.errors import ConfigError
from megatron_wlb.runtime.measuring import measure
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


def test_times_that_do_not_grow_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process on the machine disturbed them; but not for ever."""
    flat = [(9.0 - n, 9.0 - n) for n in range(8)]
    grows = [(2.0 + n, 3.0 + n) for n in range(8)]
    measured = [flat, grows]
    model: Any = SimpleNamespace(config=SimpleNamespace(num_layers=1))
    for name, stand_in in {
        "_multiple": lambda _: 1,
        "_undisturbed": lambda _: contextlib.nullcontext(),
        "run_passes": lambda *_: None,
        "_least_us": lambda _, lengths, run: measured.pop(0)[: len(lengths)],
        "from_first_rank": lambda make: make(),
        "layer_reach": lambda *_: None,
        "model_reach": lambda _: None,
    }.items():
        monkeypatch.setattr(measure, name, stand_in)
    assert measure.measured_cost(model, 128, 8).document_us(64) > 0 and not measured
    measured += [flat] * measure.NUM_TURNS
    with pytest.raises(ConfigError, match="do not grow"):
        measure.measured_cost(model, 128, 8)
    assert not measured
