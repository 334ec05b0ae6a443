import pytest
from helpers.strategies import documents
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.packing.base import Limits
from megatron_wlb.planning.packing.original import OriginalPacker, count_cut


def original(num_micro_batches, window):
    return OriginalPacker(Limits(num_micro_batches, window, window, num_micro_batches * window))


def shape(windows):
    return [[(d.arrival, d.offset, d.length) for d in window] for window in windows]


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), window=st.integers(1, 12))
def test_original_is_the_concatenated_stream_cut_at_every_window(lengths, window):
    packing = original(2, window)
    windows = packing.pack(documents(lengths), 0)
    step = 1
    while packing.waiting:
        windows += packing.flush(step)
        step += 1
    cut = {d.arrival for micro_batch in windows for d in micro_batch if d.offset}
    assert count_cut(lengths, window) == len(cut)
    got = [[(d.arrival, d.offset + i) for d in w for i in range(d.length)] for w in windows]
    stream = [(a, i) for a, length in enumerate(lengths) for i in range(length)]
    assert [w for w in got if w] == [
        stream[start : start + window] for start in range(0, len(stream), window)
    ]


def test_original_refuses_more_tokens_a_step_than_it_runs():
    with pytest.raises(ConfigError, match="runs 2 windows of 10 tokens a step, but 21 tokens"):
        OriginalPacker(Limits(2, 10, 20, 21))
