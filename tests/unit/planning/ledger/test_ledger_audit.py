"""An audit finds each token once, or says which document is lost or ran twice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.long_soak import COST, RUNS, run, soak_of
from helpers.soak import Soak, soaks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_wlb.errors import CheckpointError
from megatron_wlb.planning.ledger.history import History, Report, audit
from megatron_wlb.planning.ledger.lines import LENGTH, NAME, decode, encode, read, seal
from megatron_wlb.planning.ledger.writer import StepLedger

Saved = tuple[int, Any]


def write(folder: Path, soak: Soak, num_steps: int) -> Saved:
    """Plans a run and its ledger; its last state."""
    planner, ledger = soak.planner(), StepLedger(folder)
    ledger.start(0, planner)
    while ledger.iteration < num_steps and (plan := planner.next_plan()) is not None:
        ledger.step(plan)
    ledger.close()
    return ledger.iteration, json.loads(json.dumps(planner.state_dict()))


def report_of(folder: Path, saved: Saved | None) -> Report:
    return audit(History(folder / NAME), saved)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [line.values for line in read(folder / NAME) if line is not None]


def rewrite(folder: Path, values: list[dict[str, Any]]) -> None:
    (folder / NAME).write_bytes(b"".join(map(seal, values)))


@pytest.mark.parametrize("packing", RUNS)
@pytest.mark.parametrize("is_blend", [False, True], ids=["by size", "blend"])
def test_each_token_runs_once_over_crashes(packing: str, is_blend: bool, tmp_path: Path) -> None:
    figures = run(packing, is_blend, 150, 3, tmp_path)
    report = figures.report
    assert (report.lost.number, report.twice.number) == (0, 0), report
    assert report.restarts and report.rolled_back
    assert report.steps + report.rolled_back == figures.planned
    assert report.proven_until == report.last_iteration == report.steps
    assert report.first_iteration == 1
    assert report.documents > 500 < report.tokens


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(soaks(), st.data())
def test_any_run_passes_and_without_any_one_document_fails(
    tmp_path: Path, soak: Soak, data: st.DataObject
) -> None:
    (tmp_path / NAME).unlink(missing_ok=True)
    saved = write(tmp_path, soak, 12)
    report = report_of(tmp_path, saved)
    assert (report.lost.number, report.twice.number) == (0, 0), report
    ended = soak.planner().stream.exhausted
    assert not ended
    values = lines(tmp_path)
    steps = [line for line in values if "iteration" in line]
    step = data.draw(st.sampled_from(steps))
    pieces = decode(step["documents"])
    at = data.draw(st.integers(0, len(pieces) - 1))
    # The figure beside them is made to fit, so that only the account can tell.
    step["tokens"] -= int(pieces[at, LENGTH])
    step["documents"] = encode(np.delete(pieces, at, axis=0))
    rewrite(tmp_path, values)
    report = report_of(tmp_path, saved)
    assert report.lost.number
    assert not report.twice.number


def remove_line(values: list[dict[str, Any]]) -> None:
    del values[5]


def double_line(values: list[dict[str, Any]]) -> None:
    values.insert(5, values[5])


def remove_document(values: list[dict[str, Any]]) -> None:
    values[5]["documents"] = encode(decode(values[5]["documents"])[1:])


def shorten_document(values: list[dict[str, Any]]) -> None:
    pieces = decode(values[5]["documents"]).copy()
    pieces[0, LENGTH] -= 1
    values[5]["documents"] = encode(pieces)


def repeat_document(values: list[dict[str, Any]]) -> None:
    pieces = decode(values[5]["documents"])
    values[7]["documents"] = encode(np.concatenate([pieces[:1], decode(values[7]["documents"])]))


def leave_out_a_start(values: list[dict[str, Any]]) -> None:
    """The steps that a restart ran again count as steps."""
    (at,) = (n for n, line in enumerate(values) if line.get("start"))
    del values[at]


FAULTS: list[tuple[Callable[[Any], None], str, str]] = [
    (remove_line, "lost", "the line of step 5"),
    (remove_document, "lost", "tokens of step 5"),
    (shorten_document, "lost", "1 tokens of step 5"),
    (double_line, "twice", "ran in step 5, ran in step 5"),
    (repeat_document, "twice", "ran in step 5, ran in step 7"),
    (leave_out_a_start, "twice", "ran in step 9, ran in step 9"),
]


@pytest.mark.parametrize(
    ("change", "kind", "said"), FAULTS, ids=[change.__name__ for change, *_ in FAULTS]
)
@pytest.mark.parametrize("is_blend", [False, True], ids=["by size", "blend"])
def test_changed_ledger_is_found_out_and_the_document_named(
    change: Callable[[Any], None], kind: str, said: str, is_blend: bool, tmp_path: Path
) -> None:
    soak = soak_of("hold", is_blend, 5)
    write(tmp_path, soak, 8)
    planner, ledger = soak.planner(), StepLedger(tmp_path)
    for _ in planner.plans(8):
        pass
    ledger.start(8, planner)
    for plan in planner.plans(4):
        ledger.step(plan)
    planner = soak.planner()
    for _ in planner.plans(8):
        pass
    ledger.start(8, planner)  # crashed without a save
    for plan in planner.plans(6):
        ledger.step(plan)
    ledger.close()
    saved = ledger.iteration, json.loads(json.dumps(planner.state_dict()))
    assert report_of(tmp_path, saved).rolled_back == 4
    values = lines(tmp_path)
    if change is leave_out_a_start:
        del values[9]  # the first of the two, which took nothing back
    change(values)
    rewrite(tmp_path, values)
    report = report_of(tmp_path, saved)
    faults = getattr(report, kind)
    assert faults.number
    assert any(said in text for text in faults.first), faults
    if kind == "twice":
        assert "document" in faults.first[0] and "of corpus" in faults.first[0]


def test_document_that_a_restart_leaves_out_is_lost(tmp_path: Path) -> None:
    """A state from which a waiting document was dropped: the ledger itself is as it was written."""
    soak = soak_of("hold, ahead", False, 5)
    saved = write(tmp_path, soak, 10)
    planner = soak.planner()
    ahead = saved[1]["packer"]["ahead"]
    dropped = next(document for document in ahead if document[2] == 0 and document[4])  # whole
    ahead.remove(dropped)
    planner.load_state_dict(saved[1])
    ledger = StepLedger(tmp_path)
    ledger.start(10, planner)
    for plan in planner.plans(30):
        ledger.step(plan)
    ledger.close()
    report = report_of(tmp_path, (ledger.iteration, planner.state_dict()))
    assert (report.lost.number, report.twice.number) == (1, 0), report
    assert f"document {dropped[6]} of the stream" in report.lost.first[0]


def test_document_that_waits_though_it_ran_is_twice(tmp_path: Path) -> None:
    soak = soak_of("hold, ahead", False, 5)
    iteration, state = write(tmp_path, soak, 10)
    plan = soak.planner().next_plan()
    assert plan is not None
    state["packer"]["ahead"].append(list(next(plan.documents)))
    report = report_of(tmp_path, (iteration, state))
    assert (report.lost.number, report.twice.number) == (0, 1)
    assert "ran in step 1, waits in the checkpoint" in report.twice.first[0]


def test_steps_after_the_checkpoint_are_neither_lost_nor_twice(tmp_path: Path) -> None:
    soak = soak_of("wlb", True, 2)
    saved = write(tmp_path, soak, 6)
    write_more = StepLedger(tmp_path)
    write_more.iteration = 6
    planner = soak.planner()
    planner.load_state_dict(saved[1])
    for plan in planner.plans(5):
        write_more.step(plan)
    write_more.close()
    for state in (saved, None):
        report = report_of(tmp_path, state)
        assert (report.lost.number, report.twice.number) == (0, 0), report
        assert report.steps == 11
        assert report.proven_until == (6 if state else None)


def test_checkpoint_beyond_the_ledger_has_lost_steps(tmp_path: Path) -> None:
    soak = soak_of("hold", False, 2)
    saved = write(tmp_path, soak, 6)
    rewrite(tmp_path, lines(tmp_path)[:-2])
    report = report_of(tmp_path, saved)
    assert "the line of step 5, which the checkpoint of step 6 has" in report.lost.first
    assert report.lost.number > 2, "its documents too"


@pytest.mark.parametrize("packing", RUNS)
def test_ledger_that_begins_in_the_midst_proves_what_comes_after(
    packing: str, tmp_path: Path
) -> None:
    """As where --save is another folder than --load."""
    soak = soak_of(packing, packing == "wlb", 4)
    planner = soak.planner()
    for _ in planner.plans(30):  # some parts of documents have run before earlier ones
        pass
    ledger = StepLedger(tmp_path)
    ledger.start(30, planner)
    for plan in planner.plans(9):
        ledger.step(plan)
    ledger.close()
    report = report_of(tmp_path, (39, planner.state_dict()))
    assert (report.lost.number, report.twice.number) == (0, 0), report
    assert (report.first_iteration, report.steps) == (31, 9)
    values = lines(tmp_path)
    remove_document(values)
    rewrite(tmp_path, values)
    assert report_of(tmp_path, (39, planner.state_dict())).lost.number


@pytest.mark.parametrize("load", ["other", None], ids=["from another folder", "anew"])
def test_steps_of_another_run_in_the_folder_do_not_count(load: str | None, tmp_path: Path) -> None:
    write(tmp_path, soak_of("hold", False, 1), 30)
    planner, ledger = soak_of("hold", False, 2).planner(), StepLedger(tmp_path)
    before = 20 if load else 0
    for _ in planner.plans(before):
        pass
    ledger.start(before, planner, elsewhere=load is not None)
    for plan in planner.plans(10):
        ledger.step(plan)
    ledger.close()
    report = report_of(tmp_path, (ledger.iteration, planner.state_dict()))
    assert (report.lost.number, report.twice.number) == (0, 0), report
    assert (report.first_iteration, report.steps) == (before + 1, 10)


@pytest.mark.parametrize(
    ("stood", "newest", "steps", "is_taken_back"),
    [(9, 9, 3, True), (9, 9, 9, False), (9, 3, 4, False), (None, 9, 3, False)],
    ids=["not come to", "come to again", "saved since", "lines are lost"],
)
def test_checkpoint_that_a_start_left_behind_is_known(
    stood: int | None, newest: int, steps: int, is_taken_back: bool, tmp_path: Path
) -> None:
    planner, ledger = soak_of("hold", False, 1).planner(), StepLedger(tmp_path)
    ledger.start(0, planner, stood=stood)
    for plan in planner.plans(steps):
        ledger.step(plan)
    ledger.close()
    assert History(tmp_path / NAME).has_taken_back(newest) == is_taken_back


def test_all_epochs_end_whole_and_say_what_is_dropped(tmp_path: Path) -> None:
    base = soak_of("hold", False, 4)
    for number, long in enumerate(("split", "truncate")):
        folder = tmp_path / str(number)
        soak = dataclasses.replace(
            base, lengths=((5, 900, 3000, 0, 7), (40, 1024, 1025)), num_epochs=3,
            long_documents=long,
        )  # fmt: skip
        report = report_of(folder, write(folder, soak, 100))
        assert (report.lost.number, report.twice.number, report.waiting) == (0, 0, 0)
        assert report.epochs == {"corpus 0": 3.0, "corpus 1": 3.0}
        assert report.documents == 3 * 7
        assert report.dropped_tokens == (3 * (3000 - 1024 + 1) if long == "truncate" else 0)


def test_skipped_steps_are_counted_and_not_lost(tmp_path: Path) -> None:
    soak = soak_of("hold", False, 4)
    planner, ledger = soak.planner(), StepLedger(tmp_path)
    ledger.start(0, planner)
    tokens = 0
    for number, plan in enumerate(planner.plans(5)):
        ledger.step(plan, skipped="--iterations-to-skip" if number == 2 else "")
        tokens += plan.num_tokens if number == 2 else 0
    ledger.close()
    report = report_of(tmp_path, (5, planner.state_dict()))
    assert (report.skipped, report.skipped_tokens) == (1, tokens)
    assert (report.lost.number, report.twice.number) == (0, 0)


@pytest.mark.parametrize("packing", ["hold", "slim"])
def test_documents_of_a_step_that_was_saved_before_it_ran_wait(
    packing: str, tmp_path: Path
) -> None:
    """As by Megatron's rerun machinery, which saves the plan too."""
    planner, ledger = soak_of(packing, False, 4).planner(), StepLedger(tmp_path)
    ledger.start(0, planner)
    for plan in planner.plans(5):
        ledger.step(plan)
    assert not ledger.under_way(plan)
    taken = planner.next_plan()
    state = planner.state_dict()
    assert report_of(tmp_path, (5, state)).lost.number
    state |= ledger.under_way(taken)
    assert audit(History(tmp_path / NAME), (5, json.loads(json.dumps(state)))).lost.number == 0
    again = soak_of(packing, False, 4).planner()
    again.load_state_dict(state)
    ledger.start(5, again)
    assert taken is not None
    ledger.step(taken)
    for plan in again.plans(4):
        ledger.step(plan)
    ledger.close()
    report = report_of(tmp_path, (10, again.state_dict()))
    assert (report.lost.number, report.twice.number) == (0, 0), report


def test_ledger_without_a_whole_start_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"")
    with pytest.raises(CheckpointError, match="no whole line"):
        History(tmp_path / NAME)
    for values in (
        {"iteration": 1, "digest": "", "tokens": 0, "documents": ""},
        {"start": 0, "arrived": 0, "waiting": "", "contents": []},
    ):
        rewrite(tmp_path, [values])
        with pytest.raises(CheckpointError, match="line 1 is not of a ledger"):
            History(tmp_path / NAME)
    with pytest.raises(CheckpointError, match="give the folder of a --save"):
        History(tmp_path / "nothing" / NAME)


def test_ledger_takes_a_few_bytes_a_document(tmp_path: Path) -> None:
    """Ten times the documents of a step of :mod:`helpers.soak`, as of a real one."""
    soak = dataclasses.replace(soak_of("hold", False, 1), num_micro_batches=80)
    assert soak.cost == COST
    write(tmp_path, soak, 10)
    report = report_of(tmp_path, None)
    start = (tmp_path / NAME).read_bytes().index(b"\n")
    assert ((tmp_path / NAME).stat().st_size - start) / report.documents < 10
