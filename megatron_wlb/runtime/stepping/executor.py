"""Runs a replica's micro-batches in our own order: that of documents in slices.

Megatron's schedules run backward passes in the order of the forward ones. The slices of a document
need the reverse (:func:`megatron_wlb.cost.schedule.order.sliced`), or their keys and values miss
the gradients of the slices behind them. So here is a loop of our own around what is Megatron's: the
passes, data-parallel reduction, and the end of a step. It mirrors
``forward_backward_pipelining_without_interleaving``.

No transfer waits for another: sends are not waited for, receives are posted one action ahead, and
activations and gradients have communicators of their own, as messages of one communicator pass in
order. So have, with several model chunks on two ranks, messages that go on to the next chunk.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_wlb.cost.schedule.order import Action
from megatron_wlb.errors import PlanError
from megatron_wlb.runtime.ranks import watchdog
from megatron_wlb.runtime.ranks.transfer import open_group
from megatron_wlb.runtime.stepping.communicator import Contents, compare_contents
from megatron_wlb.runtime.stepping.offload import Passage

TAKES_MODEL_TYPE = "model_type" in inspect.signature(schedules.backward_step).parameters
"""Whether megatron-core is 0.16, whose backward pass takes a parameter that it does not use."""


MOST_SENDS = 4
"""Messages that a rank holds until they are sent, where it must wait for that."""


@dataclass(frozen=True)
class Links:
    """The communicators between the ranks of a pipeline."""

    rank: int
    ranks: tuple[int, ...]
    """Global ranks of the pipeline's stages."""
    groups: Mapping[tuple[str, bool], dist.ProcessGroup]
    """By the kind of action, and whether its message goes from one chunk to another."""
    num_chunks: int = 1

    @classmethod
    def open(
        cls,
        pp_group: dist.ProcessGroup,
        timeout: datetime.timedelta | None = None,
        num_chunks: int = 1,
        given: Sequence[dist.ProcessGroup] = (),
    ) -> Links:
        """Makes what is missing of the communicators, but for :meth:`num_more` that are ``given``;
        to be called by all ranks of the pipeline, or else by all of the world.
        """
        rank, ranks = pp_group.rank(), tuple(dist.get_process_group_ranks(pp_group))
        size = len(ranks)
        if size == 1:
            return cls(rank, ranks, {})
        backward, *around = given or [
            open_group(ranks, timeout, like=pp_group) for _ in range(cls.num_more(size, num_chunks))
        ]
        groups = {("F", False): pp_group, ("B", False): backward}
        groups |= zip((("F", True), ("B", True)), around or (pp_group, backward), strict=True)
        # NCCL connects two ranks at their first message, and blocks both hosts until then. A
        # receive is posted before the pass that its sender may still wait for.
        token = torch.zeros(1, device=torch.cuda.current_device())
        if rank + 1 < size:
            dist.recv(token, ranks[rank + 1], group=groups["B", False])
        if rank > 0:
            dist.send(token, ranks[rank - 1], group=groups["B", False])
        for kind, sender, receiver in (("B", 0, size - 1), ("F", size - 1, 0)):
            if num_chunks > 1 and rank == sender:
                dist.send(token, ranks[receiver], group=groups[kind, True])
            elif num_chunks > 1 and rank == receiver:
                dist.recv(token, ranks[sender], group=groups[kind, True])
        return cls(rank, ranks, groups, num_chunks)

    @staticmethod
    def num_more(pp_size: int, num_chunks: int) -> int:
        """Communicators that a pipeline needs besides Megatron's: one for gradients, and of two
        ranks with several chunks one for each way around, as each is the other's next and last.
        """
        return 3 if pp_size == 2 and num_chunks > 1 else 1

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
        goes_on = (stage + step) // size != stage // size
        return self.ranks[(stage + step) % size], self.groups[action.kind, goes_on]


@dataclass
class Transfers:
    """The messages of one run on a rank.

    ``lengths`` are the tokens of each micro-batch's tensor between stages. With ``verify`` each
    message comes after its length and :class:`Contents`, which are compared, and no receive is
    posted ahead.
    """

    links: Links
    lengths: Sequence[int]
    config: TransformerConfig
    verify: bool
    label: str
    _sends: list[tuple[dist.Work, torch.Tensor, int]] = field(default_factory=list)
    """What is on its way, kept until then, and to whom."""

    def post(self, action: Action) -> _Arrival | None:
        """Starts to receive what an action needs; None where that comes from no other rank."""
        peer = self.links.peer(action, -1)
        return None if peer is None else _Arrival(self, action, *peer)

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Sends an action's output to where it is needed, if to another rank."""
        link = self.links.peer(action, 1)
        if link is None:
            return
        self._sends = [sent for sent in self._sends if not sent[0].is_completed()]
        if tensor.device.type == "cpu":
            # Gloo's sends are complete only once they are waited for. The peer comes to the first
            # of them without any message that is still to be sent; with several chunks it may first
            # need those that go around.
            num_chunks = self.links.num_chunks
            around = num_chunks * len(self.links.ranks) if num_chunks > 1 else 1
            while len(self._sends) > MOST_SENDS * around:
                self._wait_for_first()
        if self.verify:
            facts = [tensor.shape[0], *Contents.of(tensor)]
            self._send(torch.tensor(facts, device=tensor.device), *link)
        # An alias: the tensor itself may be emptied before it is sent.
        self._send(tensor.detach(), *link)

    def end(self) -> None:
        """Waits until all is sent."""
        while self._sends:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        work, _, peer = self._sends.pop(0)
        with watchdog.waiting_for([peer]):
            work.wait()

    def _send(self, tensor: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
        work = dist.isend(tensor, peer, group=group)
        assert work is not None
        self._sends.append((work, tensor, peer))


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
        timers = self._transfers.config.timers
        name = "forward-recv" if self._action.kind == "F" else "backward-recv"
        if timers is not None:
            timers(name, log_level=2).start()
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
        if timers is not None:
            timers(name).stop()
        return self._tensor

    def _post(self) -> None:
        self._work = dist.irecv(self._tensor, self._peer, group=self._group)

    def _announced(self) -> Contents:
        """Receives the length, which is compared, and what the tensor will hold."""
        num, device = 1 + len(Contents._fields), self._tensor.device
        facts = torch.zeros(num, dtype=torch.int64, device=device)
        dist.recv(facts, self._peer, group=self._group)
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
    actions: Sequence[Action],
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
    """Runs a rank's actions, as one of Megatron's schedule functions would.

    The parameters by name are theirs, and so is the result: what the losses report, on the last
    stage. Gradients are left in the model, reduced. ``forward_only`` leaves the backwards out. With
    a ``passage``, hosted micro-batches wait in the host's memory. With ``reduce_late`` reduction
    begins after the last backward, and not during it: for ranks whose last backward has collectives
    that others run before theirs.
    """
    config, links = transfers.config, transfers.links
    if forward_only:
        actions = [action for action in actions if action.kind == "F"]
    begins_itself = config.grad_sync_func is None or links.rank == 0
    last = {action.chunk: action for action in actions if action.kind == "B"}
    syncs = [contextlib.ExitStack() for _ in model]
    reports: list[Any] = []
    num_tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
    running: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    with contextlib.ExitStack() as no_sync:
        for stack, begin in zip(syncs, _each(config.no_sync_func, model), strict=True):
            no_sync.enter_context(stack)
            if begin is not None and not forward_only:
                stack.enter_context(begin())
        posted = transfers.post(actions[0])
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            if passage is not None:
                passage.before(action)
            arrival = posted
            posted = None if following is None else transfers.post(following)
            received = None if arrival is None else arrival.wait()
            chunk, number = action.chunk, action.micro_batch
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
                transfers.send(action, output)
                if passage is not None:
                    passage.behind(action, received, output)
                if not forward_only:
                    running[chunk, number] = received, output
                    if not is_last:
                        schedules.deallocate_output_tensor(
                            output, config.deallocate_pipeline_outputs
                        )
                continue
            if action == last[chunk] and not reduce_late and begins_itself:
                # Not before: reduction starts as soon as a parameter has a gradient. With a
                # grad_sync_func the stages behind the first reduce below, in the pipeline's tail.
                syncs[chunk].close()
            entered, output = running.pop((chunk, number))
            unused = (None,) if TAKES_MODEL_TYPE else ()
            gradient = schedules.backward_step(entered, output, received, *unused, config)
            if gradient is not None:
                transfers.send(action, gradient)
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
    if config.timers is not None:
        config.timers("forward-backward").stop()
    return reports


def _each(given: Any, model: Sequence[torch.nn.Module]) -> Sequence[Any]:
    """Megatron's function of each chunk: a list where there are several, or None of all."""
    return given if isinstance(given, (list, tuple)) else [given] * len(model)
