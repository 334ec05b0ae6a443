"""Counts bytes of the tensors that are alive, and their peak, by watching every operation.

A storage counts from the first operation that returns it until Python or autograd lets it go,
once, however many tensors view it. What kernels use inside and give back is not seen.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_wlb.plan import MicroBatchPlan, Span, StepPlan
from megatron_wlb.settings.config import Config
from megatron_wlb.sharding import Sharding
from megatron_wlb.testing.workload import make_workload

if TYPE_CHECKING:
    from megatron_wlb.runtime.step import StepRunner

VOCAB_SIZE = 500
"""Vocabulary of the documents in :func:`measure_step`."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; storages that it has seen are followed beyond that."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Bytes alive."""
        self.peak = 0
        """The most since :meth:`reset_peak`."""
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors that exist already."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not self._recount(storage):
                key, size = id(storage), storage.nbytes()
                self._storages[key] = (weakref.ref(storage, partial(self._forget, key)), size)
                self._count(size)

    def reset_peak(self) -> None:
        self.peak = self.live

    def _count(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _recount(self, storage: Any) -> bool:
        """Counts what a known storage has been resized by; whether it is one."""
        known = self._storages.get(id(storage))
        if known is None:
            return False
        self._count(storage.nbytes() - known[1])
        self._storages[id(storage)] = (known[0], storage.nbytes())
        return True

    def _forget(self, key: int, _: Any) -> None:
        self.live -= self._storages.pop(key)[1]

    def __enter__(self) -> LiveBytes:
        # No operation: attention frees and takes back the memory of gathered keys this way.
        original = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            self._recount(storage)
            return result

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize)
        self._patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._patch.stop()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes alive on one rank in a training step that is not the first."""

    num_parameters: int
    held: int
    """Bytes between steps: weights, gradient buffers, optimizer state."""
    activations: int
    """The most that forward and backward added."""
    update: int
    """The most that the optimizer's update added."""


def step_bytes(live: LiveBytes, runner: StepRunner, plan: StepPlan) -> tuple[int, int]:
    """Bytes held before forward and backward of a step, and the most that these add."""
    for chunk in runner.model.chunks:
        chunk.train()
        chunk.zero_grad_buffer()  # type: ignore[operator]
    for gpt in runner.model.gpts:
        gpt.set_input_tensor(None)  # a chunk keeps its last input until the next one
    gc.collect()
    held = live.live
    live.reset_peak()
    runner.run(plan)
    return held, live.peak - held


def measure_step(config: Config, lengths: Sequence[Sequence[int]], pad: int) -> MeasuredMemory:
    """Measures a step of given micro-batches, the same ones on all data-parallel ranks.

    ``lengths`` are those of each micro-batch's documents; ``pad`` tokens of padding follow them.
    """
    from megatron_wlb.runtime.optimizer import build_optimizer
    from megatron_wlb.testing.ranks import build_runner

    workload = make_workload(
        [[n for documents in lengths for n in documents]], vocab_size=VOCAB_SIZE
    )
    documents = iter(workload.steps[0])
    micro_batches = []
    for index, own in enumerate(lengths):
        spans = tuple(Span(d, 0, d.length) for d in itertools.islice(documents, len(own)))
        micro_batches.append(
            MicroBatchPlan(index, spans, sum(own) + pad, 1.0, Sharding("per-document"))
        )
    with LiveBytes() as live:
        runner = build_runner(config, workload)
        dp_size = runner.model.groups.dp.size()
        plan = StepPlan(0, "given", (tuple(micro_batches),) * dp_size, 0, 0)
        chunks = runner.model.chunks
        optimizer, _ = build_optimizer(config, runner.model)
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        live.watch(parameters)
        for _ in range(2):  # the first allocates what later ones find
            optimizer.zero_grad()
            held, activations = step_bytes(live, runner, plan)
            live.reset_peak()
            optimizer.step()
            update = live.peak - held
    return MeasuredMemory(sum(p.numel() for p in parameters), held, activations, update)
