"""The script that stands in for Megatron-LM's reads what that reads of the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import stand_in
from packaging.version import Version

from megatron_wlb.errors import CompatibilityError, WLBError
from megatron_wlb.runtime.compat.source import MegatronSource

NOT_READ = {
    "add_extra_token_to_sequence", "drop_last_partial_validation_sequence",  # by no script
    # Of conversations, or of what the script refuses.
    "context_parallel_size", "data_parallel_size", "sequence_parallel_size",
    "hybrid_context_parallel", "inter_document_masking", "sequences_per_dataset",
}  # fmt: skip


@pytest.fixture
def asked(in_one_process: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's loop of 0.18 builds no GPT by itself: one line says so."""
    if Version(MegatronSource.installed().version) >= Version("0.19.0rc0"):
        return in_one_process

    def refused(*call: Any) -> None:
        with pytest.raises(CompatibilityError, match="name a checkout's pretrain_gpt"):
            in_one_process(*call)

    return refused


def test_data_sets_have_each_setting_that_megatrons_script_gives(asked: Any) -> None:
    assert (asked(stand_in.settings_left_out) or set()) <= NOT_READ


def test_no_corpus_is_one_line(in_one_process: Callable[..., Any]) -> None:
    with pytest.raises(WLBError, match=r"give --data-path|name a checkout's pretrain_gpt"):
        in_one_process(stand_in.settings_left_out, False)


def test_masks_of_windows_reach_the_model(asked: Any) -> None:
    assert asked(stand_in.gives_masks) in (True, None)


@pytest.mark.parametrize(
    ("pipeline", "untied", "further", "expected"),
    [
        ([0, 1, 2, 3], False, [], [0, 3]),
        ([0, 1, 2, 3], True, [], [0]),
        ([0, 1, 2, 3], True, [2], [0, 2]),
        ([5], True, [5], [5]),
    ],
)
def test_stages_that_share_the_word_embedding(
    asked: Any, pipeline: list[int], untied: bool, further: list[int], expected: list[int]
) -> None:
    assert asked(stand_in.embedding_ranks, pipeline, untied, further) in (expected, None)
