"""What a forecast says of slices is what training does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning import run
from megatron_wlb.planning.from_words import settings_of
from megatron_wlb.simulator.forecast import forecast

ARGUMENTS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --swiglu --bf16 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --seq-length 32768 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer --global-batch-size 4 --micro-batch-size 1 --lr 1e-4 "
    "--wlb-packing slim --wlb-hardware h100-sxm"
)


def forecast_with(*flags: str) -> SimpleNamespace:
    return SimpleNamespace(**forecast(settings_of([*ARGUMENTS.split(), *flags]), 16))


def test_forecast_counts_the_units_that_training_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others where the device has less room, whether that is said or not; or it recomputes."""
    monkeypatch.setattr(run, "MEMORY_SHARE", 2.0)
    free = forecast_with("--wlb-recompute", "off")
    limit_gib = free.most_gib - 0.1
    said = forecast_with("--wlb-recompute", "off", "--wlb-memory-gib", f"{limit_gib}")
    monkeypatch.setattr(run, "MEMORY_SHARE", 2.0 * limit_gib / free.limit_gib)
    limited = forecast_with("--wlb-recompute", "off")
    assert limited.units == said.units != free.units
    assert limited.most_gib <= limit_gib
    assert forecast_with().most_gib <= limit_gib
    monkeypatch.setattr(run, "MEMORY_SHARE", 0.2 * limit_gib / free.limit_gib)
    with pytest.raises(ConfigError, match=r"of 32768 tokens need .* above the .* GiB that tens"):
        forecast_with()
