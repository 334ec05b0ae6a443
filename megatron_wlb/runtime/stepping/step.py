"""One step of a plan: losses, gradients, nothing else.

Megatron's own schedules run it, or for documents in slices the executor. Some micro-batches are
run by several data-parallel ranks together (:mod:`megatron_wlb.runtime.stepping.merge`).

The loss is Σ token losses ÷ Σ labelled tokens over all micro-batches and data-parallel ranks,
never a mean of means: ``calculate_per_token_loss`` makes Megatron sum gradients and divide once.
Context-parallel ranks are summed over likewise: each has the losses of its own tokens.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import StragglerDetector

from megatron_wlb.cost import MemoryModel
from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.cost.schedule.order import sliced
from megatron_wlb.cost.slices import HOST, NOTHING, Recomputed, UnitTable
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.errors import PlanError
from megatron_wlb.plan import Document, MicroBatchPlan, StepPlan
from megatron_wlb.planning.from_config import run_of
from megatron_wlb.runtime.gpt.attention.document_attention import model_reach
from megatron_wlb.runtime.gpt.build import Model, has_head_start
from megatron_wlb.runtime.gpt.hybrid import scan_taps_of
from megatron_wlb.runtime.gpt.prediction import take_losses
from megatron_wlb.runtime.ranks import watchdog
from megatron_wlb.runtime.ranks.hosts import Hosts
from megatron_wlb.runtime.ranks.reads import Reads
from megatron_wlb.runtime.ranks.transfer import HostCopy
from megatron_wlb.runtime.stepping.batch import Batch, BatchBuilder, Chunk
from megatron_wlb.runtime.stepping.communicator import PlanCommunicator
from megatron_wlb.runtime.stepping.executor import Links, Transfers, run_actions
from megatron_wlb.runtime.stepping.losses import load_loss
from megatron_wlb.runtime.stepping.merge import check_meeting, check_merged, open_groups
from megatron_wlb.runtime.stepping.offload import Host, Passage
from megatron_wlb.runtime.stepping.recompute import recomputed
from megatron_wlb.settings.config import Config
from megatron_wlb.simulator.step import unit

ForwardStep: TypeAlias = Callable[[Iterator[Batch], torch.nn.Module], tuple[torch.Tensor, Any]]
"""Megatron's ``forward_step_func``: the next micro-batch through a chunk, and its loss function."""
_straggler = StragglerDetector()


@dataclass(frozen=True)
class StepLoss:
    """The loss over all data-parallel ranks; every rank has it.

    It is on its way to the host: the first look waits for the step's last forward pass.
    """

    total: HostCopy
    num_targets: float
    ahead: tuple[HostCopy, ...] = ()
    """The mean loss of each depth of layers that predict further ahead, in a step that trains."""

    @cached_property
    def loss_sum(self) -> float:
        """Σ token losses, in nats."""
        return self.total.item()

    @property
    def mean(self) -> float:
        return self.loss_sum / (self.num_targets or 1)


def loss_function(
    batch: Batch, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Megatron's loss protocol: (Σ losses, number of tokens, what to report).

    ``losses`` are ``[1, T/CP]`` per token, of a batch of the last stage. The report is ``[2]``, as
    of Megatron's pretrain_gpt.py: Σ losses, and by what they are divided.
    """
    assert batch.loss_mask is not None
    if batch.own_loss is not None:
        loss_sum = batch.own_loss.sum(losses)
    else:
        loss_sum = (losses.float() * batch.loss_mask).sum()
    # Filled on the device: a copy of one number from the host would wait for all kernels before.
    # Megatron adds integers; by what it is divided is known from the plan.
    num_targets = losses.new_full((), math.ceil(batch.num_targets), dtype=torch.int)
    counted = loss_sum.new_full((1,), batch.num_targets)
    return loss_sum, num_targets, torch.cat([loss_sum.detach().view(1), counted])


class StepRunner:
    """Runs plans on a model: batches, shapes, schedule, loss.

    ``verify_shapes`` also exchanges shapes as stock Megatron does, and compares them;
    ``verify_plan_interval`` compares the plan's digest over all ranks every so many steps, and what
    was read in the step before;
    ``timeout`` is that of the communicators that documents in slices need besides;
    ``replicas_meet`` is :attr:`.Config.replicas_meet`;
    ``config`` are the run's settings, needed where micro-batches wait in the host's memory.
    """

    def __init__(
        self,
        model: Model,
        batches: BatchBuilder,
        *,
        verify_shapes: bool = False,
        verify_plan_interval: int = 1,
        timeout: datetime.timedelta | None = None,
        replicas_meet: bool = False,
        config: Config | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.batches = batches
        self.communicator = PlanCommunicator(model.groups.pp, model.config, verify_shapes)
        self.hosts = Hosts(model.groups, timeout)
        self.verify_plan_interval = verify_plan_interval
        self.timeout = timeout
        self.replicas_meet = replicas_meet
        self._schedule = get_forward_backward_func()
        self._num_runs = 0
        self._reads: Reads | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        model: Model,
        corpora: Corpora,
        device: str,
    ) -> StepRunner:
        """The runner of a run with these settings.

        Raises :class:`ConfigError` for a ``--wlb-loss`` that is none.
        """
        if any(gpt.pre_process or gpt.post_process for gpt in model.gpts):
            for corpus in corpora.corpora:
                corpus.open_tokens()
        cp = model.groups.cp
        batches = BatchBuilder(
            corpora.corpora,
            corpora.vocab_size,
            device,
            cp_rank=cp.rank(),
            cp_size=cp.size(),
            reach_tokens=model_reach(model.config),
            num_ahead=model.config.mtp_num_layers or 0,
            has_experts=model.config.num_moe_experts is not None,
            scan_taps=scan_taps_of(model.gpts),
            loss=None if config.wlb.wlb_loss is None else load_loss(config.wlb.wlb_loss),
        )
        return cls(
            model,
            batches,
            verify_shapes=config.wlb.wlb_verify_shapes,
            verify_plan_interval=config.wlb.wlb_verify_plan_interval,
            timeout=datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes),
            replicas_meet=config.replicas_meet,
            config=config,
        )

    def take_reads(self) -> Reads | None:
        """What this rank read in the last run, once."""
        reads, self._reads = self._reads, None
        return reads

    def compare_reads(self) -> None:
        """Compares what ranks read in the last run, before it is saved; called by every rank.

        The next run does so otherwise. Raises :class:`PlanError` where any differs.
        """
        if self.verify_plan_interval:
            self.hosts.compare_reads(self.take_reads())

    def run(self, plan: StepPlan, *, forward_only: bool = False) -> StepLoss:
        """Runs forward (and backward) of one step; gradients are left in the model, reduced.

        Raises :class:`PlanError` where ranks disagree, or the plan does not fit the layout.
        """
        model = self.model
        reports = self.run_schedule(plan, forward_only=forward_only)
        # Last stage: Σ over its micro-batches; then over DP and CP ranks, then to other stages.
        total = torch.zeros(1, dtype=torch.float64, device=self.batches.device)
        for report in reports:
            total += report[0]
        torch.distributed.all_reduce(total, group=model.groups.dp_cp)
        num_ahead = 0 if forward_only else self.batches.num_ahead
        ahead = take_losses() if num_ahead else None
        total = torch.cat([total, total.new_zeros(num_ahead) if ahead is None else ahead])
        last = torch.distributed.get_process_group_ranks(model.groups.pp)[-1]
        torch.distributed.broadcast(total, src=last, group=model.groups.pp)
        main, *further = map(HostCopy, total)
        return StepLoss(main, plan.num_targets, tuple(further))

    def run_schedule(
        self,
        plan: StepPlan,
        *,
        forward_only: bool,
        step: StepPlan | None = None,
        forward_step: ForwardStep | None = None,
        **options: Any,
    ) -> list[torch.Tensor]:
        """Runs the schedule on this rank's micro-batches; what their losses report, on the last
        stage. ``step`` is all that is trained at once, if that is more than the plan.
        ``forward_step`` runs in place of the model's own, and ``options`` go to the schedule.

        Raises :class:`PlanError` as :meth:`run`.
        """
        model = self.model
        what = "evaluation step" if forward_only else "step"
        watchdog.at(f"{what} %d: its beginning", plan.step)
        self._check(plan)
        self._open_groups(plan)
        dp_rank, label = model.groups.dp.rank(), f"{what} {plan.step}"
        micro_batches = plan.micro_batches[dp_rank]
        lengths = [m.padded_length // self._num_shards(m) for m in micro_batches]
        self.batches.begin(step or plan)
        self.batches.has_head_start = has_head_start(self.model)
        self.batches.slices.begin(forward_only)
        schedule: Callable[..., list[Any]]
        again = [NOTHING if forward_only else m.recomputed for m in micro_batches]
        if plan.chains:
            pp = model.groups.pp
            order = sliced(pp.size(), plan.chains[dp_rank], len(model.chunks))
            passage = None  # before all messages, as it pins memory
            if HOST in again:
                if getattr(model.config, "fine_grained_activation_offloading", False):
                    raise PlanError(
                        f"{label}: micro-batches are to wait in the host's memory, but Megatron "
                        "itself sends activations there (fine_grained_activation_offloading); "
                        "leave one of the two out"
                    )
                hosted = [what == HOST for what in again]
                passage = Passage(
                    self._host, order[pp.rank()], hosted, plan.window_bytes, self._stays,
                    self._hosted_bytes(micro_batches),
                )  # fmt: skip
            verify = self.communicator.verify
            transfers = Transfers(self.links, lengths, model.config, verify, label)
            late = self._reduces_late(plan)
            options |= {"passage": passage, "reduce_late": late}
            schedule = partial(run_actions, order, transfers)
        else:
            self.communicator.begin(lengths, forward_only=forward_only, label=label)
            schedule = partial(
                self._schedule,
                seq_length=max(m.padded_length for m in micro_batches),
                micro_batch_size=1,
                p2p_communicator=self.communicator,
            )
        stages = [Chunk(gpt.pre_process, gpt.post_process) for gpt in model.gpts]
        with (
            self.batches.ahead(micro_batches, stages) as iterators,
            _divided_by(plan.num_targets, model.config),
        ):
            reports = schedule(
                forward_step_func=forward_step or self._forward_step(again, label),
                data_iterator=iterators,
                model=model.chunks,
                num_microbatches=len(micro_batches),
                forward_only=forward_only,
                pg_collection=model.groups,
                **options,
            )
        self.communicator.end()
        self.batches.slices.end()
        runs = [run for own in self.batches.read.values() for run in own]
        self._reads = Reads.of(label, runs, model) if runs else None
        watchdog.at(f"{label}: its end, behind all passes")
        if not forward_only:
            watchdog.first_step_is_over()
        return reports

    def _forward_step(self, again: Sequence[Recomputed], label: str) -> ForwardStep:
        """Runs the next micro-batch of a chunk. It says to the watchdog which pass begins, and to
        layers what of the micro-batch is run ``again`` in backward.
        """
        chunks, config = self.model.chunks, self.model.config
        numbers, num = [0] * len(chunks), len(again)

        def forward_step(
            batches: Iterator[Batch], model: torch.nn.Module
        ) -> tuple[torch.Tensor, Any]:
            chunk = next((k for k, known in enumerate(chunks) if known is model), 0)
            number, numbers[chunk] = numbers[chunk], numbers[chunk] + 1
            place = f"{label}: %s of micro-batch %%d of %%d, chunk %%d"
            watchdog.at(place % "forward", number, num, chunk)
            if config.timers is not None:
                config.timers("batch-generator", log_level=2).start()
            with _straggler(bdata=True):
                batch = next(batches)
            if config.timers is not None:
                config.timers("batch-generator").stop()
            with _straggler, recomputed(model, again[number]):
                output = model(
                    input_ids=batch.tokens,
                    position_ids=batch.position_ids,
                    attention_mask=None,
                    labels=batch.labels,
                    loss_mask=batch.ahead.weights[0] if batch.ahead else None,
                    packed_seq_params=replace(batch.packed_seq_params, ahead=batch.ahead),
                )
            if output.requires_grad:
                output.register_hook(lambda _: watchdog.at(place % "backward", number, num, chunk))
            return output, partial(loss_function, batch)

        return forward_step

    @cached_property
    def links(self) -> Links:
        """What documents in slices need; made when all ranks have come to the first plan with
        slices, if it was not set before.
        """
        groups, num_chunks = self.model.groups, len(self.model.chunks)
        verify = self.communicator.verify
        return Links.open(groups.pp, self.timeout, num_chunks, verify=verify)

    @cached_property
    def _host(self) -> Host:
        return Host(torch.device(self.batches.device))

    @cached_property
    def _memory(self) -> MemoryModel:
        assert self.config is not None, "who runs plans that host has settings"
        groups, gpt = self.model.groups, self.model.gpts[0]
        return run_of(self.config, gpt.vocab_size, groups.dp.size()).memory

    def _reduces_late(self, plan: StepPlan) -> bool:
        """Whether gradients are reduced behind all passes, on all replicas alike.

        Else reductions start in the last backward of each chunk. Replicas that run documents
        together would come to these in unlike orders with several chunks, or where one runs nothing
        else.
        """
        several = len(self.model.chunks) > 1 and any(m.replicas for m in plan)
        return several or any(all(m.replicas for m in own) for own in plan.micro_batches)

    def _hosted_bytes(self, micro_batches: Sequence[MicroBatchPlan]) -> Floats:
        """What each micro-batch would send to the host, ``[chunks, micro-batches]``."""
        units = UnitTable.of(map(unit, micro_batches))
        tapes = self._memory.tapes[self.model.groups.pp.rank()]
        return np.array([self._memory.hosted_bytes(tape, units) for tape in tapes])

    def _stays(self) -> Iterator[torch.Tensor]:
        """What passes save that is no activation of theirs."""
        for gpt in self.model.gpts:
            yield from gpt.parameters()
            yield from gpt.buffers()
        for buffer in self.batches.slices.buffers.values():
            yield buffer.pair

    def _open_groups(self, plan: StepPlan) -> None:
        """Opens the groups that this plan is the first to need; all ranks have come to it."""
        known = {len(block) for block in self.batches.groups}
        sizes = sorted({len(m.replicas) for m in plan if m.replicas} - known)
        if sizes:
            device = self.batches.device
            self.batches.groups |= open_groups(self.model.groups, sizes, device, self.timeout)

    def _num_shards(self, micro_batch: MicroBatchPlan) -> int:
        """Over how many ranks its tokens are divided, between layers."""
        config = self.model.config
        num: int = config.context_parallel_size * (len(micro_batch.replicas) or 1)
        return num * config.tensor_model_parallel_size if config.sequence_parallel else num

    @cached_property
    def _alike(self) -> int:
        """How many data-parallel ranks in a row meet in each pass."""
        groups = self.model.groups
        dp, tp, cp, ep, etp = (
            int(group.size())
            for group in (groups.dp, groups.tp, groups.cp, groups.ep, groups.expt_tp)
        )
        if self.replicas_meet:
            return dp
        has_experts = self.model.config.num_moe_experts is not None
        return math.lcm(tp * cp, ep * etp) // (tp * cp) if has_experts else 1

    def _check_alike(self, plan: StepPlan) -> None:
        ranks = plan.micro_batches
        facts: dict[str, list[Any]] = {
            "numbers": [] if plan.chains else [(len(own),) for own in ranks],
            "chains": [*plan.chains],
            "recomputed ones": [tuple(m.recomputed for m in own) for own in ranks],
        }
        for what, values in facts.items():
            for first in range(0, len(ranks), self._alike):
                group = values[first : first + self._alike]
                if len(set(group)) > 1:
                    raise PlanError(
                        f"step {plan.step}: data-parallel ranks from {first} on meet in each pass, "
                        f"but have {what} of micro-batches {group}; give all the same"
                    )

    def _check(self, plan: StepPlan) -> None:
        # First, so that a plan that is wrong on one rank raises on all, and no rank waits for it.
        # Counted in runs, not by the plan's step, on which ranks may disagree.
        is_due = self.verify_plan_interval and self._num_runs % self.verify_plan_interval == 0
        self._num_runs += 1
        if is_due:
            self.hosts.compare_step(plan, self.take_reads())
        dp_size = self.model.groups.dp.size()
        if len(plan.micro_batches) != dp_size:
            raise PlanError(
                f"step {plan.step}: the plan is for {len(plan.micro_batches)} data-parallel ranks, "
                f"this run has {dp_size}; plan for {dp_size}"
            )
        for m in plan:
            shards = self._num_shards(m) * (2 if m.replicas else 1)
            if m.padded_length < 1 or m.padded_length % shards:
                raise PlanError(
                    f"step {plan.step}: micro-batch {m.index} is {m.padded_length} tokens long; "
                    f"pad it to a positive multiple of {shards}, over which sequences are sharded"
                )
        check_chains(plan)
        check_meeting(plan, self.model.groups.pp.size(), len(self.model.chunks))
        self._check_alike(plan)


@contextlib.contextmanager
def _divided_by(num_targets: float, config: TransformerConfig) -> Iterator[None]:
    """Divides the step's gradients by a number that the plan knows.

    Megatron counts it on the device once more, and reads the sum over all ranks there: its host
    would wait for the last backward pass before it could queue up the update.
    """
    finalize = config.finalize_model_grads_func
    if finalize is None:
        yield
        return

    def finalize_and_divide(chunks: list[Any], num_tokens: Any = None, **options: Any) -> None:
        finalize(chunks, None, **options)
        if num_tokens is not None and num_targets:
            # In fp32, as Megatron divides.
            scale = float(np.float32(1) / np.float32(num_targets))
            for chunk in chunks:
                chunk.scale_gradients(scale)

    config.finalize_model_grads_func = finalize_and_divide
    try:
        yield
    finally:
        config.finalize_model_grads_func = finalize


def check_chains(plan: StepPlan) -> None:
    """Holds the slices of documents against ``plan.chains``, which say how they run.

    Raises :class:`PlanError` where a document would not run whole and in order: its slices lie in
    one replica's consecutive micro-batches, within a chain, each first in its own. What several
    replicas run together is one chain, see :func:`check_merged`.
    """
    if plan.chains and len(plan.chains) != len(plan.micro_batches):
        raise PlanError(
            f"step {plan.step}: the plan has chains for {len(plan.chains)} data-parallel ranks and "
            f"micro-batches for {len(plan.micro_batches)}; give both for each rank"
        )
    for rank, micro_batches in enumerate(plan.micro_batches):
        chains = plan.chains[rank] if plan.chains else (1,) * len(micro_batches)
        where = f"step {plan.step}, data-parallel rank {rank}"
        if not chains or min(chains) < 1 or sum(chains) != len(micro_batches):
            raise PlanError(
                f"{where}: chains of {list(chains)} do not divide its {len(micro_batches)} "
                "micro-batches; let them add up to that, each at least 1"
            )
        stop = 0
        for length in chains:
            chain = micro_batches[stop : stop + length]
            for _, part in groupby(chain, _runs_together):
                _check_chain(list(part), where)
            stop += length
    check_merged(plan)


def _runs_together(m: MicroBatchPlan) -> tuple[Any, ...] | None:
    """What only slices of one document have in common, among those that replicas run together."""
    return (m.replicas, m.spans[:1] and m.spans[0].document) if m.replicas else None


def _check_tree(chain: Sequence[MicroBatchPlan], where: str) -> None:
    """Holds a chain against the trees that its micro-batches name: all rows of each, in order."""
    name, reached = -1, 0
    for m in chain:
        tree = m.sharing.tree
        if tree is None and m.slice is None and not reached:
            continue
        if tree is None or tree.start != reached or (reached and tree.name != name):
            raise PlanError(
                f"{where}: micro-batch {m.index} runs {tree or 'no tree'}, where its chain has "
                f"come to row {reached} of tree {name}; a chain runs all rows of a tree in order"
            )
        if m.replicas or m.divided:
            raise PlanError(
                f"{where}: micro-batch {m.index} of tree {tree.name} runs on several replicas, or "
                "divides keys and values, which no tree can; plan it for one replica"
            )
        name, reached = tree.name, (tree.start + m.length) % tree.length
    if reached:
        raise PlanError(
            f"{where}: the chain up to micro-batch {chain[-1].index} ends at row {reached} of tree "
            f"{name}; a chain runs all rows of a tree in order"
        )


def _check_chain(chain: Sequence[MicroBatchPlan], where: str) -> None:
    if any(m.sharing.tree for m in chain):
        return _check_tree(chain, where)
    for m in chain:
        for span in m.spans[1:]:
            if span.is_slice:
                raise PlanError(
                    f"{where}: micro-batch {m.index} runs tokens {span.start} to {span.stop} of "
                    f"{_name(span.document)} behind other documents; a slice comes first"
                )
    document, reached = None, 0
    for m in chain:
        part = m.slice
        if document is None and (part is None or not part.start):
            document = part and part.document
        elif part is None or part.document != document or part.start != reached:
            found = "no slice" if part is None else f"tokens from {part.start} of "
            found += "" if part is None else _name(part.document)
            come = "" if document is None else f", whose chain has come to token {reached} of "
            come += "" if document is None else _name(document)
            raise PlanError(
                f"{where}: micro-batch {m.index} has {found}{come}; a chain runs all of a document "
                "in order before the next"
            )
        if part is not None:
            reached = part.stop
            document = document if reached < part.document.length else None
    if document is not None:
        raise PlanError(
            f"{where}: the chain of {len(chain)} up to micro-batch {chain[-1].index} ends at token "
            f"{reached} of {_name(document)}, which has {document.length}; let it run the rest too"
        )


def _name(document: Document) -> str:
    return f"document {document.number} of corpus {document.corpus}"
