"""The programs of the executor of slices, rank by rank, without a model and without peers.

What it asks of torch.distributed depends on no tensor: real links, transfers and actions run here
with passes that return empty tensors, in some milliseconds for any layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from helpers.nccl.rules import Call, Group, Part, Programs, Wait
from megatron_wlb.cost.schedule.order import Action, sliced
from megatron_wlb.runtime.stepping.executor import Links, Transfers, run_actions


@dataclass(frozen=True)
class _Group:
    """A process group, as far as links and transfers look at it."""

    name: str
    ranks: tuple[int, ...]
    own: int

    def rank(self) -> int:
        return self.ranks.index(self.own)

    def size(self) -> int:
        return len(self.ranks)


@dataclass
class _Writer:
    """Takes down what a rank asks."""

    program: list[Call | Wait] = field(default_factory=list)

    def call(self, kind: str, tensor: torch.Tensor, peer: int, group: _Group, tag: int) -> Any:
        between_hosts = group.name == "hosts"
        name = f"{group.name} tag {tag}" if between_hosts else group.name
        to, source = ((peer,), ()) if kind == "send" else ((), (peer,))
        part = Part(kind, to, source, tensor.nbytes)
        self.program.append(Call(Group(name, group.ranks), (part,), between_hosts=between_hosts))
        place = len(self.program) - 1
        return SimpleNamespace(
            wait=lambda: self.program.append(Wait(place)), is_completed=lambda: False
        )

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        def begun(kind: str) -> Callable[..., Any]:
            return lambda tensor, peer, group, tag=0: self.call(kind, tensor, peer, group, tag)

        def waited(kind: str) -> Callable[..., None]:
            return lambda tensor, peer, group, tag=0: begun(kind)(tensor, peer, group, tag).wait()

        with mock.patch.multiple(
            dist,
            isend=begun("send"),
            irecv=begun("recv"),
            send=waited("send"),
            recv=waited("recv"),
            get_process_group_ranks=lambda group: [*group.ranks],
        ):
            yield


def programs(
    pp_size: int,
    vpp_size: int,
    chains: Sequence[int],
    *,
    forward_only: bool = False,
    verify: bool = False,
    timers: Any = None,
) -> Programs:
    """What each rank of a pipeline asks in one run of chains of slices, connecting included."""
    order = sliced(pp_size, chains, vpp_size)
    ranks = tuple(range(pp_size))
    return {
        rank: _program(rank, ranks, order, vpp_size, sum(chains), forward_only, verify, timers)
        for rank in ranks
    }


def _program(
    rank: int,
    ranks: tuple[int, ...],
    order: list[list[Action]],
    vpp_size: int,
    num: int,
    forward_only: bool,
    verify: bool,
    timers: Any,
) -> list[Call | Wait]:
    writer = _Writer()
    more = [_Group(f"more {n}", ranks, rank) for n in range(Links.num_more(len(ranks), vpp_size))]
    config: Any = SimpleNamespace(
        hidden_size=1, pipeline_dtype=torch.float32, timers=timers, grad_sync_func=None,
        barrier_with_L1_time=False, no_sync_func=None, finalize_model_grads_func=None,
        deallocate_pipeline_outputs=False, calculate_per_token_loss=False,
    )  # fmt: skip
    lengths = [1 + n for n in range(num)]

    def forward_step(*_: Any, current_microbatch: int, **__: Any) -> Any:
        assert config.timers is None
        output = torch.empty(lengths[current_microbatch], 1, 1)
        return output, torch.zeros([], dtype=torch.int)

    passes = SimpleNamespace(
        forward_step=forward_step,
        backward_step=lambda _, output, *__: torch.empty_like(output),
        check_first_val_step=lambda *_: None,
        deallocate_output_tensor=lambda *_: None,
    )
    pp_group: Any = _Group("pp", ranks, rank)
    given: Any = more
    with (
        writer.listening(),
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.multiple(schedules, **vars(passes)),
        mock.patch(
            "megatron_wlb.runtime.stepping.executor.between_hosts",
            lambda group, _: _Group("hosts", group.ranks, group.own),
        ),
        mock.patch("megatron_wlb.runtime.stepping.executor.Contents.of", lambda _: (0, 0, 0)),
        mock.patch("megatron_wlb.runtime.stepping.executor._Arrival._announced", _announced),
        mock.patch("megatron_wlb.runtime.stepping.executor.compare_contents"),
    ):
        links = Links.open(pp_group, None, vpp_size, given, verify)
        transfers = Transfers(links, lengths, config, verify, "test")
        run_actions(
            order,
            transfers,
            forward_step_func=None,
            data_iterator=[iter(())] * vpp_size,
            model=[torch.nn.Identity()] * vpp_size,
            num_microbatches=num,
            forward_only=forward_only,
            pg_collection=SimpleNamespace(cp=_Group("cp", (rank,), rank)),
        )
    return writer.program


def _announced(arrival: Any) -> Any:
    """The host waits for what is said of a message, and believes it."""
    facts, hosts = torch.zeros(4, dtype=torch.int64), arrival._transfers.links.hosts
    dist.recv(facts, arrival._peer, group=hosts, tag=1 + (arrival._action.kind == "B"))
    return (0, 0, 0)
