from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.index import write_index

from megatron_wlb.cli import inputs
from megatron_wlb.settings.command_line import parse
from megatron_wlb.study import tune as module

OPTIONS = "--window 65536 --steps 12"
REFERENCE = f"tune --distribution reference {OPTIONS}"


@pytest.fixture(autouse=True)
def quick(wlb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "WARM_UP_STEPS", 4)
    monkeypatch.setattr(module, "THRESHOLDS", (1 / 4, 1 / 2))
    monkeypatch.setattr(module, "DELAY_PRICES", (0.05, 0.4))
    monkeypatch.setattr(module, "TAUS", (1.0,))
    monkeypatch.setattr(module, "NUM_REFINED", 1)


def test_json_has_the_recommendation_and_what_it_was_judged_against(wlb) -> None:
    found = wlb.json(REFERENCE, "--max-delay 0.4")
    assert found["max_delay"] == 0.4
    best = found["recommended"]
    assert best["delay_mean"] <= 0.4 and best["flags"] == found["flags"]
    assert [row["packing"] for row in found["defaults"]] == ["wlb", "hold"]
    for row in found["defaults"]:
        assert row["delay_mean"] > 0.4 or round(row["speedup"], 3) <= round(best["speedup"], 3)
    assert [row["packing"] for row in found["baselines"]] == [
        "original", *["fixed-greedy"] * 2, "slim",
    ]  # fmt: skip
    assert len(found["tried"]) > len(found["frontier"]) > 1
    again = wlb.json(REFERENCE, "--max-delay 0.4")
    for result in (found, again):
        del result["recommended"]["ms_per_step"]  # Nothing else is measured.
    assert again["recommended"] == best


def test_last_line_is_what_the_training_command_takes(wlb) -> None:
    out, err = wlb(REFERENCE, "--packing wlb --max-delay 3")
    own = parse(out.splitlines()[-1].split()).wlb
    assert own.wlb_packing == "wlb" and own.wlb_max_tokens is not None
    assert own.wlb_max_tokens <= 131072
    assert all(line.startswith(("trying settings: ", "note: ")) for line in err.splitlines())
    out = " ".join(out.split())
    assert "recommended stands last" in out and "Gains are over original" in out
    assert "simulated" in out


def test_other_seeds_are_other_samples(wlb) -> None:
    first, second = (
        wlb.json(REFERENCE, "--packing hold --seed", seed)["baselines"][0] for seed in (1, 5)
    )
    assert first["imbalance_mean"] != second["imbalance_mean"]


def test_corpus_is_parted_and_too_small_a_one_is_said(wlb) -> None:
    lengths = np.random.default_rng(1).lognormal(7, 1.6, 900).astype(int).clip(1, 80000)
    write_index("corpus", lengths.tolist())
    out, err = wlb("tune corpus", OPTIONS, "--packing hold")
    assert "documents repeat, in another order each time" in err
    assert "longer than the window of 65,536 tokens and cut" in err
    assert "too few to part" not in err and "N 4, corpus" in " ".join(out.split())
    write_index("few", lengths[:20].tolist())
    err = wlb("tune few", OPTIONS, "--packing hold").err
    assert "20 documents are too few to part" in err


def test_plot_is_written_whole_and_alone(wlb) -> None:
    out = wlb(REFERENCE, "--packing hold --plot curve.png").out
    assert [path.name for path in Path().iterdir()] == ["curve.png"]
    assert Path("curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert out.endswith("picture: curve.png\n")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--max-delay -1", 2, "--max-delay is -1; give at least 0"),
        ("--packing original", 2, "original has nothing to tune; use wlb or hold"),
        ("--packing wlb --max-delay 0", 4, "no setting of wlb keeps the mean delay"),
        ("--steps 0", 2, "--steps is 0"),
        ("--num-micro-batches 0", 2, "--num-micro-batches is 0; give at least 1"),
        ("--num-micro-batches 4,8", 2, "--num-micro-batches has 4 and 8; wlb tune takes one"),
        ("--max-windows 0.9", 2, "--max-windows is 0.9; give at least 1"),
        ("--plot /proc/none/x.png", 2, "cannot write --plot /proc/none/x.png"),
        ("--look-ahead -1", 2, "--look-ahead is -1"),
    ],
)
def test_bad_input_is_one_line(words: str, status: int, message: str, wlb) -> None:
    assert wlb.refusal(REFERENCE, words, status=status).startswith(message)


def test_original_is_recommended_where_nothing_is_faster(wlb) -> None:
    # Documents of a window and more leave nothing to balance their pieces with.
    Path("long.txt").write_text("1724\n" * 40)
    tune = "tune --lengths long.txt --window 1024 --steps 8 --max-delay 0.5 --model 550m"
    tune += " --hardware h100-sxm"
    found, out = wlb.json(tune), wlb(tune).out
    assert found["flags"] == ["--wlb-packing", "original"]
    assert all(row["speedup"] < 1 for row in found["defaults"])
    limit = "a mean delay of 0.5 steps (--max-delay)"
    assert f"Nothing that was tried within {limit} is faster than original here" in out
    assert out.splitlines()[-1] == "--wlb-packing original"


def test_default_that_is_recommended_is_said_to_be_one(wlb, monkeypatch) -> None:
    monkeypatch.setattr(module, "DELAY_PRICES", (0.15,))
    monkeypatch.setattr(module, "NEIGHBOUR", 1.0)
    tune = f"{REFERENCE} --packing hold --max-delay 5 --max-step-tokens 1000000"
    assert wlb.json(tune)["is_default"] is True
    assert "The defaults cannot be bettered here" in wlb(tune).out


def test_gains_are_net_and_s_max_is_as_asked_in_every_row(wlb) -> None:
    found = wlb.json(f"{REFERENCE} --packing hold --pp-size 2 --tp-size 4 --max-windows 1.5")
    assert found["frame"]["net_of"] == "--tp-comm-overlap"
    for name in ("frontier", "tried", "judged"):
        assert all(row["net_speedup"] < 0.999 * row["speedup"] for row in found[name])
    s_max = {row["packing"]: row["max_tokens"] for row in found["judged"]}
    assert s_max["slim"] == s_max["fixed-greedy"] == 1.5 * 65536
    assert max(row["max_tokens"] for row in found["tried"]) == 1.5 * 65536
