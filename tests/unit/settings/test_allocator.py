"""Segments of a GPU's memory that grow, unless the user has said otherwise."""

from __future__ import annotations

import logging
import os

import pytest

from megatron_wlb.settings import allocator

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, **given: str
) -> tuple[dict[str, str], list[str]]:
    """The variables after :func:`allocator.choose`, and what is logged for a GPU."""
    monkeypatch.setattr(allocator, "_chosen", False)
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    caplog.clear()
    allocator.choose()
    with caplog.at_level(logging.INFO):
        allocator.tell("cpu")
        assert not caplog.messages
        allocator.tell("cuda")
    return {name: os.environ[name] for name in NAMES if name in os.environ}, caplog.messages


def test_segments_grow_where_the_user_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, said = chosen(monkeypatch, caplog)
    assert found == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert len(said) == 1 and "expandable_segments:True" in said[0]


def test_buffers_that_nccl_registers_leave_segments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    allocator.choose(["--bf16", "--use-nccl-ub"])
    assert not any(name in os.environ for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_users_setting_stays(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {name: "max_split_size_mb:512"}
    assert chosen(monkeypatch, caplog, **given) == (given, [])
