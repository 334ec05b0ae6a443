"""One run of Megatron's loop on plans: what the hooks of this package share.

``Session`` is made when the arguments are known, gets the model once it is built, and then opens
the data: planner, evaluation plans, step runner.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from megatron_wlb.cost import Cost, cost_from_dict
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.cost.memory import GIB
from megatron_wlb.data.blend import Blend
from megatron_wlb.data.corpora import SPLITS, Corpora
from megatron_wlb.errors import ConfigError, PlanError
from megatron_wlb.extensions import load
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.from_config import (
    known_cost,
    make_evaluation_planner,
    make_planner,
    tell_cuts,
    tell_memory,
)
from megatron_wlb.planning.ledger.writer import StepLedger
from megatron_wlb.planning.packing import simulates
from megatron_wlb.planning.plan_ahead import PlanAhead
from megatron_wlb.runtime import emulation
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.gpt.build import Model, require_layers, settle_kernel
from megatron_wlb.runtime.megatron_lm import fsdp
from megatron_wlb.runtime.megatron_lm.arguments import of_evaluation
from megatron_wlb.runtime.megatron_lm.chunks import install as install_chunks
from megatron_wlb.runtime.megatron_lm.chunks import of_chunks
from megatron_wlb.runtime.megatron_lm.flops import DocumentFlops, Formula
from megatron_wlb.runtime.ranks import watchdog
from megatron_wlb.runtime.ranks.agreement import of_corpora, of_state
from megatron_wlb.runtime.saving.ledger import open_ledger
from megatron_wlb.runtime.saving.resume import (
    file_digests,
    plan_settings,
    require_same_tokens,
    tell_changes,
)
from megatron_wlb.runtime.stepping.step import StepRunner
from megatron_wlb.settings import allocator
from megatron_wlb.settings.config import Config, flag_of, table
from megatron_wlb.settings.split import PipelineSplit

logger = logging.getLogger(__name__)

_OF_COSTS = tuple(name for name, known in table().items() if known.planned)
_OF_STAGES = tuple(f.name for f in fields(PipelineSplit))
"""Settings by which steps are simulated; see :attr:`Session.compared`."""


@dataclass
class Totals:
    """Sums over the steps of a run, through all its restarts; equal on all ranks."""

    steps: int = 0
    tokens: int = 0
    padding: int = 0
    imbalance: float = 0.0
    delay_steps: float = 0.0

    def add(self, plan: StepPlan) -> None:
        self.steps += 1
        self.tokens += plan.num_tokens
        self.padding += plan.padding_tokens
        self.imbalance += plan.imbalance
        self.delay_steps += plan.delay_steps


@dataclass(frozen=True)
class RunningStep:
    """The training step under way, or the last one."""

    plan: StepPlan
    asked_s: float
    planned_s: float
    """Monotonic times at which the loop asked for the plan, and had it."""


@dataclass
class Session:
    """What a run holds beside Megatron's own model, optimizer and loop."""

    config: Config
    args: argparse.Namespace
    formula: Formula
    """Megatron's own count of floating-point operations."""
    totals: Totals = field(default_factory=Totals)
    restored: dict[str, Any] | None = None
    """What the loaded checkpoint holds of ours, until the data are opened."""
    step: RunningStep | None = None
    flops_since_log: list[float] = field(default_factory=list)
    """The operations of each step since the last line of the log."""
    behind: list[Callable[[], None]] = field(default_factory=list)
    """What is still to be written of the last step; see :meth:`catch_up`."""
    ledger: StepLedger = field(default_factory=lambda: StepLedger(None))
    """Which documents ran at which step; of a run that trains, once the data are opened."""

    model: Model = field(init=False)
    """Set once Megatron has built it, before its state is saved, loaded or run."""
    runner: StepRunner = field(init=False)
    kernel: str = field(init=False)
    """The name of the attention kernel."""
    cost: Cost | None = field(init=False)
    """All three set when the data are opened, before training. Strategies have a cost each."""
    experts: ExpertGroups | None = None
    """The replicas that exchange tokens with experts, from then on."""
    _plans: PlanAhead | None = None
    _chunks: Sequence[torch.nn.Module] | None = None

    def install(self, patches: PatchSet) -> None:
        """Lets what Megatron builds attend inside documents."""
        install_chunks(patches, self.config)

    @cached_property
    def device(self) -> str:
        return "cpu" if emulation.installed() else "cuda"

    @cached_property
    def flops(self) -> DocumentFlops:
        """Counts operations of documents; needs the tokenizer's size of the vocabulary."""
        return DocumentFlops.of(self.formula, self.args)

    @property
    def compared(self) -> tuple[str, ...]:
        """Megatron's settings that plans depend on: of stages only where steps are simulated."""
        return (*_OF_COSTS, *_OF_STAGES) if simulates(self.config.wlb) else _OF_COSTS

    def set_up(self, keywords: dict[str, Any]) -> Mapping[str, Any]:
        """The keywords with which Megatron builds model and optimizer."""
        return keywords

    def take_model(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Takes what Megatron has built; a second call with the same does nothing."""
        if self._chunks is not chunks:
            self._chunks, self.model = chunks, of_chunks(chunks)
            require_layers(self.config, self.model)
            for chunk in filter(fsdp.is_sharded, chunks):
                if self.args.save or self.args.load:
                    fsdp.check_parts(chunk)

    def open_data(self) -> tuple[Iterator[StepPlan] | None, ...]:
        """Plans for training, validation and test, as Megatron's external data loaders.

        Each ``next()`` gives the plan of a whole step. None where Megatron asks for no such steps,
        or where the split has no documents.

        Raises:
            CorpusError: corpora that are missing or damaged, or a validation split without
                documents.
            ConfigError: settings that planning refuses.
            CheckpointError: the loaded state is of other data, packing or number of micro-batches.
        """
        args = self.args
        has_conversations = getattr(args, "sft", False)
        corpora = self.corpora
        self._settle((self.restored or {}).get("kernel"))
        hosts = self.runner.hosts
        wlb = self.config.wlb  # whose packing and S_max each rank may have chosen for itself
        chosen = {flag_of(n): str(getattr(wlb, n)) for n in ("wlb_packing", "wlb_max_tokens")}
        hosts.compare("at the start", of_corpora(corpora) | chosen)
        allocator.tell(self.device)
        training = None
        if not args.skip_train:
            planner = self._planner()
            if has_conversations and self.config.wlb.wlb_strategies is None:
                tell_cuts(planner, corpora.num_documents("train"))
            if self.device == "cuda":
                has = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
                tell_memory(self.config, has / GIB)
            if self.restored is not None:
                planner.load_state_dict(self.restored["planner"])
                require_same_tokens(corpora, self.restored.get("samples"))
                saved = self.restored["settings"]
                tell_changes(self.config, saved, self.restored, *self.compared)
                self.totals = Totals(**self.restored["totals"])
                logger.info(
                    "documents go on after step %d: %d wait", planner.step, planner.num_waiting
                )
            state = planner.state_dict()
            hosts.compare(
                "after the start", of_state(args.iteration, self.kernel, self._cost_dict(), state)
            )
            self.ledger = open_ledger(
                self.config, args.save, args.load, args.iteration, planner, corpora.vocab_size
            )
            self._plans = PlanAhead(planner)
            training = self._training_plans(self._plans)
        evaluations = []
        for split in SPLITS[1:]:
            plans = None
            if args.eval_iters and corpora.num_documents(split):
                plans = _evaluation_plans(self._evaluation_planner(split), args.eval_iters)
            elif args.eval_iters and split == "valid":
                raise ConfigError(
                    f"--eval-iters is {args.eval_iters}, but no documents are for validation; "
                    "give a --split or --valid-data-path that has some, or --eval-iters 0"
                )
            evaluations.append(plans)
        return (training, *evaluations)

    def _settle(self, kernel: str | None) -> None:
        """Makes the runner, and settles kernel and cost; ``kernel`` is the loaded checkpoint's."""
        self.runner = StepRunner.of(self.config, self.model, self.corpora, self.device)
        self.kernel = settle_kernel(self.config, self.model, kernel)
        self.cost = self._make_cost()

    def _planner(self) -> Any:
        """What plans the training steps, before the first one."""
        assert self.cost is not None
        planner = make_planner(self.config, self.corpora, self.cost, self.model.groups.dp.size())
        self.experts = planner.experts
        return planner

    def _evaluation_planner(self, split: str) -> Any:
        assert self.cost is not None
        config = of_evaluation(self.args, self.config)
        dp_size = self.model.groups.dp.size()
        return make_evaluation_planner(config, self.corpora, self.cost, dp_size, split)

    def _cost_dict(self) -> dict[str, Any] | None:
        return None if self.cost is None else self.cost.as_dict()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of ours, JSON-able and equal on all ranks."""
        assert self._plans is not None
        plan = None if self.step is None else self.step.plan
        return {
            "version": 1,
            "planner": self._plans.state_dict() | self.ledger.under_way(plan),
            "cost": self._cost_dict(),
            **file_digests(self.config),
            "samples": self.corpora.samples,
            "kernel": self.kernel,
            "totals": asdict(self.totals),
            "plan_digest": None if plan is None else plan.digest,
            "settings": plan_settings(self.config, *_OF_COSTS, *_OF_STAGES),
            "layout": self.layout(),
        }

    def catch_up(self) -> None:
        """Does what was left until the device is at work again, or there is nothing more to run."""
        while self.behind:
            self.behind.pop(0)()

    def before_log(self) -> None:
        """Runs after a training step, before Megatron logs it."""

    def layout(self) -> list[int]:
        """PP, TP and DP × CP: where random-number streams mean the same."""
        groups = self.model.groups
        return [groups.pp.size(), groups.tp.size(), groups.dp_cp.size()]

    def close(self) -> None:
        """Ends the thread that plans and writes what is left; a second call does nothing."""
        if self._plans is not None:
            self._plans.close()
        with contextlib.suppress(RuntimeError):  # of a device that failed, which is told already
            self.catch_up()
        self.ledger.close()

    def _training_plans(self, plans: PlanAhead) -> Iterator[StepPlan]:
        while True:
            asked = time.monotonic()
            watchdog.at("the plan of the next step", is_slow=True)
            plan = plans.next_plan()
            if plan is None:
                raise PlanError("the stream of documents ended, though it has no last epoch")
            self.step = RunningStep(plan, asked, time.monotonic())
            yield plan

    @cached_property
    def corpora(self) -> Corpora:
        """The blends that Megatron's arguments name, or mock data, of its vocabulary."""
        from megatron.training.global_vars import get_tokenizer
        from megatron.training.utils import get_blend_and_blend_per_split

        tokenizer = get_tokenizer()
        vocab_size = int(tokenizer.vocab_size)
        if self.args.mock_data:
            return Corpora.mock(self.config, vocab_size, tokenizer.eod)

        def opened(given: tuple[list[str], list[float] | None] | None) -> Blend | None:
            if given is not None and getattr(self.args, "sft", False):
                given = load("sft")(given, self.args, tokenizer)
            if given is None:
                return None
            prefixes, weights = given
            return Blend(tuple(prefixes), None if weights is None else tuple(weights))

        blend, per_split = get_blend_and_blend_per_split(self.args)
        whole = opened(blend)
        if whole is not None:
            corpora = Corpora.of_blend(whole, self.config.data.split, vocab_size)
        else:
            blends = {name: opened(one) for name, one in zip(SPLITS, per_split, strict=True)}
            corpora = Corpora.of_blends(blends, vocab_size)
        corpora = replace(corpora, loss_mean=self.config.wlb.wlb_loss_mean)
        # Megatron would take an evaluation's loss as the mean over micro-batches, which are unlike.
        self.args.sft = False
        if not getattr(self.args, "fim_data", False):
            return corpora
        trained: Corpora = load("fim")(corpora, self.args, tokenizer, self.config.training.seed)
        return trained

    def _make_cost(self) -> Cost:
        if self.restored is not None and self.restored["cost"] is not None:
            # Not made anew: another cost would make other plans.
            return cost_from_dict(self.restored["cost"])
        cost = known_cost(self.config, self.args.padded_vocab_size)
        if cost is not None:
            return cost
        if self.args.skip_train:
            raise ConfigError(
                "--wlb-cost is measured, which times training; give analytic with --skip-train"
            )
        measured: Cost = load("measured")(
            self.model, self.args.seq_length, self.args.padded_vocab_size
        )
        return measured


def _evaluation_plans(planner: Any, num_steps: int) -> Iterator[StepPlan]:
    """Plans the same steps at each evaluation, so that only the weights differ between two.

    Megatron goes on through the split from one evaluation to the next. A split with fewer steps is
    passed over again, as there.
    """
    plans = list(itertools.takewhile(bool, (planner.next_plan() for _ in range(num_steps))))
    return itertools.cycle([plans[number % len(plans)] for number in range(num_steps)])


def data_iterator_of(iterators: Any) -> Any:
    """The iterator that gives plans: with virtual stages Megatron has one for each chunk."""
    return iterators[0] if isinstance(iterators, list) else iterators
