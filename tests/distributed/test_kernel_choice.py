"""All ranks run the same attention kernel, whatever each of them has."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
from helpers.gloo import GlooPool

from megatron_wlb.errors import CompatibilityError

# What each of three ranks cannot run, of the kernels before the reference.
UNLIKE = (("flash-attn-3",), ("torch",), ("torch", "flash-attn-3"))
LACKING = "it is not installed"


def chosen(name: str, unlike: tuple[tuple[str, ...], ...]) -> tuple[str, str]:
    """The kernel's name or the error, and the log's line, of ranks that have what they have."""
    import torch

    from megatron_wlb.runtime.attention.kernels import Demand, choose, choose_kernel
    from megatron_wlb.runtime.attention.kernels.sdpa import sdpa_varlen

    def kernel(called: str) -> choose.Candidate:
        def run(*inputs: object) -> torch.Tensor:
            return sdpa_varlen(*inputs)  # type: ignore[arg-type]

        run.__name__ = called
        return choose.Candidate(lambda d: LACKING if called in lacks else None, lambda d: run)

    lacks = unlike[torch.distributed.get_rank()]
    candidates = {called: kernel(called) for called in ("flash-attn-3", "torch", "flash-attn-2")}
    demand = Demand(torch.device("cpu"), torch.float32, 4, 2, 16)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = choose.logger.level
    choose.logger.addHandler(handler)
    choose.logger.setLevel(logging.INFO)
    try:
        with mock.patch.object(choose, "CANDIDATES", candidates):
            kernel_name = choose_kernel(name, demand).__name__  # type: ignore[attr-defined]
    except CompatibilityError as error:
        kernel_name = str(error)
    finally:
        choose.logger.removeHandler(handler)
        choose.logger.setLevel(level)
    torch.distributed.barrier()  # nobody is left behind
    return kernel_name, "".join(lines)


def test_kernel_of_all_ranks_is_the_first_that_all_can_run(gloo: GlooPool) -> None:
    results = gloo.run(3, chosen, "auto", UNLIKE)
    assert [name for name, _ in results] == ["flash-attn-2"] * 3
    (line,) = {line for _, line in results}
    assert f"not flash-attn-3: on rank 0 {LACKING}; not torch: on rank 1 {LACKING}" in line


def test_kernel_that_all_lack_is_told_without_a_rank(gloo: GlooPool) -> None:
    results = gloo.run(3, chosen, "auto", (("torch", "flash-attn-3"),) * 3)
    assert [name for name, _ in results] == ["flash-attn-2"] * 3
    assert f"not flash-attn-3 or torch: {LACKING}" in results[0][1]


@pytest.mark.parametrize("name", ["torch", "flash-attn-3"])
def test_demanded_kernel_that_one_rank_lacks_is_an_error_on_all(gloo: GlooPool, name: str) -> None:
    unlike = ((), (), (name,))
    for error, line in gloo.run(3, chosen, name, unlike):
        assert error.startswith(f"--wlb-attention-kernel {name} cannot run: on rank 2 {LACKING};")
        assert not line


def chosen_by_rank(names: tuple[str, ...]) -> tuple[str, str]:
    import torch

    return chosen(names[torch.distributed.get_rank()], ((),) * len(names))


def test_ranks_that_demand_unlike_kernels_are_told_on_all(gloo: GlooPool) -> None:
    for error, _ in gloo.run(3, chosen_by_rank, ("auto", "torch", "auto")):
        assert "--wlb-attention-kernel differs over ranks (auto, torch)" in error
