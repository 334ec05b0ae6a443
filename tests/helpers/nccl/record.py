"""Takes down what a rank of a gloo run asks of torch.distributed, in its program's order."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from helpers.gloo import GlooPool
from helpers.nccl.rules import Call, Group, HostWait, Part, Program, Programs, Wait, hangs
from megatron_wlb.runtime.ranks.hosts import Hosts

COLLECTIVES = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": (
        "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
        "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    ),
    "reduce_scatter": (
        "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
    ),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "barrier": ("barrier", "monitored_barrier"),
}  # fmt: skip
"""Methods of process groups."""
HOST_WAITS = (
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list", "barrier", "monitored_barrier",
)  # fmt: skip
"""Functions that look at what came: their hosts wait for the device."""
OF_GLOO = "emulation/cpu.py"
"""What waits for what is sent, where NCCL's rank would not."""


class Recorder:
    """The program of this rank so far."""

    def __init__(self) -> None:
        self.program: list[Call | Wait | HostWait] = []
        self.rank = dist.get_rank()
        self._places: dict[int, int] = {}
        self._works: dict[int, Any] = {}
        """Those not waited for, or another could get the number of one that is gone."""
        self._groups: dict[int, tuple[Any, Group]] = {}
        self._batch: list[tuple[Any, Part]] | None = None
        self._depth = self._looking = self._between_hosts = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listens to all of torch.distributed in this process."""
        group, c10d = dist.ProcessGroup, sys.modules["torch.distributed.distributed_c10d"]
        with contextlib.ExitStack() as stack:

            def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
                if stock := getattr(owner, name, None):
                    stack.enter_context(
                        mock.patch.object(owner, name, functools.wraps(stock)(make(stock)))
                    )

            for kind in ("send", "recv"):
                replace(group, kind, functools.partial(self._messages, kind))
            for kind, names in COLLECTIVES.items():
                for name in names:
                    replace(group, name, functools.partial(self._collectives, kind))
            replace(torch._C._distributed_c10d.Work, "wait", self._waits)
            replace(torch.cuda, "synchronize", functools.partial(self._host_waits, "device"))
            replace(Hosts, "_reduced", functools.partial(self._inside, "_between_hosts"))
            for owner in (dist, c10d):
                replace(owner, "batch_isend_irecv", self._batches)
                replace(owner, "new_group", functools.partial(self._host_waits, "group"))
                for name in HOST_WAITS:
                    replace(owner, name, functools.partial(self._inside, "_looking"))
            yield

    def _group(self, group: Any) -> Group:
        if id(group) not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._groups[id(group)] = group, Group(group.group_name, ranks)
        return self._groups[id(group)][1]

    def _note(self, group: Any, parts: tuple[Part, ...], works: list[Any], tag: int = 0) -> None:
        known, between_hosts = self._group(group), bool(self._between_hosts or tag)
        if tag:  # NCCL has none
            known = known._replace(name=f"{known.name} tag {tag}")
        call = Call(
            known,
            parts,
            _site(),
            blocks=bool(self._looking or self._between_hosts),
            between_hosts=between_hosts,
            is_batch=len(parts) > 1 or self._batch is not None,
        )
        self.program.append(call)
        self._places |= {id(work): len(self.program) - 1 for work in works}
        self._works |= {id(work): work for work in works}

    def _messages(self, kind: str, stock: Any) -> Any:
        def run(group: Any, tensors: Any, peer: int, tag: int = 0) -> Any:
            work = stock(group, tensors, peer, tag)
            other = (dist.get_global_rank(group, peer),)
            to, source = (other, ()) if kind == "send" else ((), other)
            part = Part(kind, to, source, _bytes(tensors))
            if self._batch is None:
                self._note(group, (part,), [work], tag)
            else:
                self._batch.append((group, part))
            return work

        return run

    def _collectives(self, kind: str, stock: Any) -> Any:
        def run(group: Any, *args: Any, **options: Any) -> Any:
            self._depth += 1
            try:
                work = stock(group, *args, **options)
            finally:
                self._depth -= 1
            if not self._depth and group.size() > 1:
                to: tuple[int, ...] = ()
                source: tuple[int, ...] = ()
                if kind == "all_to_all":
                    ranks = self._group(group).ranks
                    got, sent = args[2:4] if isinstance(args[0], torch.Tensor) else ((), ())
                    to, source = _some(ranks, sent), _some(ranks, got)
                self._note(group, (Part(kind, to, source, _bytes(args)),), [work])
            return work

        return run

    def _waits(self, stock: Any) -> Any:
        def run(work: Any, *args: Any, **options: Any) -> Any:
            place, site = self._places.get(id(work)), _site()
            if place is not None and OF_GLOO not in site:
                self.program.append(Wait(place, site))
            result = stock(work, *args, **options)
            self._places.pop(id(work), None)
            self._works.pop(id(work), None)
            return result

        return run

    def _batches(self, stock: Any) -> Any:
        def run(ops: Any) -> Any:
            self._batch = []
            try:
                works = stock(ops)
                for group in {id(own): own for own, _ in self._batch}.values():
                    parts = tuple(part for own, part in self._batch if own is group)
                    pairs = zip(self._batch, works, strict=True)
                    self._note(group, parts, [work for (own, _), work in pairs if own is group])
            finally:
                self._batch = None
            return works

        return run

    def _inside(self, counter: str, stock: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            setattr(self, counter, getattr(self, counter) + 1)
            try:
                return stock(*args, **options)
            finally:
                setattr(self, counter, getattr(self, counter) - 1)

        return run

    def _host_waits(self, what: str, stock: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self.program.append(HostWait(what, _site()))
            return self._inside("_looking", stock)(*args, **options)

        return run


def recorded(function: Callable[..., Any], *args: Any) -> tuple[Any, Program]:
    """A case of the tests on this rank: what it returns, and what it asks."""
    recorder = Recorder()
    with recorder.listening():
        result = function(*args)
    return result, recorder.program


def _some(ranks: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """The ranks whose part of an all-to-all is not empty; no sizes are equal ones."""
    return tuple(
        rank for rank, size in zip(ranks, [*sizes] or [1] * len(ranks), strict=True) if size
    )


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _site() -> str:
    """Where this was called from, outside of torch and of this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if "/torch/" not in code.co_filename and code.co_filename != __file__:
            name = "/".join(code.co_filename.split("/")[-2:])
            return f"{name}:{frame.f_lineno} ({code.co_name})"
        frame = frame.f_back
    return ""


def recorded_programs(ranks: Sequence[tuple[Any, Program]]) -> Programs:
    """The programs of a case, of what its ranks return."""
    return dict(enumerate(program for _, program in ranks))


def hold_to_rules(pool: GlooPool) -> None:
    """Lets each case that a pool runs fail if what it asks could hang."""
    run = pool.run

    def held(world_size: int, function: Any, *args: Any, timeout_s: float = 120.0) -> list[Any]:
        if world_size == 1 or function is recorded:
            return run(world_size, function, *args, timeout_s=timeout_s)
        ranks = run(world_size, recorded, function, *args, timeout_s=4 * timeout_s)
        found = hangs(recorded_programs(ranks))
        assert not found, f"{function.__name__}: {found}"
        return [result for result, _ in ranks]

    pool.run = held  # type: ignore[method-assign]
