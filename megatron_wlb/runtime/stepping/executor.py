"""Runs a replica's micro-batches in our own order: that of documents in slices.

Megatron's schedules run backward passes in the order of the forward ones. The slices of a document
need the reverse (:func:`megatron_wlb.cost.schedule.order.sliced`), or their keys and values miss
the gradients of the slices behind them. So here is a loop of our own around what is Megatron's: the
passes, data-parallel reduction, and the end of a step. It mirrors
``forward_backward_pipelining_without_interleaving``.

Sends are not waited for, receives are posted one action ahead, and each directed pair of neighbours
has a communicator of its own for activations and one for gradients. When an output is sent says
:mod:`megatron_wlb.cost.schedule.messages`, so that no ranks wait in a circle under NCCL's rules.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_wlb.cost.schedule.messages import AHEAD, departures
from megatron_wlb.cost.schedule.order import Action, Order
from megatron_wlb.errors import PlanError
from megatron_wlb.runtime.ranks import watchdog
from megatron_wlb.runtime.ranks.hosts import between_hosts
from megatron_wlb.runtime.ranks.transfer import open_group
from megatron_wlb.runtime.stepping.communicator import Contents, compare_contents
from megatron_wlb.runtime.stepping.offload import Passage


@dataclass(frozen=True)
class Links:
    """The communicators between the ranks of a pipeline."""

    rank: int
    ranks: tuple[int, ...]
    """Global ranks of the pipeline's stages."""
    groups: Mapping[tuple[str, int], dist.ProcessGroup]
    """By the kind of action and :func:`colour` of the sender: then a rank either sends to one other
    rank in a group, or receives from one, also where all messages of a group are in one stream.
    """
    num_chunks: int = 1
    hosts: dist.ProcessGroup | None = None
    """A group of gloo's for what is said of messages, with ``verify``."""

    @classmethod
    def open(
        cls,
        pp_group: dist.ProcessGroup,
        timeout: datetime.timedelta | None = None,
        num_chunks: int = 1,
        given: Sequence[dist.ProcessGroup] = (),
        verify: bool = False,
    ) -> Links:
        """Makes what is missing of the communicators, but for :meth:`num_more` that are ``given``;
        to be called by all ranks of the pipeline, or else by all of the world.
        """
        rank, ranks = pp_group.rank(), tuple(dist.get_process_group_ranks(pp_group))
        size = len(ranks)
        if size == 1:
            return cls(rank, ranks, {})
        more = given or [
            open_group(ranks, timeout, like=pp_group) for _ in range(cls.num_more(size, num_chunks))
        ]
        groups = dict(zip(_colours(size, num_chunks), [pp_group, *more], strict=True))
        hosts = between_hosts(pp_group, timeout) if verify else None
        links = cls(rank, ranks, groups, num_chunks, hosts)
        # NCCL connects two ranks at their first message, and blocks both hosts until then. A
        # receive is posted before the pass that its sender may still wait for.
        token = torch.zeros(1, device=torch.cuda.current_device())
        for kind, sender in _senders(size, num_chunks):
            receiver = (sender + (1 if kind == "F" else -1)) % size
            group = groups[kind, colour(kind, sender, size)]
            if rank == sender:
                dist.send(token, ranks[receiver], group=group)
            elif rank == receiver:
                dist.recv(token, ranks[sender], group=group)
        return links

    @staticmethod
    def num_more(pp_size: int, num_chunks: int) -> int:
        """Communicators that a pipeline needs besides Megatron's."""
        return len(_colours(pp_size, num_chunks)) - 1

    def stage(self, chunk: int) -> int:
        """The virtual stage of a chunk on this rank."""
        return chunk * len(self.ranks) + self.rank

    def is_last(self, chunk: int) -> bool:
        """Whether a chunk on this rank ends in the loss."""
        return self.stage(chunk) == self.num_chunks * len(self.ranks) - 1

    def peer(self, action: Action, distance: int) -> tuple[int, dist.ProcessGroup] | None:
        """The rank of the virtual stage so far on in an action's direction, and the communicator to
        it; None where there is no such stage, or no other rank.
        """
        step = distance if action.kind == "F" else -distance
        size, stage = len(self.ranks), self.stage(action.chunk)
        if size == 1 or not 0 <= stage + step < self.num_chunks * size:
            return None
        peer = (stage + step) % size
        sender = self.rank if distance > 0 else peer
        return self.ranks[peer], self.groups[action.kind, colour(action.kind, sender, size)]


def colour(kind: str, sender: int, pp_size: int) -> int:
    """Which of the groups of a kind has the messages of a stage's rank: neighbours differ."""
    is_odd_way_round = pp_size % 2 and sender == (pp_size - 1 if kind == "F" else 0)
    return 2 if is_odd_way_round else sender % 2


def _senders(pp_size: int, num_chunks: int) -> list[tuple[str, int]]:
    """Kinds and ranks that send, in an order in which they can wait for each other."""
    forward = [("F", rank) for rank in range(pp_size - 1 + (num_chunks > 1))]
    return forward + [("B", pp_size - 1 - rank) for _, rank in forward]


def _colours(pp_size: int, num_chunks: int) -> list[tuple[str, int]]:
    """The keys of :attr:`Links.groups`, the first is Megatron's."""
    ways = _senders(pp_size, num_chunks)
    return [*dict.fromkeys((kind, colour(kind, rank, pp_size)) for kind, rank in ways)]


class _Sent(NamedTuple):
    """A tensor on its way, kept until it is there."""

    work: dist.Work
    tensor: torch.Tensor
    peer: int
    group: dist.ProcessGroup | None
    tag: int

    def wait(self) -> None:
        with watchdog.waiting_for([self.peer]):
            self.work.wait()


@dataclass
class Transfers:
    """The messages of one run on a rank.

    ``lengths`` are the tokens of each micro-batch's tensor between stages. With ``verify`` each
    message comes after its length and :class:`Contents`, which the hosts compare, and no receive is
    posted ahead.
    """

    links: Links
    lengths: Sequence[int]
    config: TransformerConfig
    verify: bool
    label: str
    _sends: list[_Sent] = field(default_factory=list)

    @property
    def ahead(self) -> int:
        """How many actions before its own a receive is posted."""
        return 0 if self.verify else AHEAD

    def post(self, action: Action) -> _Arrival | None:
        """Starts to receive what an action needs; None where that comes from no other rank."""
        peer = self.links.peer(action, -1)
        return None if peer is None else _Arrival(self, action, *peer)

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Sends an action's output to the other rank that needs it."""
        link = self.links.peer(action, 1)
        assert link is not None
        self._let_go(*link)
        if self.verify:
            facts = [tensor.shape[0], *Contents.of(tensor)]
            self._send(torch.tensor(facts), link[0], self.links.hosts, _tag(action))
        self._send(tensor, *link)

    def end(self) -> None:
        """Waits until all is sent."""
        for sent in self._sends:
            sent.wait()
        self._sends.clear()

    def _let_go(self, peer: int, group: dist.ProcessGroup) -> None:
        """Waits for what was sent before it, and forgets it: a host that runs far ahead of its
        device would keep all. By the plan it has been received when the next one is sent.
        """
        for sent in self._sends:
            if sent[2:] == (peer, group, 0):
                sent.wait()
        self._sends = [sent for sent in self._sends if sent[2:] != (peer, group, 0)]

    def _send(
        self, tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None, tag: int = 0
    ) -> None:
        work = dist.isend(tensor, peer, group=group, tag=tag)
        assert work is not None
        self._sends.append(_Sent(work, tensor, peer, group, tag))


def _tag(action: Action) -> int:
    """Tells what hosts say of activations from what they say of gradients, and from tensors."""
    return 1 + (action.kind == "B")


class _Arrival:
    """A tensor that is received."""

    def __init__(
        self, transfers: Transfers, action: Action, peer: int, group: dist.ProcessGroup
    ) -> None:
        self._transfers, self._action, self._peer = transfers, action, peer
        self._group = group
        self._work: dist.Work | None = None
        config = transfers.config
        self._tensor = torch.empty(
            (transfers.lengths[action.micro_batch], 1, config.hidden_size),
            device=torch.cuda.current_device(),
            dtype=config.pipeline_dtype,
            requires_grad=True,
        )
        if not transfers.verify:
            self._post()

    def wait(self) -> torch.Tensor:
        """Returns the tensor once it is there, for the kernels that come next.

        Raises :class:`PlanError` where ``verify`` finds another length than the plan's.
        """
        sent = None
        with watchdog.waiting_for([self._peer]):
            if self._work is None:
                sent = self._announced()
                self._post()
            assert self._work is not None
            self._work.wait()
        if sent is not None:
            what = f"{self._transfers.label}: {self._what}"
            compare_contents(what, self._peer, sent, self._tensor)
        return self._tensor

    def _post(self) -> None:
        self._work = dist.irecv(self._tensor, self._peer, group=self._group)

    def _announced(self) -> Contents:
        """Receives the length, which is compared, and what the tensor will hold."""
        facts = torch.zeros(1 + len(Contents._fields), dtype=torch.int64)
        hosts = self._transfers.links.hosts
        dist.recv(facts, self._peer, group=hosts, tag=_tag(self._action))
        num_tokens, *contents = facts.tolist()
        if num_tokens != len(self._tensor):
            stage = self._transfers.links.stage(self._action.chunk)
            raise PlanError(
                f"{self._transfers.label}: stage {stage} (rank {dist.get_rank()}) expects "
                f"{len(self._tensor)} tokens for {self._what} by its plan, but rank {self._peer} "
                f"sends {num_tokens}; the ranks do not run the same plan"
            )
        return Contents(*contents)

    @property
    def _what(self) -> str:
        kind = "activation" if self._action.kind == "F" else "gradient"
        return f"the {kind} of micro-batch {self._action.micro_batch}, chunk {self._action.chunk}"


def run_actions(
    order: Order,
    transfers: Transfers,
    *,
    forward_step_func: Any,
    data_iterator: Sequence[Iterator[Any]],
    model: Sequence[torch.nn.Module],
    num_microbatches: int,
    forward_only: bool,
    pg_collection: Any,
    passage: Passage | None = None,
    reduce_late: bool = False,
    first_val_step: bool | None = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Runs a rank's actions of an order, as one of Megatron's schedule functions would.

    The parameters by name are theirs, and so is the result: what the losses report, on the last
    stage. Gradients are left in the model, reduced. ``forward_only`` leaves the backwards out. With
    a ``passage``, hosted micro-batches wait in the host's memory. With ``reduce_late`` reduction
    begins after the last backward, and not during it: where replicas would come to it in unlike
    orders. Timers of single passes are off, but for timers that have ``waits`` and it is False.
    """
    config, links = transfers.config, transfers.links
    if forward_only:
        order = [[action for action in own if action.kind == "F"] for own in order]
    actions = order[links.rank]
    departing = departures(order, links.rank, transfers.ahead)
    outputs: dict[int, torch.Tensor] = {}
    """What passes made, by number, until it is sent."""
    begins_itself = config.grad_sync_func is None or links.rank == 0
    last = {action.chunk: action for action in actions if action.kind == "B"}
    syncs = [contextlib.ExitStack() for _ in model]
    reports: list[Any] = []
    num_tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
    running: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
    timers = config.timers
    if timers is not None:
        timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    if getattr(timers, "waits", True):
        config.timers = None  # Megatron's wait for the device, whose next receive is posted.
    with contextlib.ExitStack() as no_sync:
        no_sync.callback(setattr, config, "timers", timers)
        for stack, begin in zip(syncs, _each(config.no_sync_func, model), strict=True):
            no_sync.enter_context(stack)
            if begin is not None and not forward_only:
                stack.enter_context(begin())
        posted = transfers.post(actions[0])
        for at, (action, following) in enumerate(zip(actions, [*actions[1:], None], strict=True)):
            if passage is not None:
                passage.before(action)
            arrival = posted
            posted = None if following is None else transfers.post(following)
            received = None if arrival is None else arrival.wait()
            chunk, number, sends = action.chunk, action.micro_batch, bool(links.peer(action, 1))
            if action.kind == "F":
                check, is_last = schedules.check_first_val_step, links.is_last(chunk)
                output, tokens = schedules.forward_step(
                    forward_step_func,
                    data_iterator[chunk],
                    model[chunk],
                    num_microbatches,
                    received,
                    reports,
                    config,
                    pg_collection.cp.size(),
                    is_first_microbatch=check(first_val_step, forward_only, number == 0),
                    current_microbatch=number,
                    vp_stage=chunk if len(model) > 1 else None,
                    is_last_stage=is_last,
                )
                num_tokens += tokens
                if sends:  # an alias: the tensor itself may be emptied before it is sent
                    outputs[at] = output.detach()
                if passage is not None:
                    passage.behind(action, received, output)
                if not forward_only:
                    running[chunk, number] = received, output
                    if not is_last:
                        schedules.deallocate_output_tensor(
                            output, config.deallocate_pipeline_outputs
                        )
            else:
                if action == last[chunk] and not reduce_late and begins_itself:
                    # Not before: reduction starts as soon as a parameter has a gradient. With a
                    # grad_sync_func the stages behind the first reduce below, in the pipeline's
                    # tail.
                    syncs[chunk].close()
                entered, output = running.pop((chunk, number))
                gradient = schedules.backward_step(entered, output, received, config)
                if sends:
                    outputs[at] = gradient.detach()
            for source in departing[at]:
                transfers.send(actions[source], outputs.pop(source))
    if not forward_only:
        for module, sync in zip(model, _each(config.grad_sync_func, model), strict=True):
            if not begins_itself:
                sync(module.parameters())
            elif reduce_late and config.no_sync_func is not None:
                module.start_grad_sync()  # type: ignore[operator]
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func(
                [*model],
                num_tokens if config.calculate_per_token_loss else None,
                pg_collection=pg_collection,
                force_all_reduce=force_all_reduce,
            )
    transfers.end()
    if timers is not None:
        timers("forward-backward").stop()
    return reports


def _each(given: Any, model: Sequence[torch.nn.Module]) -> Sequence[Any]:
    """Megatron's function of each chunk: a list where there are several, or None of all."""
    return given if isinstance(given, (list, tuple)) else [given] * len(model)
