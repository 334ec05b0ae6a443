from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.errors import ConfigError, PlanError
from megatron_wlb.schedule.order import gpipe, one_f_one_b, schedule
from megatron_wlb.schedule.text import (
    from_csv,
    from_text,
    read_order,
    to_csv,
    to_text,
    write_order,
)

TEXT = """\
rank 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
rank 1: F0.0 B0.0 F0.1 B0.1 F0.2 B0.2
"""


def test_text_is_a_line_a_rank():
    assert to_text(one_f_one_b(2, 3)) == TEXT
    assert from_text(f"# a comment\n\n{TEXT}  # and another\n") == one_f_one_b(2, 3)


def test_csv_is_a_row_a_rank_and_may_have_gaps():
    order = one_f_one_b(2, 3)
    assert to_csv(order).splitlines()[1] == "F0.0,B0.0,F0.1,B0.1,F0.2,B0.2"
    assert from_csv("F0.0,F0.1,,B0.0,F0.2,,B0.1,B0.2\n,F0.0, B0.0,F0.1,B0.1,F0.2,B0.2\n") == order


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_orders_round_trip_in_both_forms(pp_size, vpp_size, groups, all_forward_first):
    if pp_size == 1 or all_forward_first:
        order = gpipe(pp_size, groups)
    else:
        order = schedule(pp_size, vpp_size, groups * pp_size)
    assert from_text(to_text(order)) == order
    assert from_csv(to_csv(order)) == order


@pytest.mark.parametrize("name", ["schedule.txt", "schedule.csv"])
def test_files_round_trip_and_leave_nothing_else(tmp_path, name):
    order = schedule(2, 2, 4)
    write_order(tmp_path / name, order)
    write_order(tmp_path / name, order)
    assert read_order(tmp_path / name) == order
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert ("," in (tmp_path / name).read_text()) == name.endswith("csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: F0.0 B0.0\nrank 2: F0.0 B0.0", "line 2: 'rank 2.*' is not the order of rank 1"),
        ("F0.0 B0.0", "line 1: 'F0.0 B0.0' is not the order of rank 0"),
        ("rank 0: F0.0 X0.0", "line 1: 'X0.0' is no action"),
        ("", "the order is empty"),
        ("rank 0: F0.0 F0.1 B0.0\nrank 1: F0.0 B0.0 F0.1 B0.1", r"rank 0 never runs B0\.1"),
        (
            "rank 0: F0.0 B0.0 F0.1 B0.1\nrank 1: F0.0 F0.1 B0.0 B0.1",
            "the order deadlocks: rank 0 at B0.0",
        ),
    ],
)
def test_text_that_is_no_schedule_is_refused(tmp_path, text, message):
    with pytest.raises(PlanError, match=message):
        from_text(text)
    path = tmp_path / "mine.txt"
    path.write_text(text)
    with pytest.raises(PlanError, match=f"mine.txt: {message}"):
        read_order(path)


def test_csv_that_is_no_schedule_is_refused():
    with pytest.raises(PlanError, match="line 2: 'F1' is no action"):
        from_csv("F0.0,B0.0\nF1,B0.0\n")


def test_files_that_cannot_be_read_or_written_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the schedule .*none\.txt"):
        read_order(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match="cannot write"):
        write_order(tmp_path / "no" / "folder.txt", one_f_one_b(2, 3))
