from __future__ import annotations

from pathlib import Path

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.files import replacing, write_text


def test_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "figures.json"
    write_text(path, "old")
    with pytest.raises(RuntimeError, match="half way"), replacing(path) as draft:
        draft.write_text("ne")
        assert draft.suffix == ".json"  # by which writers choose a format
        raise RuntimeError("half way")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["figures.json"]
    write_text(path, "new")
    assert path.read_text() == "new"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("no/figures.json", r"no/figures\.json: No such file"), ("x" * 300, "too long")],
)
def test_place_that_cannot_be_written_is_named_in_one_line(
    name: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"cannot write .*{reason}"):
        write_text(tmp_path / name, "x")


def test_longest_name_of_a_file_can_be_written(tmp_path: Path) -> None:
    write_text(tmp_path / ("ö" * 120 + ".json"), "text")
    assert (tmp_path / ("ö" * 120 + ".json")).read_text() == "text"
