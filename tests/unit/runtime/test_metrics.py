"""The file of one JSON line a step."""

import json

import pytest

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.megatron_lm.metrics_file import MetricsFile
from megatron_wlb.runtime.saving import lock


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_lines_are_appended_and_there_before_the_file_is_closed(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    first = MetricsFile(str(path))
    first.write({"iteration": 1, "loss": 2.5})
    assert path.read_text() == '{"iteration": 1, "loss": 2.5}\n'
    first.close()
    again = MetricsFile(str(path))
    again.write({"iteration": 2})
    again.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2]


def test_what_is_not_finite_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(str(path))
    metrics.write({"loss": float("nan"), "grad_norm": float("inf"), "tokens": 7, "lr": 0.0})
    metrics.close()
    values = json.loads(path.read_text(), parse_constant=no_constant)
    assert values == {"loss": None, "grad_norm": None, "tokens": 7, "lr": 0.0}


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write --wlb-metrics .*file/m.jsonl"):
        MetricsFile(str(tmp_path / "file" / "m.jsonl"))


def test_a_file_has_one_run_at_a_time(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(str(path))
    monkeypatch.setattr(lock, "PATIENCE_S", 0.0)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl is in use by another run; end"):
        MetricsFile(str(path))
    first.close()
    MetricsFile(str(path)).close()


@pytest.mark.parametrize("whole", ["", '{"iteration": 1}\n', '{"iteration": 1}\n' * 999])
def test_half_a_line_of_a_full_disk_is_cut_off(tmp_path, whole):
    path = tmp_path / "metrics.jsonl"
    path.write_text(whole + '{"iteration": 2, "lo')
    metrics = MetricsFile(str(path))
    metrics.write({"iteration": 2})
    metrics.close()
    assert path.read_text() == whole + '{"iteration": 2}\n'
