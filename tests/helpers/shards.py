"""Finds which elements of the model a rank holds, and compares them with the oracle's.

A rank's parameter is described by the *flat indices* of its elements in the whole parameter, got
by cutting an array of indices exactly as an array of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.oracle import Array, OracleRun, State
from megatron_wlb.settings.megatron import ModelConfig

Indices = npt.NDArray[np.int64]

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_WEIGHTS = "output_layer.weight"

RTOL = 1e-5
ATOL_OF_MAX = 1e-5
"""Absolute tolerance, as a share of the largest entry of the whole array.

An entry of a gradient is a sum that the oracle adds in another order, so it is wrong by some fp32
roundings (6e-8) of its *terms*, which are of the order of the array's largest entries: up to 2.5e-6
was seen in the first step.
"""
ATOL_LATER = 3e-5
"""Absolute tolerance after the first step: weights differ by roundings too, which normalised
queries and keys and large scores (YaRN's) amplify: up to 1.4e-5 was seen, with either of the CPU's
kernels.
"""
ATOL_OF_MODEL = 1e-7
"""Absolute tolerance, as a share of the largest entry of the whole model.

For arrays in which *every* entry is a sum that cancels: the softmax does not see a shift of all
scores, so the bias of the keys' norm has a gradient only through what is rotated.
"""


@dataclass(frozen=True)
class Held:
    """A parameter of one rank, as part of the whole model's."""

    name: str
    """The parameter's name in the whole model."""
    indices: Indices
    """Where its elements lie in the flattened whole parameter; shaped as the rank's part."""


@dataclass(frozen=True)
class RankRun:
    """What one rank saw in a run of the same steps as the oracle's."""

    held: tuple[Held, ...]
    losses: tuple[float, ...]
    evaluated: tuple[float, ...]
    """The losses again, from forward passes alone."""
    gradients: tuple[tuple[Array, ...], ...]
    """Gradients by step and parameter: flat, the elements of ``gradient_ranges``."""
    gradient_ranges: tuple[tuple[int, int], ...]
    """The part of each parameter's flat elements whose gradient this rank has."""
    final: tuple[Array, ...]
    """Each parameter's weights after the last step."""
    ahead: tuple[tuple[float, ...], ...] = ()
    """The losses of each step of layers that predict further ahead."""
    auxiliary: tuple[dict[str, list[float]], ...] = ()
    """As the oracle's, by step, as Megatron logs them."""
    biases: State = field(default_factory=dict)
    """Of the routers here, after the last step, by whole names."""


EXPERTS = ".local_experts."


def whole_name(name: str, first_layer: int, tied: bool, first_expert: int = 0) -> str:
    """A chunk's parameter name, whose layers and experts count from 0, -> the whole model's."""
    head, experts, tail = name.partition(EXPERTS)
    if experts:
        number, dot, rest = tail.partition(".")
        name = f"{head}{experts}{int(number) + first_expert}{dot}{rest}"
    if tied and name == OUTPUT_WEIGHTS:
        return WORD_EMBEDDINGS
    head, layers, tail = name.partition("decoder.layers.")
    if not layers:
        return name
    assert not head
    number, dot, rest = tail.partition(".")
    return f"{layers}{int(number) + first_layer}{dot}{rest}"


def sections(name: str, m: ModelConfig) -> list[int]:
    """Sizes of what stands in a weight one after another, and is divided each for itself.

    Query, key and value rows of attention are grouped by query group. A gated MLP's first layer is
    ``[gate; up]``; what states take of a token, and gates, are as in their papers.
    """
    keys = m.linear_num_key_heads * m.linear_key_head_dim
    values = m.linear_num_value_heads * m.linear_value_head_dim
    inner = (m.mamba_num_heads or 0) * m.mamba_head_dim
    shared = m.mamba_num_groups * m.mamba_state_dim
    known = {
        ".linear_fc1.": [1, 1] if m.swiglu else [1],
        ".self_attention.in_proj.": [keys, keys, values, values, *[m.linear_num_value_heads] * 2],
        ".self_attention.conv1d": [keys, keys, values],
        ".mixer.in_proj.": [inner, inner, shared, shared, m.mamba_num_heads or 0],
        ".mixer.conv1d": [inner, shared, shared],
    }
    return next((sizes for part, sizes in known.items() if part in name), [1])


def shard(
    whole: npt.NDArray[Any], parts: Sequence[int], dim: int | None, rank: int, size: int
) -> Any:
    """A TP rank's part of a whole array, as Megatron divides it.

    Contiguous along ``dim`` (None: every rank has all of it) in each of :func:`sections`.
    """
    if dim is None:
        return whole
    ends = np.cumsum(parts)[:-1] * whole.shape[dim] // sum(parts)
    own = (np.split(part, size, axis=dim)[rank] for part in np.split(whole, ends, axis=dim))
    return np.concatenate([*own], axis=dim)


def differences(oracle: OracleRun, runs: Sequence[RankRun], times: float = 1.0) -> list[str]:
    """Lists how the ranks' run differs from the oracle's by more than ``times`` the tolerances, and
    what no rank holds.
    """
    found: list[str] = []
    for rank, run in enumerate(runs):
        none = ((),) * len(oracle.steps)
        for number, (seen, step) in enumerate(zip(run.ahead or none, oracle.steps, strict=True)):
            if len(seen) != len(step.ahead) or not np.allclose(seen, step.ahead, rtol=times * 1e-6):
                found.append(f"step {number}: loss ahead on rank {rank}: {seen}, not {step.ahead}")
        for label, losses in (("loss", run.losses), ("evaluated loss", run.evaluated)):
            for number, (loss, step) in enumerate(zip(losses, oracle.steps, strict=True)):
                # fp32 sums of some hundred token losses, of about one size; 1e-7 was seen.
                if not abs(loss - step.loss) <= times * 1e-6 * abs(step.loss):
                    found.append(
                        f"step {number}: {label} on rank {rank}: {loss:.8f}, not {step.loss:.8f}"
                    )
        found += _compare_experts(oracle, rank, run, times)
    for number, step in enumerate(oracle.steps):
        pieces = [
            (rank, held.name, held.indices.reshape(-1)[slice(*run.gradient_ranges[at])], values)
            for rank, run in enumerate(runs)
            for at, (held, values) in enumerate(zip(run.held, run.gradients[number], strict=True))
        ]
        atol = ATOL_LATER if number else ATOL_OF_MAX
        found += _compare(f"step {number}: gradient of", step.gradients, pieces, atol, times)
    weights = [
        (rank, held.name, held.indices.reshape(-1), values.reshape(-1))
        for rank, run in enumerate(runs)
        for held, values in zip(run.held, run.final, strict=True)
    ]
    return found + _compare("final", oracle.final, weights, ATOL_OF_MAX, times)


def _compare_experts(oracle: OracleRun, rank: int, run: RankRun, times: float) -> Iterator[str]:
    """Auxiliary losses as Megatron logs them, and biases, which move by steps of one size."""
    auxiliary = run.auxiliary or ({},) * len(oracle.steps)
    for number, (step, logged) in enumerate(zip(oracle.steps, auxiliary, strict=True)):
        if logged.keys() != step.auxiliary.keys():
            yield f"step {number}: rank {rank} logs {list(logged)}, not {list(step.auxiliary)}"
        for name in logged.keys() & step.auxiliary.keys():
            # As of losses; later steps differ by the weights' roundings.
            if not np.allclose(logged[name], step.auxiliary[name], rtol=times * 1e-5, atol=0):
                yield (
                    f"step {number}: {name} on rank {rank}: {logged[name]}, not "
                    f"{step.auxiliary[name]}"
                )
    for name, bias in run.biases.items():
        if not np.allclose(bias, oracle.biases[name], rtol=times * 1e-6, atol=1e-9):
            yield f"final {name} on rank {rank}: {bias}, not {oracle.biases[name]}"


def _compare(
    label: str,
    expected: Mapping[str, Array],
    pieces: Iterable[tuple[int, str, Indices, Array]],
    atol_of_max: float,
    times: float,
) -> list[str]:
    found = []
    floor = ATOL_OF_MODEL * max(float(np.abs(array).max()) for array in expected.values())
    covered = {name: np.zeros(array.size, dtype=bool) for name, array in expected.items()}
    for rank, name, indices, values in pieces:
        if name not in expected:
            found.append(f"{label} {name} on rank {rank}: the oracle has no such parameter")
            continue
        covered[name][indices] = True
        whole = expected[name].reshape(-1)
        atol = max(atol_of_max * float(np.abs(whole).max()), floor)
        error = np.abs(values - whole[indices])
        # Not `error > limit`: NaN must not pass.
        wrong = ~(error <= times * (atol + RTOL * np.abs(whole[indices])))
        if wrong.any():
            found.append(
                f"{label} {name} on rank {rank}: {wrong.sum()} of {wrong.size} elements differ, by "
                f"up to {np.nanmax(error):.2e} where the largest is {np.abs(whole).max():.2e}"
            )
    for name, seen in covered.items():
        if not seen.all():
            found.append(f"{label} {name}: {(~seen).sum()} of {seen.size} elements on no rank")
    return found


def held_by(
    state: State,
    parameters: Iterable[tuple[str, Any]],
    tp_rank: int,
    tp_size: int,
    model: ModelConfig,
    of_experts: tuple[int, int] = (0, 1),
) -> list[Held]:
    """Finds where the elements of a rank's parameters, by whole names, lie in the whole model's.

    ``of_experts`` are rank and size of the experts' tensor parallelism.
    """
    result = []
    for name, parameter in parameters:
        whole = np.arange(state[name].size).reshape(state[name].shape)
        divided = getattr(parameter, "tensor_model_parallel", False)
        dim = parameter.partition_dim if divided else None
        part = of_experts if EXPERTS in name else (tp_rank, tp_size)
        indices = shard(whole, sections(name, model), dim, *part)
        assert indices.shape == tuple(parameter.shape), (name, indices.shape, parameter.shape)
        result.append(Held(name, indices))
    return result
