"""Bytes of slices, counted by hand: buffers of documents, and what their attention does not keep.

The model has keys of 32 numbers in each of 8 layers: a token's keys and values are 128 bytes in
bf16, their gradients 256 in fp32.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product

import pytest
from _quickstart.recording import chained

from megatron_wlb.cli.model import read_model
from megatron_wlb.cost import Execution, MemoryModel, ModelShape, Parallelism, Recompute
from megatron_wlb.cost.schedule.order import Action, columns_of, sliced
from megatron_wlb.cost.slices import Slice, SliceTape, Unit, UnitTable
from megatron_wlb.cost.tape import Operation, Tape

SHAPE = ModelShape(64, 192, 8, 4, 2, 16, 512, True, rms_norm=True, linear_bias=False)
KEYS, GRADIENTS = 2 * 2 * 32, 2 * 4 * 32
THREE = chained([[300], [200], [100]], (3,))


def model(recompute: Recompute = Recompute(), **layout: int) -> MemoryModel:  # noqa: B008  # frozen
    return MemoryModel(SHAPE, Execution(Parallelism(**layout), recompute, kernels="torch"))


def kept(memory: MemoryModel, rank: int, units: list[Unit] | tuple[Unit, ...]) -> list[float]:
    order = sliced(memory.parallelism.pp_size, (len(units),))
    return memory.program_bytes(rank, order[rank], UnitTable.of(units)).kept


def peak_bytes_of(
    memory: MemoryModel, rank: int, actions: Sequence[Action], units: Sequence[Unit]
) -> float:
    uses = memory.program_bytes(rank, actions, UnitTable.of(units))
    return memory.alive_bytes(rank, max(uses.peak))


def test_document_in_three_slices_is_kept_by_hand() -> None:
    """On PP=2: its buffers of 4 layers are whole from the first forward to the first's backward."""
    memory = model(pp_size=2)
    for rank in (0, 1):
        # Neither the product of queries, keys and values nor the rotated keys.
        slice_bytes = memory.tapes[rank][0].saved_per_token - 4 * 2 * (64 + 2 * 32 + 32)
        keys, gradients = 600 * 4 * KEYS, 600 * 4 * GRADIENTS
        assert kept(memory, rank, THREE) == pytest.approx(
            [
                keys + 300 * slice_bytes,
                keys + 500 * slice_bytes,
                keys + 600 * slice_bytes,
                keys + gradients + 500 * slice_bytes,
                keys + gradients + 300 * slice_bytes,
                0.0,
            ]
        )


def by_layers(memory: MemoryModel, kind: str, unit: Unit) -> float:
    """The most alive in an action of rank 0, operation by operation and buffer by buffer."""
    assert unit.slice is not None
    _, start, stop, length = unit.slice
    operations = memory.tapes[0][0].operations
    layers = [at for at, o in enumerate(operations) if o.name == "attention"]
    keys = {at: length * KEYS * (kind == "B" or start > 0) for at in layers}
    gradients = {at: length * GRADIENTS * (kind == "B" and stop < length) for at in layers}
    saved = [o.saved - o.cached for o in operations]
    held = sum(saved) * unit.num_tokens if kind == "B" else 0.0
    peak = held + sum(keys.values()) + sum(gradients.values())
    given = 0.0
    for at in range(len(operations)) if kind == "F" else reversed(range(len(operations))):
        if at in layers:
            keys[at] = length * KEYS
            gradients[at] = length * GRADIENTS * (kind == "B")
        if kind == "F":
            given = (0.0 if at - 1 in layers else given) + operations[at].cached
            working = (given + operations[at].forward) * unit.num_tokens
            held += saved[at] * unit.num_tokens
        else:
            working = operations[at].backward * unit.num_tokens + operations[at].weight_bytes
            working += start * KEYS * (at in layers)
        peak = max(peak, held + working + sum(keys.values()) + sum(gradients.values()))
        if kind == "B":
            held -= saved[at] * unit.num_tokens
            if at in layers and start == 0:
                keys[at] = gradients[at] = 0
    return peak


@pytest.mark.parametrize("pp_size", [1, 2])
def test_peak_of_a_slice_is_found_operation_by_operation(pp_size: int) -> None:
    memory = model(pp_size=pp_size)
    units = chained([[700], [1], [299], [4000]], (4,))
    actions = sliced(1, (4,))[0]
    before = 0.0
    uses = memory.program_bytes(0, actions, UnitTable.of(units))
    in_transit = memory.sent_ahead_bytes(0, columns_of(actions), UnitTable.of(units))
    for action, peak, kept, transit in zip(actions, *uses, in_transit, strict=True):
        unit = units[action.micro_batch]
        expected = by_layers(memory, action.kind, unit)
        _, start, stop, _ = unit.slice or (0, 0, 0, 0)
        own = 0.0  # what it held before is in both
        if action.kind == "B" or start:
            own += 5000 * (8 // pp_size) * KEYS
        if action.kind == "B":
            own += 5000 * (8 // pp_size) * GRADIENTS * (stop < 5000)
            saved = sum(o.saved - o.cached for o in memory.tapes[0][0].operations)
            own += saved * unit.num_tokens
        assert peak == pytest.approx(before - own + transit + expected)
        assert (transit > 0) == (pp_size > 1 and action != actions[-1])
        before = kept


def test_programs_of_whole_documents_need_what_megatron_s_do_and_what_is_on_the_way() -> None:
    memory, lengths = model(pp_size=2), [300, 200, 500, 100]
    order = sliced(2, (1, 1, 1, 1))
    for rank in (0, 1):
        units = UnitTable.of(map(Unit, lengths))
        ours = memory.program_bytes(rank, order[rank], units)
        theirs = memory.activation_bytes(rank, order[rank], units)
        assert ours.kept == theirs.kept
        more = [one - other for one, other in zip(ours.peak, theirs.peak, strict=True)]
        assert min(more) >= 0 and 0 < max(more) <= 3 * 500 * 2 * 64
        peak = peak_bytes_of(memory, rank, order[rank], list(map(Unit, lengths)))
        assert peak <= memory.peak_bytes(rank, lengths) + max(more)
        assert peak >= memory.peak_bytes(rank, lengths)


def test_walk_over_a_long_program_is_fast() -> None:
    lengths = [[100 + at] for at in range(64)]
    units = chained(lengths, (64,))
    order = sliced(4, (64,))
    seconds = []
    for _ in range(3):
        memory = model(pp_size=4)  # what it has learnt is not to count
        peak_bytes_of(memory, 0, order[0][:1], units)
        start = time.process_time()
        for rank in range(4):
            peak_bytes_of(memory, rank, order[rank], units)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1  # measured: 12 ms


@pytest.mark.parametrize("recompute", [Recompute(), Recompute("full", "uniform", 1)])
def test_bytes_of_many_units_are_those_of_each(recompute: Recompute) -> None:
    """To the bit."""
    lengths = [[100 + 7 * at, 20] if at % 5 == 4 else [100 + 7 * at] for at in range(600)]
    units = [*chained(lengths, (600,)), *(Unit(n) for n in range(1, 300))]
    memory = model(recompute, pp_size=2)
    for kind, tape in product("FB", (own for rank in memory.tapes for own in rank)):
        every = memory.unit_bytes(tape, kind, UnitTable.of(units))
        for at in range(0, len(units), 37):
            alone = memory.unit_bytes(tape, kind, UnitTable.of(units[at : at + 1]))
            assert (every[at] == alone[0]).all()


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("recompute", [Recompute(), Recompute("full", "block", 5)])
def test_equal_layers_peak_in_the_first_or_the_last(name: str, recompute: Recompute) -> None:
    shape, execution = read_model(name).shape, Execution(Parallelism(cp_size=2), recompute)
    ((tape,),) = MemoryModel(shape, execution).tapes
    assert max(num for num, _ in tape.runs) > 3
    cuts = [(0, 500), (500, 4000), (4000, 90_000), (90_000, 90_001), (90_001, 100_000)]
    units = [
        Unit(b - a + 64 * (a % 3), Slice(0, a, b, 100_000), divided=b % 2 > 0) for a, b in cuts
    ]
    every = Tape.of(tape.operations)
    for kind in "FB":
        found, expected = (
            SliceTape(one, 2).action_bytes(kind, UnitTable.of(units)) for one in (tape, every)
        )
        assert found.tolist() == expected.tolist()
        peaks = (one.peak_bytes([1, 10**6], backward=kind == "B").tolist() for one in (tape, every))
        assert next(peaks) == next(peaks)


def test_a_slice_keeps_the_state_it_leaves_and_the_one_a_kernel_took() -> None:
    """Two layers with states of 3 and 5 bytes; the second runs again and so keeps none taken."""
    again = Operation("again", state=5, inner=(Operation("inside"),))
    tape = SliceTape(Tape.of((Operation("scan", state=3), again)))
    slices = UnitTable.of([Unit(10, Slice(0, n, n + 10, 30)) for n in (0, 10, 20)])
    assert tape.action_bytes("F", slices)[:, 2].tolist() == [8, 8 + 3, 3]
