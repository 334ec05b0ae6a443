"""Strategies under Megatron's loop: unlike replicas, which may be others in each step.

Megatron's loop has one model, one optimizer and one set of process groups a rank. It keeps them.
Its groups are those of a run without model parallelism: all ranks are data-parallel ones. Its model
is :class:`StrategyModel`, which has no layer of its own. The script builds the chunks of every
layout that a rank is in, in process groups of their own, and a
:class:`~megatron_wlb.strategies.run.runner.StrategyRunner` runs those of the step's strategy. Its
optimizer updates the shards of a store. All else stays Megatron's.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.balance.replica_costs import Scheme
from megatron_wlb.runtime.compat import hooks
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.gpt.attention.kernels import (
    ChosenKernel,
    Demand,
    agreed_kernel,
    choose_kernel,
)
from megatron_wlb.runtime.gpt.build import (
    Model,
    attention_options,
    require_layers,
    tell_other_kernel,
    use_kernel,
)
from megatron_wlb.runtime.gpt.moe import add_up_logged
from megatron_wlb.runtime.gpt.prediction import add_up_losses
from megatron_wlb.runtime.megatron_lm.chunks import install as install_chunks
from megatron_wlb.runtime.megatron_lm.chunks import of_chunks
from megatron_wlb.runtime.megatron_lm.session import Session
from megatron_wlb.runtime.ranks.hosts import Hosts
from megatron_wlb.runtime.stepping.step import StepRunner
from megatron_wlb.strategies.plan.strategy import Layout
from megatron_wlb.strategies.plan.strategy_run import StrategyRun
from megatron_wlb.strategies.run import shard_files
from megatron_wlb.strategies.run.groups import GroupOpener, ReplicaGroups
from megatron_wlb.strategies.run.pieces import GroupOf
from megatron_wlb.strategies.run.replica import Arena, LocalReplica, parameters_of
from megatron_wlb.strategies.run.runner import StrategyRunner
from megatron_wlb.strategies.run.store import groups_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Built:
    """What this rank has of a replica's layout."""

    scheme: Scheme
    model: Model
    groups: ReplicaGroups
    arena: Arena


@dataclass
class StrategySession(Session):
    """A run with ``--wlb-strategies``."""

    run: StrategyRun = field(init=False)
    """Set as Megatron asks for its model."""
    strategies: StrategyRunner | None = None
    """Set with the optimizer, or without one when Megatron has its model."""
    _built: dict[Layout, _Built] = field(default_factory=dict)
    _named: str = ""
    """The attention kernel of all replicas."""

    def install(self, patches: PatchSet) -> None:
        """Puts model and optimizer in the place of Megatron's."""
        from megatron.training import training

        patches.wrap(training, "get_model", self._get_model)
        patches.wrap(training, "get_megatron_optimizer", self._get_optimizer)
        patches.wrap(training, "calc_params_l2_norm", self._norm)
        install_chunks(patches, self.config, self.kernel_of)

    def kernel_of(self, _name: str, demand: Demand) -> ChosenKernel:
        """The kernel of a layout's attention; ranks do not talk, as they build unlike models."""
        return agreed_kernel(self._named, demand)

    def _choose(self, name: str) -> None:
        """Chooses the kernel of all layouts, for whole layers; all ranks call it together."""
        core = _core_config(self.args)
        options = attention_options(self.config, core, lambda _, d: choose_kernel(name, d))
        self._named = options.kernel_name

    @cached_property
    def _timeout(self) -> datetime.timedelta:
        return datetime.timedelta(minutes=self.args.distributed_timeout_minutes)

    @cached_property
    def _hosts(self) -> Hosts:
        return Hosts(ProcessGroupCollection.use_mpu_process_groups(), self._timeout)

    # ── what Megatron asks for ──────────────────────────────────────────────────────────────────

    def _get_model(
        self, original: Any, provider: Any, model_type: Any, **_options: Any
    ) -> list[torch.nn.Module]:
        """Megatron's ``get_model``: builds the chunks of every layout that this rank is in."""
        self.run = StrategyRun.of(self.config, self.corpora, dist.get_world_size())
        self.config = self.run.config
        self.args.padded_vocab_size = self.run.padded_vocab_size
        for strategy in self.run.strategies:
            logger.info("strategy: %s", strategy)
        known = "; ".join(map(str, self.run.strategies))
        self._hosts.compare("at the start", {"strategies": known})
        self._choose(self.config.wlb.wlb_attention_kernel)
        opener = GroupOpener(self._timeout)
        for layout in self.run.layouts:
            scheme, ranks = layout
            groups = opener.replica(scheme, ranks, *self.run.expert_sizes(scheme))
            if groups is None:
                continue
            with groups.current(), self._laid_out(scheme):
                self._seed()
                model = of_chunks(original(provider, model_type, wrap_with_ddp=False))
            require_layers(self.run.replica_config(scheme), model)
            arena = Arena(parameters_of(model), self.args.params_dtype)
            self._built[layout] = _Built(scheme, model, groups, arena)
            if layout != self.run.layouts[0]:  # whose weights the store takes
                arena.close()
        self._seed()
        return [StrategyModel(_core_config(self.args), lambda: self.strategies)]

    def _get_optimizer(
        self, _original: Any, config: Any, chunks: Any, config_overrides: Any = None, **_: Any
    ) -> Any:
        """Megatron's ``get_megatron_optimizer``: of the store's shards, in the groups that Megatron
        makes of the models' parameters.
        """
        models = [chunk for built in self._built.values() for chunk in built.model.chunks]
        groups, group_of = groups_of(models, config, config_overrides)
        runner = self._open_store(group_of)
        runner.store.optimize(config, groups)
        made = runner.store.optimizer
        made.sharded_state_dict = partial(_optimizer_state, runner)
        made.load_state_dict = partial(shard_files.set_optimizer, runner)
        made.reload_model_params = lambda *_, **__: None  # weights are the store's
        for built in self._built.values():
            built.model.config.grad_scale_func = made.scale_loss
        return made

    def _open_store(self, group_of: GroupOf) -> StrategyRunner:
        """Makes the store and its first weights; all ranks of the world call it together."""
        local = {}
        for layout, built in self._built.items():
            own = self.run.replica_config(built.scheme)
            with built.groups.current():  # by which Megatron chooses the schedule
                runner = StepRunner.of(own, built.model, self.corpora, self.device)
            runner.verify_plan_interval = 0  # they are compared once, over all replicas
            built.arena.open()
            local[layout] = LocalReplica(
                built.arena, built.model, runner, built.groups, group_of, self.args.seed
            )
            if layout != self.run.layouts[0]:
                built.arena.close()
        self.strategies = made = StrategyRunner(
            self.run.strategies,
            local,
            self._hosts,
            self.args.num_layers,
            self.args.params_dtype,
            self.run.room_bytes,
            self.config.wlb.wlb_verify_plan_interval,
        )
        made.take_weights(self.run.strategies[0])
        return made

    def _norm(self, _original: Any, _model: Any, *_rest: Any, **_options: Any) -> float:
        """Megatron's ``calc_params_l2_norm``, of the store's weights."""
        assert self.strategies is not None
        shards = self.strategies.store.weights
        square = torch.stack([shard.double().square().sum() for shard in shards]).sum()
        dist.all_reduce(square)
        return float(square.sqrt())

    # ── what a session does ─────────────────────────────────────────────────────────────────────

    def set_up(self, keywords: dict[str, Any]) -> Mapping[str, Any]:
        return hooks.adapter().with_provider(keywords)

    def take_model(self, chunks: Any) -> None:
        if self._chunks is not chunks:
            self._chunks = chunks
            self.model = Model(chunks[0].config, chunks[0].pg_collection, list(chunks), [])
            if self.strategies is None:  # nothing is trained
                self._open_store(lambda _: 0)

    def _settle(self, kernel: str | None) -> None:
        assert self.strategies is not None
        self.runner = _Reports(self.strategies)  # type: ignore[assignment]
        self.cost = None
        self.kernel = self._agree(kernel)

    def _agree(self, saved: str | None) -> str:
        """Lets all layers run a loaded checkpoint's kernel, as
        :func:`~megatron_wlb.runtime.gpt.build.settle_kernel` does.
        """
        if saved is None or saved == self._named or self.config.wlb.wlb_attention_kernel != "auto":
            return self._named
        try:
            self._choose(saved)
        except CompatibilityError as error:
            tell_other_kernel(saved, error)
            return self._named
        for built in self._built.values():
            own = self.run.replica_config(built.scheme)
            use_kernel(built.model, attention_options(own, built.model.config, self.kernel_of))
        return self._named

    def _planner(self) -> Any:
        return self.run.planner(self.corpora)

    def _evaluation_planner(self, split: str) -> Any:
        return self.run.planner(self.corpora, split)

    def before_log(self) -> None:
        """Adds up, over all ranks, what Megatron would over the groups of one layout."""
        config = self.model.config
        if config.num_moe_experts is not None:
            add_up_logged(config)
        if config.mtp_num_layers:
            assert isinstance(self.runner, _Reports)
            add_up_losses(config.mtp_num_layers, counts=self.runner.counts)

    # ── layouts ─────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _laid_out(self, scheme: Scheme) -> Iterator[None]:
        """Inside, Megatron's arguments say what they would in a run of such a replica alone."""
        args = self.args
        vpp = scheme.vpp_size if scheme.vpp_size > 1 else None
        ep_size, etp_size = self.run.expert_sizes(scheme)
        own = {
            "tensor_model_parallel_size": scheme.tp_size,
            "pipeline_model_parallel_size": scheme.pp_size,
            "transformer_pipeline_model_parallel_size": scheme.pp_size,
            "virtual_pipeline_model_parallel_size": vpp,
            "context_parallel_size": scheme.cp_size,
            "sequence_parallel": scheme.tp_size > 1,
            "overlap_p2p_comm": vpp is not None,
            "expert_model_parallel_size": ep_size,
            "expert_tensor_parallel_size": etp_size,
            "tensor_parallel_num_weight_shards": scheme.tp_size,  # from 0.19 on
            "expert_tensor_parallel_num_weight_shards": etp_size,
        }
        before = {name: getattr(args, name) for name in own if hasattr(args, name)}
        vars(args).update({name: own[name] for name in before})
        try:
            yield
        finally:
            vars(args).update(before)

    def _seed(self) -> None:
        """Starts Megatron's streams of random numbers anew, as at the start of a run in the layout
        of the moment.
        """
        from megatron.training import initialize

        args = self.args
        initialize._set_random_seed(
            args.seed, args.data_parallel_random_init, args.te_rng_tracker,
            args.inference_rng_tracker,
        )  # fmt: skip


class StrategyModel(torch.nn.Module):
    """What Megatron's loop has for a model: the weights in the store."""

    force_all_reduce = False
    """Megatron sets it where gradients are saved."""

    def __init__(self, config: Any, runner: Callable[[], StrategyRunner | None]) -> None:
        super().__init__()
        self.config = config
        self._made = runner
        self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()

    @property
    def _runner(self) -> StrategyRunner:
        runner = self._made()
        assert runner is not None, "the store is made with the optimizer"
        return runner

    def zero_grad_buffer(self) -> None:
        """Does nothing: a step begins with that."""

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        return shard_files.model_state(self._runner)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:  # type: ignore[override]
        shard_files.set_model(self._runner, state)


@dataclass
class _Reports:
    """The runner as Megatron's loop asks for it: every rank reports, as each is a last stage."""

    strategies: StrategyRunner
    counts: bool = False
    """Whether this rank's losses are a part of the last step's."""

    @property
    def hosts(self) -> Hosts:
        return self.strategies.hosts

    def compare_reads(self) -> None:
        self.strategies.compare_reads()

    def run_schedule(
        self, plan: StepPlan, *, forward_only: bool, **options: Any
    ) -> list[torch.Tensor]:
        """Runs a step; this rank's part of the sum of losses, and of what they are divided by."""
        reports = self.strategies.run_schedule(plan, forward_only=forward_only, **options)
        self.counts = bool(reports)
        total = torch.zeros(2, device=torch.cuda.current_device())
        for report in reports:
            total[0] += report[0]
        if dist.get_rank() == 0:
            total[1] = plan.num_targets
        return [total]


def _optimizer_state(
    runner: StrategyRunner, _model: Any, is_loading: bool = False, **_options: Any
) -> dict[str, Any]:
    return shard_files.optimizer_state(runner, is_loading=is_loading)


def _core_config(args: Any) -> Any:
    """Megatron's configuration of a model that its arguments ask for."""
    from megatron.training.arguments import core_transformer_config_from_args

    return core_transformer_config_from_args(args)
