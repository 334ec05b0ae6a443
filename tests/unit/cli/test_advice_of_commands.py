"""What `pack` and `tune` advise, and what they do with next to no documents."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest

from megatron_wlb.cli import output
from megatron_wlb.cli.main import main
from megatron_wlb.settings.command_line import parse
from megatron_wlb.study import tune as tuning

REFERENCE = ["--distribution", "reference", "--window", "32768", "--num-micro-batches", "8"]
RULES = ["--max-age", "5", "--max-step-tokens", "300000"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "THRESHOLDS", (1 / 2,))
    monkeypatch.setattr(tuning, "DELAY_PRICES", (0.15,))
    monkeypatch.setattr(tuning, "TAUS", (1.0,))
    monkeypatch.setattr(tuning, "NUM_REFINED", 1)
    for command in ("pack", "tune"):
        monkeypatch.setattr(f"megatron_wlb.cli.{command}.WARM_UP_STEPS", 4)
    Path("one.txt").write_text("2\n")
    return tmp_path


@pytest.mark.parametrize("limit", ["0", "0.5", "9"])
def test_pack_advises_nothing_slower_than_its_table_has_within_the_limit(limit, capsys) -> None:
    command = ["pack", *REFERENCE, "--pp-size", "2", "--steps", "8", "--max-delay", limit]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f"within a mean delay of {limit} steps (--max-delay)" in out
    (advised,) = [row for row in rows if f"train with {' '.join(row['flags'])}: " in out]
    assert advised["delay_mean"] <= float(limit)
    for row in rows:
        if row["delay_mean"] <= float(limit):
            assert round(advised["work_speedup"], 3) >= round(row["work_speedup"], 3)


def test_pack_says_where_a_gain_comes_from_order_alone(capsys) -> None:
    command = ["pack", *REFERENCE, "--pp-size", "4", "--steps", "10"]
    assert main([*command, "--packing", "original,fixed-greedy"]) == 0
    assert "comes from the order in which micro-batches run" in capsys.readouterr().out


def test_pack_without_anything_within_the_limit_says_what_comes_nearest(capsys) -> None:
    command = ["pack", *REFERENCE, "--steps", "5", "--packing", "fixed-greedy:8,fixed-greedy:4"]
    assert main([*command, "--max-delay", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "nothing here keeps within a mean delay of 0.1 steps" in out
    assert "of fixed-greedy, 4 batches." in out


def test_advised_flags_have_the_rules_that_were_packed_by(capsys) -> None:
    command = ["pack", *REFERENCE, *RULES, "--steps", "8", "--packing", "original,hold"]
    assert main(command) == 0
    said = capsys.readouterr().out
    advised = said[said.index("train with ") + len("train with ") :].partition(": imbalance")[0]
    assert main(["tune", *REFERENCE, *RULES, "--steps", "8", "--packing", "hold"]) == 0
    for flags in (advised, capsys.readouterr().out.splitlines()[-1]):
        wlb = parse(shlex.split(flags)).wlb
        assert (wlb.wlb_packing, wlb.wlb_max_age, wlb.wlb_max_step_tokens) == ("hold", 5, 300000)


def test_headers_name_the_cost_model(capsys) -> None:
    Path("cost.json").write_text(
        '{"forward_linear_us": 1, "forward_quadratic_us": 0.1, "backward_linear_us": 2,'
        ' "backward_quadratic_us": 0.2}'
    )
    for command in ("pack", "tune"):
        packing = ["--packing", "hold", "--steps", "2"]
        assert main([command, *REFERENCE, *packing]) == 0
        assert "cost of LLaMA2-7B at 128K" in capsys.readouterr().out
        assert main([command, *REFERENCE, *packing, "--cost", "cost.json"]) == 0
        assert "cost of cost.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        ["pack"],
        ["tune"],
        ["simulate", "--model", "7b", "--tp-size", "8"],
        ["plan", "--model", "7b", "--num-devices", "8", "--num-micro-batches", "8"],
        ["corpus", "stats"],
    ],
)
@pytest.mark.parametrize("window", ["64", "131072"])
def test_one_document_is_answered_soon(command: list[str], window: str, capsys) -> None:
    start_s = time.process_time()
    status = main([*command, "--lengths", "one.txt", "--window", window])
    assert time.process_time() - start_s < 8  # about one, where it took minutes or for ever
    out, err = capsys.readouterr()
    if status:
        assert status == 3 and out == ""
        assert "documents of 2 tokens, and there are 1; lower --window" in err.splitlines()[-1]
    else:
        assert "one.txt" in out or command[0] in ("simulate", "plan")
    assert status == 0 or window != "64"


def test_fewer_steps_of_few_documents_are_said(capsys) -> None:
    assert main(["pack", "--lengths", "one.txt", "--window", "64"]) == 0
    out, err = capsys.readouterr()
    assert "takes 128 documents of 2 tokens, and there are 1: 18 steps instead of 400" in err
    assert "18 steps" in out
    assert main(["pack", "--lengths", "one.txt", "--window", "64", "--steps", "30"]) == 0
    assert "30 steps" in capsys.readouterr().out


def test_long_work_says_how_far_it_is_where_there_is_no_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setattr(output, "QUIET_S", 0.05)
    with output.progress_bar("packing") as progress:
        progress(3, 1000)
        time.sleep(0.4)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and 1 <= len(lines) <= 4  # further and further apart
    assert all(line.startswith("packing: 3 of 1,000 after ") for line in lines)
    monkeypatch.setattr(output, "QUIET_S", 60.0)
    with output.progress_bar("packing") as progress:
        progress(1, 2)
    assert capsys.readouterr().err == ""
