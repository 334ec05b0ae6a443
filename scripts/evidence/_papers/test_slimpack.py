from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from _running import run_script

from _papers import slimpack
from _papers.paper import Effort, K
from _papers.slimpack import BEST_FIT, Case
from megatron_wlb.errors import ConfigError

QUICK = Effort(3, (1,), warm_up=2)


def test_models_have_the_sizes_that_they_are_named_by() -> None:
    billions = {
        name: (model.linear_parameters + model.hidden_size * model.vocab_size) / 1e9
        for name, model in slimpack.MODELS.items()
    }
    assert billions == {
        name: pytest.approx(float(name.removesuffix("b")), rel=0.05) for name in billions
    }
    for model, devices in slimpack.DEVICES.items():
        ways = slimpack.layouts(Case(model, 128 * K), BEST_FIT, more=True)
        runs = [run for own in ways for run in own]
        assert {run.num_devices for run in runs} == {devices}
        assert len({run.num_micro_batches for run in runs}) == 1
        assert len({run.parallelism.tp_size for run in runs}) >= 2


def test_windows_recompute_in_parts_from_little_to_much() -> None:
    case = Case("70b", 128 * K)
    ways = slimpack.recomputed(case, BEST_FIT)
    layers = [way.recomputed_layers(10) for way in ways]
    assert layers == sorted(set(layers)) and (layers[0], layers[-1]) == (0, 10)
    peaks = [
        slimpack.measure(
            slimpack.layout(case, 4, recompute=way), BEST_FIT, case, Effort(1, (1,), warm_up=0)
        ).peak_gib
        for way in (ways[0], ways[2], ways[-1])
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert slimpack.recomputed(case, "slim") == [ways[0], ways[-1]]


def test_own_numbers_of_units_gain_little() -> None:
    case = Case("7b", 128 * K, documents=128)
    found = slimpack.own_units(slimpack.layout(case, 1), case, Effort(2, (1,), warm_up=0))
    assert 1 <= found.over_common[0] <= found.over_settled[0] < 1.05
    assert found.settled > 4


def test_data_have_the_shares_that_the_paper_states() -> None:
    common, github, wikipedia = (slimpack.lengths_of(data).stored for data in slimpack.DATA)
    assert common is not None and github is not None and wikipedia is not None
    assert np.mean(common < 4096) == pytest.approx(0.8, abs=0.01)
    assert np.mean(common > 128 * K) == pytest.approx(0.01, abs=0.002)
    assert github.mean() > max(common.mean(), wikipedia.mean())
    assert np.std(np.log(github)) < np.std(np.log(common))


def test_best_fit_leaves_the_least_room() -> None:
    assert slimpack.best_fit([3, 7, 5, 4, 2, 6], 10) == [[7, 3], [6, 4], [5, 2]]
    # 2 fits in the first window, too, but leaves more room there.
    assert slimpack.best_fit([2, 42, 60, 55], 100) == [[60], [55, 42, 2]]


def test_best_fit_keeps_every_document_and_the_window() -> None:
    lengths = np.random.default_rng(1).integers(1, 101, 200).tolist()
    for multiple in (1, 4, 7):
        windows = slimpack.best_fit(lengths, 100, multiple)
        assert not len(windows) % multiple and all(windows)
        assert max(map(sum, windows)) <= 100
        assert Counter(length for window in windows for length in window) == Counter(lengths)
    full = sum(lengths) / 100
    assert len(slimpack.best_fit(lengths, 100)) < 1.05 * full + 1


def test_slices_gain_most_over_best_fit_and_need_about_its_memory() -> None:
    case = Case("13b", 128 * K)
    run = slimpack.layout(case, 4)
    best_fit, original, hold, slim = (
        slimpack.measure(run, packing, case, QUICK)
        for packing in (BEST_FIT, "original", "hold", "slim")
    )
    assert 1.2 < slim.speedup(best_fit)[0] < 1.5
    assert slim.speedup(original)[0] > slim.speedup(hold)[0] > 0.99
    assert slim.bubble_share < 0.08 < 0.2 < best_fit.bubble_share
    assert slim.peak_gib < 1.25 * best_fit.peak_gib
    assert slim.units > 1.9 * best_fit.units
    # Variation of forwards and backwards: windows are worse backward, slices even in both.
    assert 0.15 < best_fit.spread[0, 1] < best_fit.spread[1, 1]
    assert slim.spread[:, 1].max() < 0.05
    assert (slim.spread[:, 0] < best_fit.spread[:, 0]).all()


def test_fastest_layout_fits_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("70b", 128 * K)
    monkeypatch.setattr(slimpack, "TP_SIZES", {"70b": (8,)})
    monkeypatch.setattr(slimpack, "CP_SIZES", (4,))
    quick = Effort(1, (1,), warm_up=0)
    windows, slices = (
        slimpack.fastest(case, packing, quick, more=True) for packing in (BEST_FIT, "slim")
    )
    assert windows.run.recompute.method == "block"
    assert slices.run.recompute.granularity is None
    assert max(windows.peak_gib, slices.peak_gib) <= windows.run.limit_gib
    assert slices.speedup(windows)[0] > 1.4


def test_layout_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("150b", 256 * K)
    monkeypatch.setattr(slimpack, "TP_SIZES", {"150b": (8,)})
    monkeypatch.setattr(slimpack, "CP_SIZES", (1,))
    with pytest.raises(ConfigError, match="150B-256K with best-fit fits in no layout"):
        slimpack.fastest(case, BEST_FIT, QUICK)


def test_script_makes_a_small_page_of_slimpack(tmp_path: Path) -> None:
    done = run_script(
        "reproduce_paper.py", "--paper slimpack --small --only backward hold --json --out", tmp_path
    )
    assert done.returncode == 0, done.stderr
    page = " ".join((tmp_path / "slimpack.md").read_text().split())
    assert page.startswith("# SlimPack's experiments, simulated")
    assert "--paper slimpack --small --only backward hold` in" in page
    found = json.loads(done.stdout)
    assert found["simulated"]
    backward, hold = found["sections"]
    rows = {row["name"]: row["simulated"] for row in backward["rows"]}
    assert 0.99 < rows["N = 16, own cuts"] < 1.02 < rows["N = 4, no bubbles"]
    rows = {row["name"]: row["simulated"] for row in hold["rows"]}
    assert rows["N = 4, hold, V = 4"] < rows["N = 4, slim, V = 1"] < rows["N = 4, no bubbles"]
    for section in (backward, hold):
        picture = tmp_path / "images" / f"slimpack-{section['key']}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert "| paper | deviation |" not in page


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--only", "table-2"], "--only makes a page of less; give it a folder of its own"),
        (["--small"], "--small makes a page of less; give it a folder of its own with --out"),
        (["--only", "table-2", "--out", "none"],
         "--only table-2: no section of slimpack; give throughput, search, merge, cuts, units, "
         "spread, backward, hold"),
    ],
)  # fmt: skip
def test_script_refuses_parts_that_are_none(
    words: list[str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce_paper.py", "--paper", "slimpack", *words])
    script = importlib.import_module("reproduce_paper")
    with pytest.raises(ConfigError, match=error):
        script.main()
    assert not Path("none").exists()
