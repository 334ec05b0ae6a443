"""Times documents of several lengths on the model that will train, and fits their cost.

Each pipeline stage runs its own chunks, one document a micro-batch, forward and backward; stages
are added up, data-parallel replicas averaged. Takes seconds. The result is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import statistics
import time

import torch

from megatron_wlb.cost.profile import Fit, Sample, fit_document_cost
from megatron_wlb.runtime.attention import PlanSeqParams
from megatron_wlb.runtime.model import Model


def lengths_to_measure(window: int, multiple: int) -> list[int]:
    """Lengths of documents from short to the window, multiples of ``multiple``."""
    fractions = (1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
    lengths = {max(1, round(window * f / multiple)) * multiple for f in fractions}
    # A tiny window has few different lengths; the fit needs three.
    return sorted(lengths | {multiple, 2 * multiple, 3 * multiple})


def measure_cost(model: Model, window: int, vocab_size: int, *, num_repeats: int = 5) -> Fit:
    """Measured cost of a document; leaves gradients zero and random-number streams as they were.

    Args:
        model: this rank's chunks, wrapped for DP.
        window: longest document, in tokens.
        vocab_size: for the random tokens.
        num_repeats: the median of so many runs of a length counts; long ones run less often.
    """
    device = next(model.gpts[0].parameters()).device
    multiple = model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1
    cpu_state, cuda_state = torch.get_rng_state(), torch.cuda.get_rng_state()
    lengths = lengths_to_measure(window, multiple)
    times = torch.zeros(len(lengths), 2, dtype=torch.float64, device=device)
    with contextlib.ExitStack() as stack:
        for chunk in model.chunks:
            stack.enter_context(chunk.no_sync())  # type: ignore[operator]
        _run(model, lengths[0], vocab_size, device)  # the first run of all loads and allocates
        for row, length in enumerate(lengths):
            # All ranks must run equally often: the number follows from the length alone.
            repeats = max(1, min(num_repeats, window // length))
            runs = [_run(model, length, vocab_size, device) for _ in range(repeats)]
            for column in range(2):
                times[row, column] = statistics.median(run[column] for run in runs) * 1e6
    for chunk in model.chunks:
        chunk.zero_grad_buffer()  # type: ignore[operator]
    torch.set_rng_state(cpu_state)
    torch.cuda.set_rng_state(cuda_state)

    # Σ over stages; mean over the replicas (and over TP ranks, which run in step).
    torch.distributed.all_reduce(times)
    times *= model.groups.pp.size() / torch.distributed.get_world_size()
    # Ranks may round a reduction differently; plans must not.
    torch.distributed.broadcast(times, src=0)
    return fit_document_cost(
        Sample(length, forward, backward)
        for length, (forward, backward) in zip(lengths, times.tolist(), strict=True)
    )


def _run(model: Model, length: int, vocab_size: int, device: torch.device) -> tuple[float, float]:
    """Seconds of forward and of backward of one document through this rank's chunks."""
    config = model.config
    positions = torch.arange(length, device=device)
    params = PlanSeqParams.of((length,), positions)
    tokens = torch.randint(0, vocab_size, (1, length), device=device)
    local = length // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    forward = backward = 0.0
    for gpt, chunk in zip(model.gpts, model.chunks, strict=True):
        if not gpt.pre_process:
            hidden = torch.randn(
                local, 1, config.hidden_size, device=device, dtype=config.params_dtype
            )
            gpt.set_input_tensor(hidden.requires_grad_())
        start = _now()
        output = chunk(
            input_ids=tokens,
            position_ids=positions[None],
            attention_mask=None,
            labels=tokens if gpt.post_process else None,
            packed_seq_params=params,
        )
        middle = _now()
        output.float().sum().backward()
        forward, backward = forward + middle - start, backward + _now() - middle
    return forward, backward


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
