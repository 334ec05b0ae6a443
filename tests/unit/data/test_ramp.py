"""Batches that grow, held against Megatron's own calculator of micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from megatron_wlb.data.blend import BlendedStream
from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.data.ramp import Ramp
from megatron_wlb.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(
    "schedule",
    ["0:2 1.2K:4, 0.003M:8", "0:7", "0:20 500:30 1000:40 9000:41", "0:384,2.5M:768 5M:1152"],
)
def test_ramp_follows_megatrons_calculator(schedule: str) -> None:
    ramp = Ramp.schedule(schedule, 100)
    theirs = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, schedule, 100)
    consumed, step = 0, 0
    while consumed <= 2 * ramp.thresholds[-1][0]:
        theirs.update(consumed, consistency_check=True)
        assert ramp.before(step) == consumed
        assert ramp.windows(step) == theirs.get()
        consumed += ramp.windows(step)
        step += 1
    assert ramp.sizes[-1] == ramp.windows(step) == theirs.schedule[-1][1]


def test_size_that_a_step_passes_over_is_none_of_the_ramp() -> None:
    skipped = Ramp.schedule("0:20 500:30 1000:40 9000:41", 100)  # the first step passes 30
    assert skipped.sizes == (20, 40, 41)
    assert skipped.title == "20 from 0 30 from 5 40 from 10 41 from 90"


def test_ramp_of_a_hundred_million_samples_is_known_at_once() -> None:
    ramp = Ramp.schedule("0:384 200B:768 400B:1152", 4096)
    assert ramp.sizes == (384, 768, 1152)
    assert 97_656_250 < ramp.before(200_000) < ramp.before(200_001)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "does not begin at 0 tokens"),
        ("5K:3 9K:4", "does not begin at 0 tokens"),
        ("0:3 5000", 'has "5000"; give TOKENS:WINDOWS'),
        ("0:3 -5:4", 'has "-5:4"'),
        ("0:0 5K:4", "begins with batches of nothing"),
        ("0:4 5K:3", "goes from 4 windows at sample 0 to 3 at 50; let batches grow"),
        ("0:4 50:8", "goes from 4 windows at sample 0 to 8 at 0; let batches grow"),
    ],
)
def test_step_schedule_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Ramp.schedule(text, 100)


def test_streams_give_the_windows_of_each_step() -> None:
    """By first tokens, as in other steps: up to a document more or less."""
    ramp = Ramp.schedule("0:2 300:4 600:6 900:8", 100)
    lengths = np.random.default_rng(1).integers(1, 101, 400)
    both = {"window": 100, "step_tokens": 800, "seed": 3, "ramp": ramp}
    streams = (DocumentStream([lengths], **both), BlendedStream([lengths] * 2, [0.3, 0.7], **both))
    for stream in streams:
        given = 0
        for step in range(10):
            assert 0 <= given - 100 * ramp.before(step) < 100
            given += sum(document.length for document in stream.next_step())


def test_stream_of_another_ramp_is_refused() -> None:
    ramp = Ramp.schedule("0:2 300:4 600:6 900:8", 100)
    both = {"window": 100, "step_tokens": 800, "seed": 3}
    saved = DocumentStream([np.full(9, 50)], **both, ramp=ramp).state_dict()
    for other in (None, Ramp.schedule("0:4 900:8", 100)):
        with pytest.raises(
            CheckpointError, match=r"batch size ramps up 2 from 0 4 from 3 .* there"
        ):
            DocumentStream([np.full(9, 50)], **both, ramp=other).load_state_dict(saved)
