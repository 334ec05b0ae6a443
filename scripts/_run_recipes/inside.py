"""What a process of a run does besides training: the same first weights in every layout, a note of
the documents of each step, and, as a negative control, something wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DOCUMENTS, METRICS = "documents", "metrics"
"""Files of a run: a JSON line a step."""
SPOILS = ("document", "weight")
_STD = 0.1
"""Of weights; about what keeps the size of activations of so narrow a model."""


def train(script: Path | None, words: Sequence[str], spoil: str = "") -> int:
    """Runs the launcher on this rank; the exit code."""
    from megatron_wlb.launch import main

    _set_weights(spoil == "weight")
    _note_documents(spoil == "document")
    return main([*([] if script is None else [str(script)]), *words])


def check_arguments(words: Sequence[str], num_devices: int, found: Path) -> int:
    """Writes what the launcher says against arguments on so many devices, each thing a string of a
    JSON list.
    """
    from megatron_wlb.errors import WLBError
    from megatron_wlb.runtime.megatron_lm import dry_run

    said: list[str] = []
    try:
        dry_run.settings(words, num_devices)
    except WLBError as error:
        said = str(error).splitlines()
    found.write_text(json.dumps(said))
    return 0


def _set_weights(spoiled: bool) -> None:
    """Fills every model with numbers that depend on the weight's name and place alone."""
    from megatron_wlb.runtime.gpt.hybrid import MODELS

    def filled(build: Any) -> Any:
        @functools.wraps(build)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            build(self, *args, **kwargs)
            _fill(self)
            if spoiled and os.environ["RANK"] == "0":
                _spoil_weight(self)

        return __init__

    for kind in MODELS:
        kind.__init__ = filled(kind.__init__)


def _fill(model: Any) -> None:
    import torch
    from megatron.core.parallel_state import get_data_parallel_group

    # Layers that predict further ahead have a copy of the embedding, which is named by this group.
    metadata = {"dp_cp_group": get_data_parallel_group(with_context_parallel=True)}
    with torch.no_grad():
        for tensor in _sharded(model.sharded_state_dict(metadata=metadata)):
            generator = torch.Generator().manual_seed(zlib.crc32(tensor.key.encode()))
            whole = torch.empty(tensor.global_shape).normal_(0, _STD, generator=generator)
            shape = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
            place = (
                slice(at, at + size) for at, size in zip(tensor.global_offset, shape, strict=True)
            )
            part = whole[tuple(place)].reshape(tensor.data.shape)
            if tensor.data.dim() == 1 and (tensor.data == tensor.data[0]).all():
                # Biases and scales of norms keep their zeros and ones.
                part = part + tensor.data
            tensor.data.copy_(part)


def _sharded(tree: Any) -> Iterator[Any]:
    """The tensors of a checkpoint's state, which know which part of the whole weight they are."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(tree, ShardedTensor):
        yield tree
    elif isinstance(tree, ShardedTensorFactory):
        yield from _sharded(tree.build())
    elif isinstance(tree, dict | list):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from _sharded(one)


def _spoil_weight(model: Any) -> None:
    for name, weight in model.named_parameters():
        if name.endswith("linear_fc2.weight"):
            weight.data[0, 0] += _STD
            return


def _note_documents(spoiled: bool) -> None:
    """Writes which documents each step of training runs, as the planner made it."""
    from megatron_wlb.planning.plan_ahead import PlanAhead

    next_plan = PlanAhead.next_plan

    def noting(self: Any) -> Any:
        plan = next_plan(self)
        if plan is not None and os.environ["RANK"] == "0":
            documents = sorted([d.corpus, d.number, d.offset, d.length] for d in plan.documents)
            with Path(DOCUMENTS).open("a") as stream:
                stream.write(json.dumps(documents) + "\n")
        return _without_a_document(plan) if spoiled and plan is not None else plan

    PlanAhead.next_plan = noting  # type: ignore[method-assign]


def _without_a_document(plan: Any) -> Any:
    """The plan whose first micro-batch of several documents lacks one; its length stays."""
    ranks = [list(rank) for rank in plan.micro_batches]
    for rank in ranks:
        for number, micro_batch in enumerate(rank):
            if len(micro_batch.spans) > 1:
                rank[number] = dataclasses.replace(micro_batch, spans=micro_batch.spans[:-1])
                return dataclasses.replace(plan, micro_batches=tuple(map(tuple, ranks)))
    return plan
