"""A rank's shards of the model: fp32 weights, summed gradients and the optimizer's moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig

from megatron_wlb.runtime.stepping.optimizer import make_loadable
from megatron_wlb.strategies.run.buckets import Buckets
from megatron_wlb.strategies.run.pieces import GroupOf


def groups_of(
    chunks: Sequence[Any], config: OptimizerConfig, overrides: Any = None
) -> tuple[list[dict[str, Any]], GroupOf]:
    """Megatron's groups of the parameters of models, those of experts last, and which one each
    parameter is in; all ranks of the world call it together.

    Without ``overrides`` they are Megatron's own: biases and norms do not decay.
    """
    if overrides is None:  # as get_megatron_optimizer does
        overrides = megatron_optimizer.get_standard_config_overrides(config)
    groups = megatron_optimizer._get_param_groups(chunks, config, overrides)
    groups.sort(key=lambda group: bool(group["is_expert_parallel"]))
    numbers = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    return groups, lambda parameter: numbers[id(parameter)]


class Store:
    """The shards that a rank keeps of all buckets, and their optimizer, which is Megatron's."""

    optimizer: Any = None
    """Megatron's; None where nothing is trained."""

    def __init__(self, buckets: Buckets) -> None:
        rank, device = dist.get_rank(), torch.cuda.current_device()
        kept = [buckets.parts(bucket, rank) for bucket in range(len(buckets.sizes))]
        sizes = [sum(stop - start for start, stop in parts) for parts in kept]
        self._weights = torch.zeros(sum(sizes), device=device)
        self._gradients = torch.zeros_like(self._weights)
        self.weights = list(torch.split(self._weights, sizes))
        """By bucket."""
        self.gradients = list(torch.split(self._gradients, sizes))
        self._parameters: list[list[tuple[int, Any]]] = []
        """By bucket: the numbers of groups, and what this rank has of them there."""
        for parts, ends, weight, gradient in zip(
            kept, buckets.ends, self.weights, self.gradients, strict=True
        ):
            own, before = [], 0
            for start, stop in parts:
                for group, span in enumerate(pairwise([0, *ends])):
                    at = [before + min(max(end, start), stop) - start for end in span]
                    if at[0] < at[1]:
                        parameter: Any = torch.nn.Parameter(weight[slice(*at)])
                        parameter.main_grad = gradient[slice(*at)]
                        own.append((group, parameter))
                before += stop - start
            self._parameters.append(own)

    def optimize(self, config: OptimizerConfig, groups: Sequence[Mapping[str, Any]]) -> None:
        """Makes Megatron's optimizer of the shards, in groups of :func:`groups_of`."""
        own = [
            {**group, "params": [p for part in self._parameters for g, p in part if g == number]}
            for number, group in enumerate(groups)
        ]
        self.optimizer = megatron_optimizer._get_megatron_optimizer_based_on_param_groups(
            # It asks of the first chunk, from 0.20 on, whether it is sharded; shards have none.
            config,
            [None],
            own,
            model_parallel_group=dist.group.WORLD,
        )
        make_loadable(self.optimizer)
        self.optimizer.init_state_fn(self._inner, config)
        self.set_num_updates(0)

    @property
    def _inner(self) -> Any:
        """The optimizer inside Megatron's."""
        return self.optimizer.optimizer

    @property
    def moments(self) -> tuple[str, ...]:
        """What the optimizer keeps of each weight, by name."""
        if self.optimizer is None:
            return ()
        if "betas" in self._inner.defaults:
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self._inner.defaults["momentum"] else ()

    def moment(self, name: str, bucket: int) -> torch.Tensor:
        """A copy of a moment of a bucket's shard."""
        parts = [self._inner.state[p][name] for _, p in self._parameters[bucket]]
        return torch.cat(parts) if parts else self.weights[bucket].new_empty(0)

    @torch.no_grad()
    def set_moment(self, name: str, bucket: int, values: torch.Tensor) -> None:
        own = [parameter for _, parameter in self._parameters[bucket]]
        for parameter, part in zip(own, torch.split(values, [p.numel() for p in own]), strict=True):
            self._inner.state[parameter][name].copy_(part)

    def set_num_updates(self, num: int) -> None:
        """Tells Adam how many updates the moments are of."""
        if "betas" not in self._inner.defaults:
            return
        for group in self._inner.param_groups:
            group["step"] = num  # of a fused Adam
            for parameter in group["params"]:
                if self.counts_each:
                    self._inner.state[parameter]["step"] = torch.tensor(float(num))

    @property
    def counts_each(self) -> bool:
        """Whether Adam counts updates parameter by parameter, as torch's own does."""
        return isinstance(self._inner, torch.optim.Adam)

    @property
    def num_bytes(self) -> int:
        """Counts the bytes of all that it keeps."""
        states = self._inner.state.values() if self.optimizer is not None else ()
        kept = [s[name] for s in states for name in self.moments]
        return sum(t.nbytes for t in (self._weights, self._gradients, *kept))

    def forget_gradients(self) -> None:
        self._gradients.zero_()

    def divide_gradients(self, num_targets: float) -> None:
        self._gradients /= num_targets or 1
