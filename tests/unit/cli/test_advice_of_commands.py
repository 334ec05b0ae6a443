"""What `pack` and `tune` advise, and what they do with next to no documents."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest
from helpers.slowness import slowness

from megatron_wlb.cli import output
from megatron_wlb.settings.command_line import parse
from megatron_wlb.study import tune as tuning

REFERENCE = "--distribution reference --window 32768 --num-micro-batches 8"
RULES = "--max-age 5 --max-step-tokens 300000"


@pytest.fixture(autouse=True)
def folder(wlb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "THRESHOLDS", (1 / 2,))
    monkeypatch.setattr(tuning, "DELAY_PRICES", (0.15,))
    monkeypatch.setattr(tuning, "TAUS", (1.0,))
    monkeypatch.setattr(tuning, "NUM_REFINED", 1)
    monkeypatch.setattr("megatron_wlb.cli.inputs.WARM_UP_STEPS", 4)
    Path("one.txt").write_text("2\n")


@pytest.mark.parametrize("limit", ["0", "0.5", "9"])
def test_pack_advises_nothing_slower_than_its_table_has_within_the_limit(limit, wlb) -> None:
    command = f"pack {REFERENCE} --pp-size 2 --steps 8 --max-delay {limit}"
    rows, out = wlb.json(command)["rows"], wlb(command).out
    assert f"within a mean delay of {limit} steps (--max-delay)" in out
    (advised,) = [row for row in rows if f"train with {' '.join(row['flags'])}: " in out]
    assert advised["delay_mean"] <= float(limit)
    for row in rows:
        if row["delay_mean"] <= float(limit) and not row["out_of_memory"]:
            assert round(advised["speedup"], 3) >= round(row["speedup"], 3)


def test_pack_says_where_a_gain_comes_from_order_alone(wlb) -> None:
    out = wlb("pack", REFERENCE, "--pp-size 4 --steps 10 --packing original,fixed-greedy").out
    assert "comes from the order in which micro-batches run" in out


def test_advised_flags_have_the_rules_that_were_packed_by(wlb) -> None:
    said = wlb("pack", REFERENCE, RULES, "--steps 8 --packing original,hold").out
    advised = said[said.index("train with ") + len("train with ") :].partition(": imbalance")[0]
    tuned = wlb("tune", REFERENCE, RULES, "--steps 8 --packing hold").out
    for flags in (advised, tuned.splitlines()[-1]):
        own = parse(shlex.split(flags)).wlb
        assert (own.wlb_packing, own.wlb_max_age, own.wlb_max_step_tokens) == ("hold", 5, 300000)


@pytest.mark.parametrize(
    "command",
    [
        "pack",
        "tune",
        "simulate --model 7b --tp-size 8",
        "plan --model 7b --num-devices 8 --num-micro-batches 8 --refine 2",
        "corpus stats",
    ],
)
def test_one_document_is_answered_soon(command: str, wlb) -> None:
    words = command, "--lengths one.txt --window"
    start_s = time.process_time()
    if command == "corpus stats":
        assert "one.txt" in wlb(*words, 64).out
    else:
        few = "documents of 2 tokens, and there are 1; lower --window"
        assert few in wlb.refusal(*words, 131072, status=3)
        wlb(*words, 64)
    # A few each, and eight of plan, whose trials share the documents.
    assert time.process_time() - start_s < 16 * slowness()


def test_fewer_steps_of_few_documents_are_said(wlb) -> None:
    words = "pack --lengths one.txt --window 512"
    out, err = wlb(words)
    assert "takes 1,024 documents of 2 tokens, and there are 1: 15 steps instead of 40" in err
    assert "15 steps" in out
    assert "30 steps" in wlb(words, "--steps 30").out


def test_long_work_says_how_far_it_is_where_there_is_no_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setattr(output, "QUIET_S", 0.05)
    with output.progress_bar("packing") as progress:
        progress(3, 1000)
        time.sleep(0.4)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and 1 <= len(lines) <= 4  # further and further apart
    assert all(line.startswith("packing: 3 of 1,000 after ") for line in lines)
    monkeypatch.setattr(output, "LONGEST_S", 0.05)
    start_s = time.monotonic()
    with output.progress_bar("packing") as progress:
        progress(3, 1000)
        time.sleep(0.3)
        progress(1, 1000, "last part")
        time.sleep(0.3)
    what, left = capsys.readouterr().err.splitlines()[-1].split(", about ")
    assert what.startswith("last part: 1 of 1,000 after ")
    # The first of this part took so long; what came before does not count.
    assert 0 < int(left.split()[0]) <= (time.monotonic() - start_s - 0.3) * 999 + 1
    monkeypatch.setattr(output, "QUIET_S", 60.0)
    with output.progress_bar("packing") as progress:
        progress(1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["pack --packing hold", "tune --packing hold"])
def test_packing_that_fits_no_memory_is_not_advised(command: str, wlb) -> None:
    words = "--distribution reference --model 7b --window 262144 --num-micro-batches 2 --steps 2"
    out = wlb(command, words, "--tp-size 1 --cp-size 1 --pp-size 1").out
    assert "Nothing that was tried fits memory: " in out
    assert "--wlb-packing" not in out
