"""All ranks run the same attention kernel, whatever each of them has."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
from helpers.gloo import GlooPool

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.settings.command_line import parse

# What each of three ranks cannot run, of the kernels before the reference.
UNLIKE = (("flash-attn-3",), ("torch",), ("torch", "flash-attn-3"))
LACKING = "it is not installed"


def chosen(
    name: str,
    unlike: tuple[tuple[str, ...], ...],
    times_ms: tuple[dict[str, float], ...] | None = None,
) -> tuple[str, str]:
    """The kernel's name or the error, and the log's line, of ranks that have what they have.

    With ``times_ms`` the ranks are GPUs, of which each kernel takes so long on each.
    """
    import torch

    from megatron_wlb.runtime.gpt.attention.kernels import Demand, choose_kernel, selection
    from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen

    def kernel(called: str) -> selection.Candidate:
        def run(*inputs: object) -> torch.Tensor:
            return sdpa_varlen(*inputs)  # type: ignore[arg-type]

        run.__name__ = called
        return selection.Candidate(lambda d: LACKING if called in lacks else None, lambda d: run)

    lacks = unlike[torch.distributed.get_rank()]
    candidates = {called: kernel(called) for called in ("flash-attn-3", "torch", "flash-attn-2")}
    demand = Demand(torch.device("cuda" if times_ms else "cpu"), torch.float32, 4, 2, 16)

    def time_ms(kernel: Any, demand: Demand) -> float:
        assert times_ms is not None, "nothing is timed on the CPU"
        time_ms = times_ms[torch.distributed.get_rank()][kernel.__name__]
        if time_ms < 0:
            raise RuntimeError("out of memory")
        return time_ms

    collective = mock.Mock(wraps=torch.distributed.all_gather_object)
    gpu = {"check_kernel": lambda kernel, demand: None} if times_ms else {}
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = selection.logger.level
    selection.logger.addHandler(handler)
    selection.logger.setLevel(logging.INFO)
    try:
        with (
            mock.patch.multiple(selection, CANDIDATES=candidates, time_ms=time_ms, **gpu),
            mock.patch("torch.distributed.all_gather_object", collective),
        ):
            found = choose_kernel(name, demand)
        kernel_name = found.name
        assert found.kernel.__name__ == kernel_name  # type: ignore[attr-defined]
    except CompatibilityError as error:
        kernel_name = str(error)
    finally:
        selection.logger.removeHandler(handler)
        selection.logger.setLevel(level)
    assert collective.call_count == 1
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


FAST = {"flash-attn-3": 2.0, "torch": 4.0, "flash-attn-2": 3.0}


def on_gpus(gloo: GlooPool, name: str, *times_ms: dict[str, float]) -> tuple[str, str]:
    """The same on all ranks, or it fails."""
    (result,) = set(gloo.run(len(times_ms), chosen, name, ((),) * len(times_ms), times_ms))
    return result


def test_gpus_take_the_kernel_that_is_fastest_on_its_slowest_rank(gloo: GlooPool) -> None:
    name, line = on_gpus(gloo, "auto", FAST, FAST | {"flash-attn-3": 5.5, "torch": 1.0}, FAST)
    assert name == "flash-attn-2"
    assert "8192 tokens: flash-attn-3 5.50 ms, torch 4.00 ms, flash-attn-2 3.00 ms" in line


@pytest.mark.parametrize(("time_ms", "name"), [(1.95, "flash-attn-3"), (1.93, "torch")])
def test_kernel_must_be_faster_than_one_before_it_by_more_than_noise(
    gloo: GlooPool, time_ms: float, name: str
) -> None:
    assert on_gpus(gloo, "auto", FAST | {"torch": time_ms}, FAST | {"torch": 1.5})[0] == name


def test_kernel_that_fails_while_it_is_timed_is_passed_over(gloo: GlooPool) -> None:
    name, line = on_gpus(gloo, "auto", FAST, FAST | {"flash-attn-3": -1.0})
    assert name == "flash-attn-2"
    assert (
        "not flash-attn-3: on rank 1 it fails on a problem of 8192 tokens (out of memory)" in line
    )


def test_demanded_kernel_is_not_timed(gloo: GlooPool) -> None:
    name, line = on_gpus(gloo, "torch", {}, {})
    assert name == "torch" and line.endswith("; as demanded")


def settled(saved: str | None, flags: str) -> tuple[str, bool, list[str]]:
    """What a run settles on whose first rank has a layer and whose second one has none.

    Of its kernels only ``sdpa`` could begin with near keys.
    """
    import torch
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_wlb.runtime.gpt import build
    from megatron_wlb.runtime.gpt.attention.document_attention import DocumentAttention
    from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen

    config = parse(flags.split())
    core = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, attention_dropout=0.0,
        cuda_graph_modules=[],
    )  # fmt: skip

    def least_bytes(kernel: object, _: object) -> int | None:
        return 7 if kernel is sdpa_varlen else None

    lines: list[str] = []
    with mock.patch.object(build, "least_bytes", least_bytes):
        options = build.attention_options(config, core)
    chunk = torch.nn.Module()
    if torch.distributed.get_rank() == 0:
        chunk.layer = DocumentAttention(core, 1, AttnMaskType.causal, "self", options=options)
    with (
        mock.patch.object(build, "least_bytes", least_bytes),
        mock.patch.object(build.logger, "info", lambda line, *a: lines.append(line % a)),
        mock.patch.object(build.logger, "warning", lambda line, *a: lines.append(line % a)),
    ):
        name = build.settle_kernel(config, build.Model(core, None, [chunk], []), saved)
    for layer in chunk.children():
        options = layer.options
        assert options.kernel_name == name
        assert options.head_start_bytes == least_bytes(options.kernel, None)
    return name, options.kernel is sdpa_varlen, lines


@pytest.mark.parametrize(
    ("saved", "flags", "name", "said"),
    [
        (None, "", "torch-cpu", None),
        ("torch-cpu", "", "torch-cpu", None),
        ("sdpa", "", "sdpa", "sdpa in place of torch-cpu, as in the checkpoint"),
        ("sdpa", "--wlb-attention-kernel torch-cpu", "torch-cpu", None),
        ("flash-attn-3", "", "torch-cpu", "flash-attn-3, which is not available here"),
        ("of-tomorrow", "", "torch-cpu", "of-tomorrow is not known"),
    ],
)
def test_resumed_run_takes_its_checkpoint_s_kernel_where_it_can(
    gloo: GlooPool, saved: str | None, flags: str, name: str, said: str | None
) -> None:
    for rank, (settled_name, is_sdpa, lines) in enumerate(gloo.run(2, settled, saved, flags)):
        assert settled_name == name
        assert rank or is_sdpa == (name == "sdpa")
        assert [said in line for line in lines] == [True] if said else not lines
