"""The planners of other trainers, each from a checkout, as functions of a step's lengths."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

from megatron_wlb.cost import Parallelism
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import StepPlan

Schedule: TypeAlias = list[list[list[int]]]
"""``[dp_size][micro-batches][numbers of samples]``."""
Planner: TypeAlias = Callable[[list[int]], "Schedule | StepPlan"]


def slime(folder: Path, layout: Parallelism, cap: int, shape: Any, **settings: bool) -> Planner:
    module = _of(folder, "slime.utils.dp_schedule")
    parallel = {
        "dp_size": layout.dp_size, "cp_size": layout.cp_size, "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }  # fmt: skip
    options = SimpleNamespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=cap // layout.cp_size, balance_data=True,
        hidden_size=shape.hidden_size, num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups, vocab_size=shape.vocab_size,
        ffn_hidden_size=shape.ffn_hidden_size, num_experts=None, num_layers=shape.num_layers,
        kv_channels=shape.kv_channels, **settings,
    )  # fmt: skip

    def plan(lengths: list[int]) -> Schedule:
        given = {"global_batch_size": len(lengths), "rollout_indices": list(range(len(lengths)))}
        own, micro_batches, *_ = module.build_dp_schedule(options, parallel, lengths, **given)
        return [
            [[samples[n] for n in one] for one in rank]
            for samples, rank in zip(own, micro_batches, strict=True)
        ]

    return plan


def verl(folder: Path, layout: Parallelism, cap: int) -> Planner:
    module = _alone(
        folder, "verl.utils.seqlen_balancing",
        {
            "verl": {}, "verl.utils": {}, "verl.protocol": {},
            "verl.utils.tensordict_utils": {"index_select_tensor_dict": lambda _, chosen: chosen},
            "verl.utils.device": {"get_device_name": lambda: "cpu"},
        },
    )  # fmt: skip
    torch = module.torch

    def plan(lengths: list[int]) -> Schedule:
        work = module.calculate_workload(torch.tensor(lengths)).tolist()
        ranks = module.get_seqlen_balanced_partitions(work, layout.dp_size, equal_size=True)
        least = max(-(-sum(lengths[n] for n in own) // cap) for own in ranks)
        while True:
            schedule = []
            for own in ranks:
                ends = torch.tensor([0, *(lengths[n] for n in own)]).cumsum(0)
                ids = SimpleNamespace(is_nested=True, offsets=lambda ends=ends: ends)
                given = {"input_ids": ids}, cap
                _, found = module.rearrange_micro_batches(*given, min_num_micro_batch=least)
                schedule.append([[own[n] for n in one] for one in found])
            if least == max(map(len, schedule)):
                return schedule
            least = max(map(len, schedule))  # what ranks agree on where one needs more for the cap

    return plan


def nemo_rl(folder: Path, layout: Parallelism, cap: int) -> Planner:
    module = _alone(folder, "nemo_rl.data.packing.algorithms")
    packer = module.get_packer(
        module.PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING, cap,
        min_bin_count=layout.dp_size, bin_count_multiple=layout.dp_size,
    )  # fmt: skip

    def plan(lengths: list[int]) -> Schedule:
        bins = packer.pack(lengths)
        return [bins[rank :: layout.dp_size] for rank in range(layout.dp_size)]

    return plan


def megatron(folder: Path, layout: Parallelism, cap: int) -> Planner:
    """`dp_balanced`. `default_dynamic_cp` divides each sample over ranks of its own number, in
    other process groups from one micro-batch to the next: no layout that is simulated here.
    """
    module = _alone(
        folder, "megatron.core.datasets.data_schedule",
        {
            "megatron": {}, "megatron.core": {}, "megatron.core.datasets": {},
            "megatron.core.datasets.data_schedule_utils": {},
            "megatron.core.packed_seq_params": {}, "megatron.core.pipeline_parallel": {},
            "megatron.core.pipeline_parallel.hybrid_cp_schedule": {},
            "megatron.core.process_groups_config": {}, "megatron.core.transformer": {},
            "megatron.core.transformer.multi_token_prediction": {},
        },
    )  # fmt: skip
    scheduler = module.DpBalancedScheduler(cap // layout.cp_size, layout.cp_size, layout.dp_size, 1)

    def plan(lengths: list[int]) -> Schedule:
        turns = scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
        return [[turn[rank * layout.cp_size] for turn in turns] for rank in range(layout.dp_size)]

    return plan


def prime_rl(folder: Path, layout: Parallelism, cap: int, shape: Any) -> Planner:
    """First fit, bins to ranks by FLOPs. What it copies of samples is left out."""
    module = _alone(
        folder, "prime_rl.trainer.batch",
        {
            "prime_rl": {}, "prime_rl.transports": {}, "prime_rl.transports.rollouts": {},
            "prime_rl.transports.rollouts.types": {},
        },
        "src/",
    )  # fmt: skip
    vars(module)["_materialize_bin"] = lambda one: SimpleNamespace(
        sequence_lengths=[len(sample.input_ids) for sample in one.samples],
        numbers=[sample.number for sample in one.samples],
        mm_kwargs=None,
    )
    config = SimpleNamespace(
        hidden_size=shape.hidden_size, num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups, head_dim=shape.kv_channels,
        intermediate_size=shape.ffn_hidden_size, num_hidden_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
    )  # fmt: skip
    bin_cost = module.build_bin_cost(config)

    def plan(lengths: list[int]) -> Schedule:
        samples = [
            SimpleNamespace(input_ids=range(n), number=at, mm_kwargs=None, routed_experts=None)
            for at, n in enumerate(lengths)
        ]
        bins = module.packed_samples_into_micro_bs(samples, cap, layout.dp_size, bin_cost)
        bins = module._pad_group_for_distribution(bins, layout.dp_size)
        ranks = module._distribute_group(bins, layout.dp_size, bin_cost)
        return [[one.numbers for one in rank] for rank in ranks]

    return plan


def torchtitan(folder: Path, layout: Parallelism, cap: int) -> Planner:
    """The RL trainer's batcher: next fit, rows dealt in turns. What it pads rows with is not
    counted.
    """
    module = _alone(
        folder, "torchtitan.experiments.rl.components.batcher",
        {
            "torchtitan": {}, "torchtitan.experiments": {}, "torchtitan.experiments.rl": {},
            "torchtitan.config": {"Configurable": type("Configurable", (), {"Config": object})},
            "torchtitan.experiments.rl.observability": {}, "torchtitan.experiments.rl.types": {},
        },
    )  # fmt: skip
    batcher = module.Batcher.__new__(module.Batcher)
    batcher.local_batch_size, batcher.seq_len, batcher._dp_degree = 1, cap, layout.dp_size
    batcher._per_sample_pad_multiple = None
    batcher._pack_training_sample_row = lambda row: [sample.number for sample in row]
    batcher.collate = lambda rows: [number for row in rows for number in row]

    def plan(lengths: list[int]) -> Schedule:
        samples = [
            SimpleNamespace(token_ids=range(n + 1), number=at) for at, n in enumerate(lengths)
        ]
        rows = batcher._assign_training_samples_to_rows(samples)
        grid = batcher._build_microbatch_grid([*map(batcher._pack_training_sample_row, rows)])
        return [list(rank) for rank in zip(*grid, strict=True)]

    return plan


def distca(folder: Path, layout: Parallelism, cap: int) -> Planner:
    """Its WLB-LLM planner, in as few micro-batches as the cap allows. Its own planner sends parts
    of attention to other devices, which is no packing.
    """
    module = _alone(folder, "distca.planner.wlb_planner", {"rich": {"print": lambda *_: None}})

    def plan(lengths: list[int]) -> Schedule:
        number = -(-sum(lengths) // (cap * layout.dp_size)) * layout.dp_size
        _, bins = module.balance_data_for_wlbllm(number, 0, cap, 1, [lengths], Lmax=cap)
        numbers = defaultdict(list)
        for at, length in enumerate(lengths):
            numbers[length].append(at)
        named = [[numbers[length].pop() for length in one] for one in bins]
        return [named[rank :: layout.dp_size] for rank in range(layout.dp_size)]

    return plan


def _of(folder: Path, name: str) -> ModuleType:
    """A module of a checkout, with the packages that it is in."""
    path = folder / f"{name.replace('.', '/')}.py"
    _check(folder, path)
    sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def _alone(
    folder: Path,
    name: str,
    others: dict[str, dict[str, Any]] | None = None,
    below: str = "",
) -> ModuleType:
    """A module of a checkout without its packages: ``others`` stand for what it imports, with the
    values that it needs and nothing else behind any other name.
    """
    path = folder / f"{below}{name.replace('.', '/')}.py"
    _check(folder, path)
    before = {other: sys.modules.get(other) for other in (*(others or {}), name)}
    try:
        for other, values in (others or {}).items():
            sys.modules[other] = module = ModuleType(other)
            vars(module).update({"__getattr__": _nothing, "__path__": []} | values)
        for other in others or {}:
            parent, _, child = other.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], child, sys.modules[other])
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        for other, known in before.items():
            if known is None:
                sys.modules.pop(other, None)
            else:
                sys.modules[other] = known


class _Named(type):
    """Has any name, which is nothing again: ``metrics.Metric`` in an annotation."""

    def __getattr__(cls, name: str) -> Any:
        return _nothing(name)


class _Nothing(metaclass=_Named):
    """Stands for what a planner imports and does not need."""


def _nothing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Nothing


def _check(folder: Path, path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{folder} has no {path.relative_to(folder)}; give a checkout of it")
