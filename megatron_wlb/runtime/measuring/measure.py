"""Times micro-batches of several lengths on the model that will train: a fitted cost, or tables.

Each pipeline stage runs its own chunks, forward and backward; stages are added up, data-parallel
replicas averaged. Takes seconds. What is made of the times is made on one rank and sent to the
others: processors differ in the last bits of a fit, and plans must not.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_wlb.cost import DocumentCost
from megatron_wlb.cost.fit import Sample, fit_document_cost
from megatron_wlb.cost.fp8 import row_multiple
from megatron_wlb.cost.shape import ModelShape
from megatron_wlb.cost.table import ProfiledCost, Row, model_identity
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan.sharding import Sharding, length_multiple
from megatron_wlb.runtime.device_clock import Clock
from megatron_wlb.runtime.gpt.attention.document_attention import layer_reach, model_reach
from megatron_wlb.runtime.gpt.build import Model
from megatron_wlb.runtime.gpt.hybrid import attentions_of, depths_of, layers_of, scan_taps_of
from megatron_wlb.runtime.gpt.moe import RoutedTokens
from megatron_wlb.runtime.gpt.prediction import Ahead, take_losses
from megatron_wlb.runtime.gpt.states import ScannedDocuments
from megatron_wlb.runtime.ranks.transfer import from_first_rank, mapped
from megatron_wlb.runtime.saving.core import rng_state, set_rng_state
from megatron_wlb.runtime.stepping.batch import local_params

logger = logging.getLogger(__name__)

NUM_REPEATS = 5
"""The most runs of a length."""
NUM_TURNS = 3
"""Measurements until times grow with the length: a machine that others share may disturb some."""
LAYER_MS = 4.0
"""A GPU waits for so long while the host queues up a layer's kernels, a hundred in both passes."""


def lengths_to_measure(window: int, multiple: int) -> list[int]:
    """Lengths of documents from short to the window, multiples of ``multiple``."""
    fractions = (1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
    lengths = {max(1, round(window * f / multiple)) * multiple for f in fractions}
    # A tiny window has few different lengths; the fit needs three.
    return sorted(lengths | {multiple, 2 * multiple, 3 * multiple})


def measured_cost(model: Model, window: int, vocab_size: int) -> DocumentCost:
    """Measured cost of documents up to ``window`` tokens; leaves gradients zero and random-number
    streams as they were.

    The least of :data:`NUM_REPEATS` runs of a length counts; long ones run less often. Raises
    :class:`ConfigError` on all ranks for times that no cost fits.
    """
    lengths = lengths_to_measure(window, _multiple(model))
    config = model.config
    reaches = [layer_reach(config, number) for number in range(1, config.num_layers + 1)]
    windowed = sum(reach is not None for reach in reaches) / len(reaches)
    for turns_left in reversed(range(NUM_TURNS)):
        with _undisturbed(model):
            run_passes(model, lengths[:1], vocab_size)  # the first run of all loads and allocates
            times_us = _least_us(
                model, lengths, lambda length: run_passes(model, [length], vocab_size)
            )
        samples = [Sample(length, *us) for length, us in zip(lengths, times_us, strict=True)]
        try:
            fit = from_first_rank(
                partial(fit_document_cost, samples, model_reach(config), windowed)
            )
            break
        except ConfigError:
            if not turns_left:
                raise
    logger.info(
        "measured cost: %s (relative error mean %.1f %%, max %.1f %%)",
        {k: float(f"{v:.4g}") for k, v in fit.cost.as_dict().items()},
        100 * fit.mean_error,
        100 * fit.max_error,
    )
    return fit.cost


def measure_tables(
    model: Model, shape: ModelShape, max_tokens: int, vocab_size: int, machine: str
) -> ProfiledCost:
    """Measures tables for documents and micro-batches of up to ``max_tokens``.

    The model is left as it was, as :func:`measured_cost` leaves it. Attention is timed alone. The
    rest is the time of micro-batches of short documents, without their attention.
    """
    config, multiple = model.config, _multiple(model)
    longest = -(-max_tokens // multiple) * multiple
    lengths = sorted({max(1, longest // 2**n // multiple) * multiple for n in range(7)})
    piece = lengths[min(2, len(lengths) - 1)]  # short: little attention; not tiny: few calls
    with _undisturbed(model):
        run_passes(model, _pieces(longest, piece), vocab_size)
        attention_us = _least_us(model, lengths, lambda length: _run_attention(model, length))
        whole_us = _least_us(
            model, lengths, lambda n: run_passes(model, _pieces(n, piece), vocab_size)
        )
    by_length = dict(zip(lengths, attention_us, strict=True))
    linear_us = []
    for length, (forward, backward) in zip(lengths, whole_us, strict=True):
        pieces = _pieces(length, piece)
        # All pieces but a rest are of one length, and the rest counts by its share.
        attention = [us * length / pieces[0] for us in by_length[pieces[0]]]
        # Never nothing: of a small model the difference may be all noise.
        whole = zip((forward, backward), attention, strict=True)
        linear_us.append([max(us - own_us, 0.05 * us) for us, own_us in whole])
    return from_first_rank(
        lambda: ProfiledCost(
            model_identity(shape),
            config.tensor_model_parallel_size,
            config.context_parallel_size,
            _rows(lengths, attention_us),
            _rows(lengths, linear_us),
            machine,
        )
    )


def _rows(lengths: Sequence[int], times_us: Sequence[Sequence[float]]) -> tuple[Row, ...]:
    """Rows whose times rise: noise only adds time, so a longer run that took less is believed."""
    least = [math.inf, math.inf]
    rows = []
    for length, us in zip(reversed(lengths), reversed(times_us), strict=True):
        least = [min(a, b) for a, b in zip(least, us, strict=True)]
        rows.append(Row(length, *least))
    return tuple(reversed(rows))


def _multiple(model: Model) -> int:
    """What tokens must be a multiple of to divide over the ranks of a micro-batch."""
    config, rows = model.config, 1
    if config.fp8:
        recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe)
        rows = row_multiple(recipe, spread=config.sequence_parallel)
    return length_multiple(
        model.groups.tp.size(), model.groups.cp.size(), config.sequence_parallel, rows
    )


def _pieces(num_tokens: int, piece: int) -> list[int]:
    """``num_tokens`` in documents of ``piece`` tokens and a shorter one."""
    rest = num_tokens % piece
    return [piece] * (num_tokens // piece) + ([rest] if rest else [])


@contextlib.contextmanager
def _undisturbed(model: Model) -> Iterator[None]:
    """Leaves gradients zero and random-number streams as they were; no gradient is reduced."""
    streams = rng_state()
    with contextlib.ExitStack() as stack:
        for chunk in model.chunks:
            stack.enter_context(chunk.no_sync())  # type: ignore[operator]
        yield
    take_losses()
    for gpt, chunk in zip(model.gpts, model.chunks, strict=True):
        chunk.zero_grad_buffer()  # type: ignore[operator]
        # What --defer-embedding-wgrad-compute leaves for the end of a step; lists or None.
        for name in ("embedding_activation_buffer", "grad_output_buffer"):
            (getattr(gpt, name, None) or []).clear()
    set_rng_state(streams)


def _least_us(
    model: Model, lengths: Sequence[int], run: Callable[[int], tuple[float, float]]
) -> list[list[float]]:
    """Measures the least µs of both passes of each length, of the whole model.

    The least of several runs, because all that others do on the machine only adds time.
    """
    device = model.device
    times = torch.zeros(len(lengths), 2, dtype=torch.float64, device=device)
    for row, length in enumerate(lengths):
        # All ranks must run equally often: the number follows from the length alone.
        repeats = max(2, min(NUM_REPEATS, max(lengths) // length))
        runs = np.array([run(length) for _ in range(repeats)])
        times[row] = torch.from_numpy(runs.min(axis=0))
    # Σ over stages; mean over the replicas (and over TP ranks, which run in step).
    torch.distributed.all_reduce(times)
    times *= model.groups.pp.size() / torch.distributed.get_world_size()
    rows: list[list[float]] = times.tolist()
    return rows


def _shard(model: Model) -> dict[str, Any]:
    """Documents measured one by one are divided per document: equally, whatever their length."""
    cp = model.groups.cp
    return {
        "cp_rank": cp.rank(),
        "cp_size": cp.size(),
        "sharding": Sharding("per-document"),
        "reach_tokens": model_reach(model.config),
    }


def run_passes(model: Model, lengths: Sequence[int], vocab_size: int) -> tuple[float, float]:
    """µs of forward and of backward of a micro-batch through this rank's chunks."""
    config = model.config
    device, clock = model.device, Clock(model.device, of_processor=False)
    _, params = local_params(
        lengths, np.concatenate([np.arange(n) for n in lengths]), device, **_shard(model)
    )
    assert params.positions is not None
    num_tokens, position_ids = len(params.positions), params.positions[None]
    params = replace(params, routed=RoutedTokens.padding(num_tokens, device))
    if taps := scan_taps_of(model.gpts):
        shard = _shard(model)
        scanned = ScannedDocuments.of(lengths, shard["cp_size"], shard["sharding"], taps)
        params = replace(params, scanned=mapped(scanned, lambda tensor: tensor.to(device)))
    tokens = torch.randint(0, vocab_size, (1, num_tokens), device=device)
    local = num_tokens // (model.groups.tp.size() if config.sequence_parallel else 1)
    forward = backward = 0.0
    for gpt, chunk in zip(model.gpts, model.chunks, strict=True):
        if not gpt.pre_process:
            hidden = torch.randn(
                local, 1, config.hidden_size, device=device, dtype=config.params_dtype
            )
            gpt.set_input_tensor(hidden.requires_grad_())
        # Any tokens do, of each depth too.
        depths = 1 + len(depths_of(gpt))
        rows = (tokens,) * depths, (tokens,) * depths, (torch.ones_like(tokens).float(),) * depths
        ahead = Ahead(*rows, num_tokens) if depths > 1 else None
        start = clock.begun(LAYER_MS * len(layers_of(gpt)))
        output = chunk(
            input_ids=tokens,
            position_ids=position_ids,
            attention_mask=None,
            labels=tokens if gpt.post_process else None,
            loss_mask=ahead.weights[0] if ahead else None,
            packed_seq_params=replace(params, ahead=ahead),
        )
        middle = clock.now()
        output.float().sum().backward()
        end = clock.now()
        forward += clock.between_us(start, middle)
        backward += clock.between_us(middle, end)
    return forward, backward


def _run_attention(model: Model, length: int) -> tuple[float, float]:
    """µs of core attention of one document in all layers of this rank's chunks.

    Under context parallelism of this rank's part of it; communication is not timed.
    """
    config = model.config
    device, clock = model.device, Clock(model.device, of_processor=False)
    _, params = local_params([length], np.arange(length), device, **_shard(model))
    # Layers that are alike, by whether they have a sliding window.
    layers = [attention for gpt in model.gpts for attention in attentions_of(gpt)]
    kinds = [[layer for layer in layers if (layer.core_attention.reach_tokens is None) == whole]
             for whole in (True, False)]  # fmt: skip
    forward = backward = 0.0
    for kind, of_kind in zip(kinds, (params, params.sliding), strict=True):
        if not kind:
            continue
        assert of_kind is not None and of_kind.segments is not None
        attention, segments = kind[0], of_kind.segments
        num_queries, num_keys = sum(segments.lengths_q), sum(segments.lengths_k)
        core, heads = attention.core_attention, attention.num_attention_heads_per_partition
        groups = attention.num_query_groups_per_partition
        query, key, value = (
            torch.randn(tokens, num, dim, device=device, dtype=config.params_dtype).requires_grad_()
            for tokens, num, dim in (
                (num_queries, heads, core.key_dim),
                (num_keys, groups, core.key_dim),
                (num_keys, groups, core.value_dim),
            )
        )
        start = clock.begun(LAYER_MS)
        output = core.options.kernel(query, key, value, segments, core.softmax_scale)
        middle = clock.now()
        output.backward(torch.ones_like(output))
        end = clock.now()
        forward += len(kind) * clock.between_us(start, middle)
        backward += len(kind) * clock.between_us(middle, end)
    return forward, backward
