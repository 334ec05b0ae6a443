"""What a user gives is read, or refused in one line that names it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import MAX_FILE_BYTES, read_mapping, real_number, whole_number


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (math.nan, "x is nan; give a finite number"),
        (math.inf, "x is inf; give a finite number"),
        (True, "x is True; give a number"),
        (np.True_, "x is np.True_; give a number"),
        (np.float32("nan"), "x is nan; give a finite number"),
        ("3", "x is '3'; give a number"),
        (None, "x is None; give a number"),
        (0.4, "x is 0.4; give at least 0.5"),
        (8, "x is 8; give at most 7"),
        pytest.param(10**5000, "x is a number of thousands of digits; give at most 7", id="huge"),
    ],
)
def test_real_number_is_finite_and_within_its_limits(value: object, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        real_number("x", value, 0.5, 7)
    assert str(caught.value).startswith(complaint)
    assert [real_number("x", edge, 0.5, 7) for edge in (0.5, 7, np.float32(2))] == [0.5, 7.0, 2.0]


@pytest.mark.parametrize("value", [True, 3.0, "3", None, 1, 8, pytest.param(10**5000, id="huge")])
def test_whole_number_is_whole_and_within_its_limits(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^n is "):
        whole_number("n", value, 2, 7)
    found = [whole_number("n", edge, 2, 7) for edge in (2, 7, np.int64(5))]
    assert found == [2, 7, 5] and {*map(type, found)} == {int}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: 2024-05-40", "day is out of range"),
        ("a: !!int foo", "foo"),
        ("a: !!bool foo", "foo"),
        ("a: " + "[" * 999, "nested too deep"),
        ("1: a", "the name 1 is not a text"),
        ("- a", "expected names and values"),
        ("a: &a [*a]", "nested too deep"),
        ("a: " + "9" * 400, "hundreds of digits"),
        ("# " + "x" * MAX_FILE_BYTES, "larger than"),
    ],
)
def test_file_that_holds_no_settings_is_one_line(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_mapping(path, "model", "write sizes")
    message = str(caught.value)
    assert message.startswith(f"model {path}: ") and message.endswith("; write sizes")
    assert complaint in message and "\n" not in message


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "none.yaml"])
def test_path_that_cannot_be_opened_is_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_mapping(tmp_path / name, "model")
    assert "\n" not in str(caught.value)
