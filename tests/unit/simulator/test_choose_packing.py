"""What ``--wlb-packing auto`` takes is what simulated steps say."""

from __future__ import annotations

import logging

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_words import settings_of
from megatron_wlb.settings.config import Config
from megatron_wlb.simulator.choose import CANDIDATES, choose_packing, settled, with_packing
from megatron_wlb.simulator.forecast import forecast

ARGUMENTS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --swiglu --bf16 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --seq-length 32768 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel "
    "--use-distributed-optimizer --global-batch-size 8 --micro-batch-size 1 --lr 1e-4 "
    "--wlb-packing auto --wlb-max-tokens 49152 --wlb-hardware h100-sxm"
)
NUM_DEVICES = 32


def settings(*flags: str) -> Config:
    return settings_of([*ARGUMENTS.split(), *flags])


def test_the_fastest_is_taken() -> None:
    choice = choose_packing(settings(), NUM_DEVICES)
    assert choice.packing == "slim" and not choice.refused
    for name in CANDIDATES:
        alone = forecast(with_packing(settings(), name), NUM_DEVICES)
        assert choice.gains[name] == pytest.approx(alone.speedup, rel=1e-12)
        if name == choice.packing:
            assert choice.net_gain == pytest.approx(alone.net_speedup, rel=1e-12)
    assert choice.gains["original"] == 1 < choice.gains["hold"] < choice.gains["slim"]


def test_what_cannot_run_is_left_out_and_named() -> None:
    no_slim = choose_packing(settings(), NUM_DEVICES, lambda name: ["--y: no"] * (name == "slim"))
    assert no_slim.packing == "hold" and [*no_slim.refused] == ["slim"]
    assert "not slim: --y: no" in str(no_slim)
    virtual = settings("--num-virtual-stages-per-pipeline-rank", "2")
    choice = choose_packing(virtual, NUM_DEVICES)
    assert choice.packing == "slim" and not choice.refused
    script = choose_packing(settings(), NUM_DEVICES, lambda name: ["--x: no"] * (name != "hold"))
    assert script.packing == "hold" and script.refused == {"original": "--x: no", "slim": "--x: no"}
    assert "original" not in script.gains and script.net_gain < script.gains["hold"]


def test_the_plainest_is_taken_where_nothing_is_gained() -> None:
    alone = settings(
        "--pipeline-model-parallel-size", "1", "--seq-length", "2048", "--global-batch-size", "1",
    )  # fmt: skip
    choice = choose_packing(alone, 8)
    assert choice.packing == "original"
    assert max(choice.gains.values()) < 1.05


def test_nothing_that_runs_is_refused_as_original_is() -> None:
    with pytest.raises(ConfigError, match="33 processes were started"):
        choose_packing(settings(), 33)


def test_settled_tells_and_leaves_what_is_given(caplog: pytest.LogCaptureFixture) -> None:
    given = with_packing(settings(), "hold")
    assert settled(given, NUM_DEVICES) is given
    with caplog.at_level(logging.INFO):
        chosen = settled(settings(), NUM_DEVICES)
    assert chosen == with_packing(settings(), "slim")
    assert "--wlb-packing auto takes slim: work a second (simulated) original 1.00x" in caplog.text


def test_stock_that_is_faster_is_told() -> None:
    """One micro-batch without a pipeline: TP collectives are all that could be gained."""
    told: list[str] = []
    alone = settings("--pipeline-model-parallel-size", "1", "--global-batch-size", "1")
    settled(alone, 8, tell=told.append)
    assert len(told) == 2 and "stock Megatron" in told[1] and "times as fast" in told[1]
