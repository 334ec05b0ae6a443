"""What slices of a document hand on keeps memory of its own, and no more than it needs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from helpers.layouts import TREES, Layout
from helpers.plans import trees_for

from megatron_wlb.plan import Units
from megatron_wlb.plan.sharding import Sharding
from megatron_wlb.planning.slicing.room import unit_of, units_of
from megatron_wlb.runtime.gpt import states
from megatron_wlb.runtime.gpt.attention.slice_attention import KVSlice, SliceStore
from megatron_wlb.runtime.gpt.states import Branches, LayerScan, Level, ScannedDocuments

LENGTH, OTHERS, SHAPE = 8, (5, 3, 2), (4, 3)


@pytest.fixture
def store() -> SliceStore:
    return SliceStore()


@pytest.fixture
def scans(store: SliceStore) -> Iterator[LayerScan]:
    """Both slices of a document, each before others."""

    def scan(start: int, stop: int) -> LayerScan:
        cut = KVSlice(store, (0, 0), start, stop, LENGTH)
        lengths = stop - start, *OTHERS
        return LayerScan(ScannedDocuments.of(lengths, 1, Sharding("per-document"), 4, cut), 1)

    return map(scan, (0, LENGTH // 2), (LENGTH // 2, LENGTH))


def test_hooks_are_taken_back() -> None:
    """And what no layer of ours calls is Megatron's meanwhile."""
    twice = {"kernel": lambda x: 2 * x, "_undo_attention_load_balancing": lambda x: x + 1}
    module = SimpleNamespace(__name__="m", _redo_attention_load_balancing=None, **twice)
    states.look_up(module, "kernel", lambda original, x: original(x) + 5, module)
    states.look_up(module, "kernel", lambda original, x: original(x) + 5, module)
    assert module.kernel(1) == 7 and module._undo_attention_load_balancing(1) == 2
    states.uninstall()
    assert {name: getattr(module, name) for name in twice} == twice
    assert module._redo_attention_load_balancing is None


def test_states_and_their_gradients_are_of_one_document(
    store: SliceStore, scans: Iterator[LayerScan]
) -> None:
    """Kernels make those of all documents at once. And a state may be a part of what a pass saves,
    whose memory is emptied where a micro-batch waits in the host's.
    """
    first, second = scans
    anchor = torch.ones((), requires_grad=True)
    made = anchor * torch.arange(12.0).view(SHAPE).expand(1 + len(OTHERS), *SHAPE)
    begun: list[torch.Tensor | None] = []

    def run(level: Level, initial: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        begun.append(initial)
        out = anchor * torch.ones(1, sum(level.rows.lengths))
        return out, made[: len(level.numbers)] if level.is_read else None

    out = first.each("scan", anchor, run)
    (kept,) = store.states.values()
    size = kept.numel() * kept.element_size()
    assert kept.untyped_storage().nbytes() == size
    assert kept.untyped_storage().data_ptr() != made.untyped_storage().data_ptr()
    second.each("scan", anchor, run)
    *none, initial, last = begun
    assert none == [None, None] and last is None and initial is not None
    assert torch.equal(initial, made[:1])
    initial.square().sum().backward()
    (grad,) = store.state_grads.values()
    assert grad.untyped_storage().nbytes() == size
    assert torch.equal(grad, 2 * made[0]) and not store.states
    out.sum().backward()
    assert anchor.grad == out.numel() + 2 * made[0].square().sum()
    assert not store.state_grads


def test_memory_counts_the_states_that_pieces_begin_with_and_leave() -> None:
    layout = Layout("delta", 2, pp=2, vpp=2)
    counted = set()
    for step in range(len(TREES.steps)):
        for m in trees_for(layout.config, TREES, layout.world_size, step):
            if (tree := m.sharing.tree) is None:
                continue
            branches = Branches.of(m.lengths, 4, m.sharing.above, tree.start, tree.left)
            begun, of_taken = 0, len(branches.taken)
            for level in branches.levels:  # where states are read first, some begin with zero
                parents = [] if level.parents is None else level.parents.tolist()
                begun += sum(parent != of_taken or not of_taken for parent in parents)
                of_taken = 0 if level.is_read else of_taken
            waiting = sum(min(2, state.takers) for state in branches.left)
            unit = unit_of(m.spans, m.length, m.sharing)
            assert unit.states == (begun, waiting)
            (same,) = units_of(Units([m.spans], sharing=[m.sharing]), 1)
            assert same.states == unit.states
            counted.add(unit.states)
    assert len(counted) > 5
