"""A rank's shards of the model: fp32 weights, summed gradients and Adam's moments."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer

from megatron_wlb.runtime.ranks.transfer import HostCopy
from megatron_wlb.runtime.strategy.buckets import Buckets
from megatron_wlb.settings.megatron import TrainingConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class Store:
    """The shards that a rank keeps of all buckets, and their optimizer.

    Adam is Megatron's, with weight decay for what Megatron decays. Its groups are what a
    learning-rate schedule of Megatron's takes.
    """

    def __init__(self, buckets: Buckets, training: TrainingConfig, device: torch.device) -> None:
        rank = dist.get_rank()
        limits = [buckets.shard(bucket, rank) for bucket in range(len(buckets.sizes))]
        sizes = [stop - start for start, stop in limits]
        self._weights = torch.zeros(sum(sizes), device=device)
        self._gradients = torch.zeros_like(self._weights)
        self.weights = list(torch.split(self._weights, sizes))
        """By bucket."""
        self.gradients = list(torch.split(self._gradients, sizes))
        groups: list[dict[str, Any]] = [
            {"params": [], "wd_mult": mult, "lr_mult": 1.0, "max_lr": training.lr}
            | {"min_lr": training.min_lr, "is_decoupled_lr": False, "is_expert_parallel": False}
            for mult in (1.0, 0.0)
        ]
        self._parameters: list[list[torch.nn.Parameter]] = []
        for (start, stop), decayed, weight, gradient in zip(
            limits, buckets.decayed, self.weights, self.gradients, strict=True
        ):
            cut = min(max(decayed - start, 0), stop - start)
            own = []
            for group, span in zip(groups, (slice(cut), slice(cut, None)), strict=True):
                if weight[span].numel():
                    parameter = torch.nn.Parameter(weight[span])
                    parameter.grad = gradient[span]
                    group["params"].append(parameter)
                    own.append(parameter)
            self._parameters.append(own)
        self.optimizer: Any = megatron_optimizer.Adam(
            groups,
            lr=training.lr,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
            weight_decay=training.weight_decay,
        )
        for own in self._parameters:
            for parameter in own:
                state = self.optimizer.state[parameter]
                state.update({name: torch.zeros_like(parameter) for name in MOMENTS})
        self.set_num_updates(0)

    def moments(self, name: str, bucket: int) -> torch.Tensor:
        """A copy of a moment of a bucket's shard."""
        parts = [self.optimizer.state[p][name] for p in self._parameters[bucket]]
        return torch.cat(parts) if parts else self.weights[bucket].new_empty(0)

    @torch.no_grad()
    def set_moments(self, name: str, bucket: int, values: torch.Tensor) -> None:
        own = self._parameters[bucket]
        for parameter, part in zip(own, torch.split(values, [p.numel() for p in own]), strict=True):
            self.optimizer.state[parameter][name].copy_(part)

    def set_num_updates(self, num: int) -> None:
        """Tells Adam how many updates the moments are of."""
        for group in self.optimizer.param_groups:
            group["step"] = num  # of a fused Adam
            for parameter in group["params"]:
                if self._counts_each:
                    self.optimizer.state[parameter]["step"] = torch.tensor(float(num))

    @property
    def _counts_each(self) -> bool:
        """Whether Adam counts updates parameter by parameter, as torch's own does."""
        return isinstance(self.optimizer, torch.optim.Adam)

    @property
    def num_bytes(self) -> int:
        """Counts the bytes of all that it keeps."""
        moments = [s[name] for s in self.optimizer.state.values() for name in MOMENTS]
        return sum(t.nbytes for t in (self._weights, self._gradients, *moments))

    def forget_gradients(self) -> None:
        self._gradients.zero_()

    @torch.no_grad()
    def update(self, num_targets: float, clip_grad: float) -> HostCopy:
        """Divides the summed gradients by the number of targets, clips them by the norm of all
        ranks' and updates the weights; returns the norm. All ranks of the world call it together.
        """
        self._gradients /= num_targets or 1
        square = torch.zeros(1, dtype=torch.float64, device=self._gradients.device)
        for gradient in self.gradients:
            square += gradient.double().square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        if clip_grad > 0:
            self._gradients *= (clip_grad / (norm + 1e-6)).clamp(max=1.0).float()
        self.optimizer.step()
        return HostCopy(norm)
