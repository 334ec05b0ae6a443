"""Batches that grow, held against Megatron's own calculator of micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from megatron_wlb.data.blend import BlendedStream
from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.data.ramp import Ramp
from megatron_wlb.errors import CheckpointError, ConfigError

SETTINGS = {
    # start, increment, samples, size; micro-batch size, DP, rounded down?
    "plain": ((2, 2, 9, 8), 1, 1, False),
    "share-is-no-whole-number": ((1, 1, 100, 8), 1, 1, False),
    "thirds": ((3, 3, 1000, 24), 3, 1, False),
    "one-increment": ((4, 28, 77, 32), 2, 2, False),
    "steps-over-sizes": ((16, 2, 40, 64), 1, 2, False),
    "a-recipe-s": ((384, 384, 20_000, 1152), 2, 8, False),
    "rounded": ((5, 4, 333, 45), 2, 2, True),
    "rounded-alike": ((17, 1, 500, 31), 2, 4, True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_ramp_follows_megatrons_calculator(name: str) -> None:
    (start, increment, samples, size), micro_batch_size, dp_size, rounds = SETTINGS[name]
    multiple = micro_batch_size * dp_size if rounds else 1
    ramp = Ramp.linear(start, increment, samples, size, multiple)
    theirs = RampupBatchsizeNumMicroBatchesCalculator(
        size, micro_batch_size, dp_size, rounds, 1, start, increment, samples
    )
    consumed, step = 0, 0
    while consumed <= 2 * samples:
        theirs.update(consumed, consistency_check=True)
        assert ramp.before(step) == consumed
        assert ramp.windows(step) == theirs.get() * micro_batch_size * dp_size
        consumed += ramp.windows(step)
        step += 1
    assert ramp.sizes[-1] == ramp.windows(step) == size // multiple * multiple
    assert len(ramp.sizes) > 1


def test_ramp_of_a_hundred_million_samples_is_known_at_once() -> None:
    ramp = Ramp.linear(384, 384, 97_656_250, 1152)
    assert ramp.sizes == (384, 768, 1152)
    assert ramp.windows(0) == 384
    assert 97_656_250 < ramp.before(200_000) < ramp.before(200_001)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((0, 2, 9, 8), "has a start of 0"),
        ((2, 0, 9, 8), "has a increment of 0"),
        ((2, 2, 0, 8), "has a samples of 0"),
        ((8, 2, 9, 8), "does not lead to --global-batch-size 8"),
        ((3, 2, 9, 8), "does not lead to --global-batch-size 8"),
        ((3, 5, 9, 8, 4), "begins below --micro-batch-size × DP = 4"),
    ],
)
def test_ramp_that_megatron_makes_nothing_of_is_refused(numbers: tuple[int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Ramp.linear(*numbers)


def test_step_schedule_changes_where_its_tokens_have_arrived() -> None:
    ramp = Ramp.schedule("0:2 1.2K:4, 0.003M:8", 100)
    assert ramp.thresholds == ((0, 2), (12, 4), (30, 8)) and ramp.sizes == (2, 4, 8)
    consumed = 0
    for step in range(20):  # by the rule of Megatron-LM 0.18, of samples consumed before a step
        size = max(size for samples, size in ramp.thresholds if consumed >= samples)
        assert (ramp.before(step), ramp.windows(step)) == (consumed, size)
        consumed += size
    assert consumed > 60
    assert Ramp.schedule("0:7", 100).sizes == (7,)
    skipped = Ramp.schedule("0:20 500:30 1000:40 9000:41", 100)  # the first step passes 30
    assert skipped.sizes == (20, 40, 41)
    assert skipped.title == "20 from 0 30 from 5 40 from 10 41 from 90"


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
    ramp = Ramp.linear(2, 2, 9, 8)
    lengths = np.random.default_rng(1).integers(1, 101, 400)
    both = {"window": 100, "step_tokens": 800, "seed": 3, "ramp": ramp}
    streams = (DocumentStream([lengths], **both), BlendedStream([lengths] * 2, [0.3, 0.7], **both))
    for stream in streams:
        given = 0
        for step in range(10):
            assert 0 <= given - 100 * ramp.before(step) < 100
            given += sum(document.length for document in stream.next_step())


def test_stream_of_another_ramp_is_refused() -> None:
    ramp = Ramp.linear(2, 2, 9, 8)
    both = {"window": 100, "step_tokens": 800, "seed": 3}
    saved = DocumentStream([np.full(9, 50)], **both, ramp=ramp).state_dict()
    for other in (None, Ramp.linear(4, 2, 9, 8)):
        with pytest.raises(CheckpointError, match="batch size ramps up 2 2 9 to 8 there"):
            DocumentStream([np.full(9, 50)], **both, ramp=other).load_state_dict(saved)
