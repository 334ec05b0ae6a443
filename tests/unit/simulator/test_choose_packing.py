"""What ``--wlb-packing auto`` takes is what simulated steps say."""

from __future__ import annotations

import argparse
import logging

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_words import settings_of
from megatron_wlb.runtime.megatron_lm import refusals
from megatron_wlb.settings.config import Config
from megatron_wlb.settings.packings import CHOSEN
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
        assert choice.gains[name] == pytest.approx(alone["speedup"], rel=1e-12)
        if name == choice.packing:
            assert choice.net_gain == pytest.approx(alone["net_speedup"], rel=1e-12)
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


def test_what_cuts_nothing_is_taken_where_nothing_is_gained() -> None:
    alone = settings(
        "--pipeline-model-parallel-size", "1", "--seq-length", "2048", "--global-batch-size", "1",
    )  # fmt: skip
    choice = choose_packing(alone, 8)
    assert choice.packing == "hold"
    assert max(choice.gains.values()) < 1.02 * min(choice.gains.values())


def test_conversations_are_never_cut() -> None:
    """Not even where all else is slower."""
    alone = settings("--pipeline-model-parallel-size", "1")
    for sft, expected in ((False, "original"), (True, "slim")):
        given = argparse.Namespace(sft=sft)

        def refused(name: str, given: argparse.Namespace = given) -> list[str]:
            return ["--x: no"] if name == "hold" else [*refusals.of_choice(given, name)]

        choice = choose_packing(alone, 8, refused)
        assert choice.packing == expected
        assert choice.gains["slim"] < 0.98
        assert ("not original: its windows cut conversations (--sft)" in str(choice)) == sft


def test_s_max_is_what_fits_memory_unless_it_is_given() -> None:
    no_slim: list[str] = []
    wide = settings_of([*ARGUMENTS.split(), "--seq-length", "65536", "--wlb-max-tokens", "auto"])
    config = settled(wide, NUM_DEVICES, lambda name: ["no"] * (name == "slim"), no_slim.append)
    s_max = config.wlb.wlb_max_tokens
    assert config == with_packing(wide, "hold", s_max)
    assert s_max and 65536 < s_max < 2 * 65536
    assert f"S_max is {s_max} tokens, which fit memory" in no_slim[0]
    with pytest.raises(ConfigError, match=f"; {s_max} tokens fit"):
        forecast(with_packing(wide, "hold", s_max + 8), NUM_DEVICES)
    assert forecast(config, NUM_DEVICES)["max_tokens"] == s_max
    given = with_packing(wide, CHOSEN, s_max - 8)
    config = settled(given, NUM_DEVICES, lambda name: ["no"] * (name == "slim"))
    assert config.wlb.wlb_max_tokens == s_max - 8


def test_a_run_goes_on_with_its_checkpoints_packing_and_s_max() -> None:
    told: list[str] = []
    saved = {"wlb_packing": "wlb", "wlb_max_tokens": 40000}
    free = settings_of([*ARGUMENTS.split(), "--wlb-max-tokens", "auto"])
    for config, s_max in ((settings(), 49152), (free, 40000)):
        found = settled(config, NUM_DEVICES, tell=told.append, saved=lambda: saved)
        assert found == with_packing(config, "wlb", s_max)
        assert "goes on with the checkpoint's packing, wlb" in told[-1]
        assert str(s_max) in told[-1]
    named = with_packing(settings(), "hold")
    assert settled(named, NUM_DEVICES, saved=lambda: saved) is named
    # Of strategies, which have none.
    anew = settled(settings(), NUM_DEVICES, saved=lambda: saved | {"wlb_packing": CHOSEN})
    assert anew.wlb.wlb_packing == "slim"


def test_s_max_fits_memory_of_a_packing_that_is_named() -> None:
    """As its dry run says, but for a checkpoint's and one that is given."""
    told: list[str] = []
    wide = settings_of([*ARGUMENTS.split(), "--seq-length", "65536", "--wlb-max-tokens", "auto"])
    named = with_packing(wide, "hold")
    found = settled(named, NUM_DEVICES, tell=told.append)
    s_max = forecast(named, NUM_DEVICES)["max_tokens"]
    assert found == with_packing(named, "hold", s_max) and 65536 < s_max < 2 * 65536
    assert f"S_max is {s_max} tokens, which fit memory" in told[0]
    before = {"wlb_packing": "hold", "wlb_max_tokens": 70000}
    taken = settled(named, NUM_DEVICES, saved=lambda: before)
    assert taken.wlb.wlb_max_tokens == 70000
    for other in ("original", "slim"):
        assert settled(with_packing(wide, other), NUM_DEVICES).wlb.wlb_max_tokens is None
    roomy = settings_of([*ARGUMENTS.split(), "--wlb-packing", "hold", "--wlb-max-tokens", "auto"])
    assert settled(roomy, NUM_DEVICES) == roomy


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
