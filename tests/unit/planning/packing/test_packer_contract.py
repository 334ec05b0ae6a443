"""What every packing promises, over random documents; see ``packing.base.Packer``."""

import time
import tracemalloc

import pytest
from helpers.ledger import Ledger
from helpers.slowness import slowness
from helpers.strategies import documents

from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.data.lengths import sample_lengths
from megatron_wlb.errors import CheckpointError, ConfigError, PackingError
from megatron_wlb.planning.packing import PACKINGS, kind_of, packer, reads
from megatron_wlb.planning.packing.reference import REFERENCE_COST

PACKERS = tuple(name for name in PACKINGS if not kind_of(name).slices)
VARIANTS = ("hold, ahead", "fixed-greedy, arrival")
ALL = (*(name for name in PACKERS if name != "fixed-solver"), *VARIANTS)
CUT = tuple(name for name in ALL if kind_of(name.partition(",")[0]).windows)
WHOLE = tuple(name for name in ALL if name not in CUT)
DELAYING = tuple(name for name in WHOLE if reads(name.partition(",")[0], "max_age"))
"""A new packing is in these by what its class says."""


def build(name: str, **settings):
    """``hold, ahead`` and so on are settings of the packing before the comma."""
    name, _, variant = name.partition(", ")
    if variant == "ahead":
        settings["look_ahead"] = 3
    elif variant == "arrival":
        settings |= {"fixed_grouping": "arrival", "fixed_batches": 3}
    return packer(name, **settings)


def num_tokens(documents):
    return sum(d.length for d in documents)


@pytest.mark.parametrize("name", ALL)
def test_packer_accepts_a_step_without_documents(name):
    packing = build(name, num_micro_batches=3, window=8, cost=REFERENCE_COST)
    assert packing.pack([], 0) == [[], [], []]
    assert packing.flush(1) == [[], [], []]
    assert not packing.waiting


@pytest.mark.parametrize("name", WHOLE)
def test_packer_gives_fewer_documents_than_micro_batches_one_each(name):
    packing = build(name, num_micro_batches=4, window=8, max_age=0, cost=REFERENCE_COST)
    packed = packing.pack(documents([3, 5, 8]), 0)
    assert sorted(sum(d.length for d in m) for m in packed) == [0, 3, 5, 8]


@pytest.mark.parametrize("name", WHOLE)
def test_packer_refuses_a_document_above_s_max(name):
    packing = build(name, num_micro_batches=2, window=8, max_tokens=9, cost=REFERENCE_COST)
    with pytest.raises(PackingError, match=r"document 1 of corpus 0 has 10 tokens.* 9; raise"):
        packing.pack(documents([3, 10]), 0)
    assert not packing.waiting


@pytest.mark.parametrize("name", PACKERS)
def test_packer_refuses_the_state_of_another_packing_or_number(name):
    ours = build(name, num_micro_batches=2, window=8, cost=REFERENCE_COST)
    for other in PACKERS:
        for num_micro_batches in (2, 3):
            theirs = build(
                other, num_micro_batches=num_micro_batches, window=8, cost=REFERENCE_COST
            )
            if (other, num_micro_batches) == (name, 2):
                ours.load_state_dict(theirs.state_dict())
                continue
            expected = f"by {other} into {num_micro_batches} .*by {name} into 2; resume"
            with pytest.raises(CheckpointError, match=expected):
                ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "spoil",
    [
        dict.clear,
        lambda s: s.popitem(),
        lambda s: s.update(waiting=3, queued=[[1]], held={}, ahead=4),
    ],
)
def test_packer_refuses_a_spoilt_state(name, spoil):
    packing = build(name, num_micro_batches=2, window=8, cost=REFERENCE_COST)
    state = packing.state_dict()
    spoil(state)
    with pytest.raises(CheckpointError, match="not the state of a packing"):
        packing.load_state_dict(state)


@pytest.mark.parametrize("name", DELAYING)
def test_packer_refuses_waiting_documents_above_a_lowered_s_max(name):
    common = {"num_micro_batches": 4, "window": 8, "cost": REFERENCE_COST}
    before = build(name, max_tokens=16, **common)
    before.pack(documents([1] * 20 + [16]), 0)
    assert [d.length for d in before.waiting] == [16]
    after = build(name, max_tokens=12, **common)
    with pytest.raises(PackingError, match=r"16 tokens, above max_tokens \(S_max\) 12"):
        after.load_state_dict(before.state_dict())
    assert not after.waiting


def test_packer_names_the_nearest_packing():
    common = {"num_micro_batches": 2, "window": 8, "cost": REFERENCE_COST}
    with pytest.raises(ConfigError, match=r"unknown packing holds; did you mean hold\?"):
        packer("holds", **common)
    with pytest.raises(
        ConfigError, match=r"unknown packing xyz; use one of original, fixed-greedy, .*, hold"
    ):
        packer("xyz", **common)


def test_packer_passes_each_packing_its_settings():
    common = {"num_micro_batches": 2, "window": 8, "cost": REFERENCE_COST, "tau": 1.25}
    assert packer("hold", **common).tau == 1.25
    assert packer("wlb", queue_thresholds=[3, 5], **common).queue_thresholds == [3, 5]
    assert packer("original", **common).limits.max_tokens == 16
    assert packer("original", max_tokens=9, max_age=3, **common).limits.max_age == 3


def reference_stream(num_windows: int, num_micro_batches: int):
    lengths = sample_lengths("reference", num_windows, seed=3)
    return lengths, DocumentStream(
        [lengths], window=131072, step_tokens=num_micro_batches * 131072, seed=0,
        shuffle=False, num_epochs=1,
    )  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_packer_streams_many_documents_in_flat_memory(name):
    """Each token runs exactly once, and the last tenth takes no more memory than the first.

    50,000 documents; `scripts/evidence/bench_packing.py stream` has a million. What is at hand in a
    step swings with the lengths: 1.5 leaves room for that. A packing that kept all it was given,
    100 bytes a document, would take some fifteen times as much.
    """
    lengths, stream = reference_stream(1600, 16)
    packing = build(name, num_micro_batches=16, window=131072, cost=REFERENCE_COST)
    ledger, peaks, step = Ledger(lengths), [], 0
    tracemalloc.start()
    try:
        given = [d for _ in range(packing.look_ahead) for d in stream.next_step()]
        while not stream.exhausted or packing.waiting:
            tracemalloc.reset_peak()
            if stream.exhausted:
                micro_batches = packing.flush(step)
            else:
                micro_batches = packing.pack([*given, *stream.next_step()], step)
            peaks.append(tracemalloc.get_traced_memory()[1])
            given, step = [], step + 1
            for micro_batch in micro_batches:
                ledger.run(micro_batch)
    finally:
        tracemalloc.stop()
    assert (ledger.num_tokens, ledger.lost_tokens) == (lengths.sum(), 0)
    assert len(lengths) > 49_000
    tenth = len(peaks) // 10
    assert max(peaks[-tenth:]) <= 1.5 * max(peaks[tenth : 3 * tenth])  # queues are full by then


@pytest.mark.parametrize("name", ALL)
def test_packer_takes_time_in_proportion_to_documents(name):
    """About: n log n; quadratic growth would make the large steps 256 times as long, not 16-20.

    CPU time, the best of five runs in turn, so that other processes count little. They share caches
    with this one, which `slowness` doesn't see: "hold, ahead" takes 1.8 us a document alone and
    4.2 us beside a busy neighbour.
    """

    def us_per_document(num_micro_batches: int, num_steps: int) -> float:
        _, stream = reference_stream((num_steps + 3) * num_micro_batches, num_micro_batches)
        packing = build(
            name, num_micro_batches=num_micro_batches, window=131072, cost=REFERENCE_COST
        )
        arriving = [stream.next_step() for _ in range(num_steps + packing.look_ahead)]
        given = [d for some in arriving[: packing.look_ahead + 1] for d in some]
        num_ran, start_s = 0, time.process_time()
        for step in range(num_steps):
            micro_batches = packing.pack(given, step)
            num_ran += sum(map(len, micro_batches))
            given = arriving[min(step + packing.look_ahead + 1, len(arriving) - 1)]
        return (time.process_time() - start_s) / num_ran * 1e6

    runs = [(us_per_document(16, 12), us_per_document(256, 3)) for _ in range(5)]
    small, large = map(min, zip(*runs, strict=True))
    assert large <= 6 * slowness()
    assert large <= 3 * small
