"""The kernel that runs is one that can, that computes right, and that the log names."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
import time
import types
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers.attention import flash_backward, flash_forward, packed_on_cpu

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.gpt.attention.head_start import check_parts
from megatron_wlb.runtime.gpt.attention.kernels import (
    CANDIDATES,
    Demand,
    Segments,
    check_kernel,
    choose_kernel,
    torch_cpu,
)
from megatron_wlb.runtime.gpt.attention.kernels import selection as choose_module
from megatron_wlb.runtime.gpt.attention.kernels.kernel import LseKernel
from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen
from megatron_wlb.runtime.gpt.attention.kernels.selection import Candidate, check_dropout
from megatron_wlb.runtime.gpt.attention.kernels.torch_cpu import torch_cpu_varlen

CPU = Demand(torch.device("cpu"), torch.float32, 4, 2, 16)
GPU_KERNELS = [name for name in CANDIDATES if name not in ("torch-cpu", "sdpa")]
HOPPER = Demand(torch.device("cuda"), torch.bfloat16, 8, 2, 128)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What a GPU that is not there says of itself."""
    said = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: said[0])
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    return said


def install(monkeypatch: pytest.MonkeyPatch, name: str, function: Any) -> None:
    module = types.ModuleType(name)
    module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name.partition(".")[0], types.ModuleType(name))
    monkeypatch.setitem(sys.modules, name, module)


def flash(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: float, causal: bool, deterministic: bool = False,
    **asked: Any,
) -> Any:  # fmt: skip
    """What the flash-attn packages promise, on the CPU; and the log-sum-exp, as early ones.

    ``asked`` are a sliding window and dropout, which not all versions have.
    """
    assert causal
    flash.asked = {*asked, *(["deterministic"] if deterministic else [])}  # type: ignore[attr-defined]
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    segments = segments_of(*lengths, asked.pop("window_size", (None, None)))
    dropout = asked.pop("dropout_p", 0.0)
    assert not asked
    return sdpa_varlen(q, k, v, segments, softmax_scale, dropout), None


class DotProductAttention:
    """TransformerEngine's, on the CPU."""

    def __init__(
        self, num_heads: int, head_dim: int, *, softmax_scale: float, attention_dropout: float,
        num_gqa_groups: int, qkv_format: str, attn_mask_type: str,
    ) -> None:  # fmt: skip
        """It is given no tracker of random numbers: it would fork Megatron's stream, which is equal
        on context-parallel ranks.
        """
        self.scale = softmax_scale
        self.asked = {"dropout_p": attention_dropout} if attention_dropout else {}

    def __call__(
        self, q: Any, k: Any, v: Any, *, qkv_format: str, attn_mask_type: str, cu_seqlens_q: Any,
        cu_seqlens_kv: Any, max_seqlen_q: int, max_seqlen_kv: int, **asked: Any,
    ) -> Any:  # fmt: skip
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal_bottom_right")
        assert max_seqlen_q % 64 == max_seqlen_kv % 64 == 0  # as cuDNN 9.6 needs it
        both = (cu_seqlens_q, cu_seqlens_kv)
        longest = [int(starts.diff().max()) for starts in both]
        assert longest[0] <= max_seqlen_q and longest[1] <= max_seqlen_kv
        asked |= self.asked
        return flash(q, k, v, *both, *longest, self.scale, causal=True, **asked)[0].flatten(1)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TransformerEngine, and torch's operations for packed segments, which it has for GPUs alone.

    The state of random numbers passes from the first operation to the second.
    """
    te = "transformer_engine"
    module = types.ModuleType(f"{te}.pytorch")
    module.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, te, types.ModuleType(te))
    monkeypatch.setitem(sys.modules, f"{te}.pytorch", module)

    def factors(probability: float, like: torch.Tensor) -> torch.Tensor:
        return (torch.rand_like(like) >= probability) / (1 - probability)

    def forward(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, dropout: float,
        causal: bool, debug: bool, *, scale: float, window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> Any:  # fmt: skip
        assert debug is False
        state = torch.get_rng_state()
        segments = segments_of(cu_q, cu_k, max_q, max_k, (window_size_left, window_size_right))
        found = flash_forward(q, k, v, segments, scale, causal, partial(factors, dropout))
        return (*found, state, q.new_empty(0), q.new_empty(0))

    def backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_q: Any, cu_k: Any, max_q: int,
        max_k: int, dropout: float, causal: bool, rng: Any, unused: Any, *, scale: float,
        window_size_left: int | None = None, window_size_right: int | None = None,
    ) -> Any:  # fmt: skip
        segments = segments_of(cu_q, cu_k, max_q, max_k, (window_size_left, window_size_right))
        known = grad, q, k, v, out, lse, segments, scale, causal
        with torch.random.fork_rng([]):
            if dropout:
                torch.set_rng_state(rng)
            return flash_backward(*known, partial(factors, dropout))

    with packed_on_cpu(forward, backward):
        yield


def test_auto_on_the_cpu_is_torch_s_flash_attention_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    assert choose_kernel("auto", CPU).kernel is torch_cpu_varlen
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "attention kernel: torch-cpu (cpu, float32, 4 query and 2 key/value heads"
    )
    assert line.count("it needs a GPU, and the device is cpu") == 1
    assert "not flash-attn-3 or transformer-engine or torch or flash-attn-2: it needs" in line


def test_torch_without_flash_attention_on_the_cpu_runs_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_cpu, "OPERATIONS", ("_no_such_operation",))
    assert choose_kernel("auto", CPU).kernel is sdpa_varlen
    with pytest.raises(CompatibilityError, match="has no flash attention for the CPU"):
        choose_kernel("torch-cpu", CPU)


def test_unknown_kernel_is_an_error() -> None:
    with pytest.raises(CompatibilityError, match="use one of auto, flash-attn-3"):
        choose_kernel("cutlass", CPU)


@pytest.mark.parametrize(
    ("names", "generation", "change", "said"),
    [
        (
            GPU_KERNELS,
            (9, 0),
            {"dtype": torch.float32},
            "needs bf16 or fp16, and the dtype is float32",
        ),
        (GPU_KERNELS, (9, 0), {"head_dim": 288}, "head dimension of at most 256"),
        (GPU_KERNELS, (9, 0), {"head_dim": 12}, "multiple of 8, not 12"),
        (GPU_KERNELS, (7, 5), {}, "8.0"),
        (["flash-attn-3"], (10, 0), {}, "Hopper"),
        (["flash-attn-2", "transformer-engine"], (9, 0), {}, "cannot be imported"),
        (["flash-attn-3"], (9, 0), {"dropout": 0.1}, "no dropout"),
        (["torch"], (9, 0), {"deterministic": True}, "use_deterministic_algorithms"),
        (["torch-cpu"], (9, 0), {}, "it runs on the CPU, and the device is cuda"),
    ],
)
def test_kernel_says_what_it_cannot_run(
    capability: list[tuple[int, int]],
    names: list[str],
    generation: tuple[int, int],
    change: dict[str, Any],
    said: str,
) -> None:
    capability[0] = generation
    for name in names:
        reason = CANDIDATES[name].obstacle(dataclasses.replace(HOPPER, **change))
        assert reason is not None and said in reason


@pytest.mark.parametrize("version", ["2.2", "2.10.0.dev0+4b5", "2.1.0", "1.11"])
def test_packages_that_are_too_old_are_said(
    capability: list[Any], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """TransformerEngine runs from the version on that aligns its mask to the bottom right."""
    install(monkeypatch, "flash_attn", lambda q, k, v, cu_seqlens_k, max_seqlen_k, causal: q)
    assert "too old" in str(CANDIDATES["flash-attn-2"].obstacle(HOPPER))
    install(monkeypatch, "flash_attn", flash)
    assert CANDIDATES["flash-attn-2"].obstacle(HOPPER) is None
    install(monkeypatch, "transformer_engine.pytorch", flash)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    said = str(CANDIDATES["transformer-engine"].obstacle(HOPPER))
    old = f"{version} aligns its mask to the top left"
    assert (old in said) if version in ("2.1.0", "1.11") else said == "None"


PACKAGES = [
    ("flash-attn-2", "flash_attn"),
    ("flash-attn-3", "flash_attn_interface"),
    ("flash-attn-3", "flash_attn_3.flash_attn_interface"),
    ("torch", None),
    ("transformer-engine", None),
]
CALLS: list[tuple[dict[str, Any], set[str]]] = [
    ({}, set()),
    ({"num_groups": CPU.num_heads}, set()),
    ({"deterministic": True}, {"deterministic"}),
    ({"reach_tokens": 3}, {"window_size"}),
    ({"dropout": 0.1}, {"dropout_p"}),
    ({"dropout": 0.2, "num_groups": CPU.num_heads, "head_dim": 64}, {"dropout_p"}),
    ({"dropout": 0.1, "reach_tokens": 3}, {"dropout_p", "window_size"}),
]


@pytest.mark.parametrize(
    ("name", "module", "change", "asked"),
    [
        (name, module, change, asked)
        for name, module in PACKAGES
        for change, asked in CALLS
        if name != "flash-attn-3" or "dropout" not in change  # which it does not have
    ],
)
def test_package_is_called_as_it_is_meant(
    packages: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    module: str | None,
    change: dict[str, Any],
    asked: set[str],
) -> None:
    """It is told of a window and of dropout where there is one, and only there."""
    demand = dataclasses.replace(CPU, **change)
    if module is not None:
        install(monkeypatch, module, flash)
    kernel = CANDIDATES[name].build(demand)
    assert (check_dropout if demand.dropout else check_kernel)(kernel, demand) is None
    if module is not None:
        assert flash.asked == asked  # type: ignore[attr-defined]


def forward_2(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1,
) -> Any:  # fmt: skip
    """flash-attn's inner functions, as their sources have them."""
    assert dropout_p == 0.0
    window = window_size_left, window_size_right
    segments = segments_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
    return (*flash_forward(q, k, v, segments, softmax_scale, causal), None, None)


def backward_2(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any,
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Any, deterministic: bool,
) -> Any:  # fmt: skip
    assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
    window = window_size_left, window_size_right
    segments = segments_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
    found = flash_backward(dout, q, k, v, out, softmax_lse, segments, softmax_scale, causal)
    for given, gradient in zip((dq, dk, dv), found, strict=True):
        given.copy_(gradient)
    return torch.empty(0)


def forward_3(
    q: Any, k: Any, v: Any, k_new: Any = None, *, cu_seqlens_q: Any, cu_seqlens_k: Any,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1,
) -> Any:  # fmt: skip
    rest = (max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal)
    window = window_size_left, window_size_right
    return forward_2(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest, *window)


def backward_3(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, sequed_q: Any = None, sequed_k: Any = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, dq: Any = None, dk: Any = None,
    dv: Any = None, softmax_scale: Any = None, is_causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    deterministic: bool = False, sm_margin: int = 0,
) -> Any:  # fmt: skip
    return backward_2(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, 0.0, softmax_scale, is_causal, window_size_left, window_size_right,
        softcap, None, deterministic,
    )  # fmt: skip


def forward_2_8_3(
    q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
    seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
    rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """``_flash_attn_forward`` of hopper/flash_attn_interface.py at v2.8.0 to v2.8.3.post1."""
    rest = (max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal)
    return forward_2(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest, *window_size)


def backward_2_8_3(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
    max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0,
    deterministic=False, sm_margin=0,
):  # fmt: skip
    """``_flash_attn_backward`` there; at v2.7.3 it has ``sink_token_length`` too."""
    backward_2(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, 0.0, softmax_scale, causal, *window_size, softcap, None, deterministic,
    )  # fmt: skip
    return dq, dk, dv, None


class Operation:
    """A function that torch has made an operation of: its parameters are in a schema."""

    def __init__(self, function: Any) -> None:
        self.call, self._schema = function, inspect.signature(function)

    def __call__(self, *inputs: Any, **given: Any) -> Any:
        return self.call(*inputs, **given)


def failing(*args: Any) -> Any:
    raise RuntimeError("no kernel image\nis available")


def missing(*args: Any) -> Any:
    raise ModuleNotFoundError("no module named\ncudnn")


@pytest.mark.parametrize(
    ("version", "forward", "backward"),
    [
        (2, forward_2, backward_2),
        (2, missing, missing),
        (3, forward_3, backward_3),
        (3, Operation(forward_3), Operation(backward_3)),
        (3, forward_2_8_3, backward_2_8_3),
        (3, missing, missing),
    ],
    ids=["2", "2-old", "3", "3-of-torch", "3-of-2.8.3", "3-old"],
)
@pytest.mark.parametrize("reach_tokens", [None, 3])
def test_flash_attn_tells_log_sum_exps_where_its_inner_functions_fit(
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    forward: Any,
    backward: Any,
    reach_tokens: int | None,
) -> None:
    """An older package runs by its public function."""
    name = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_3.flash_attn_interface"}[version]
    for module in (name, "flash_attn"):
        install(monkeypatch, module, flash)
    kind = "_varlen" if version == 2 else ""
    for passed, function in (("forward", forward), ("backward", backward)):
        inner = f"_flash_attn{kind}_{passed}"
        monkeypatch.setattr(sys.modules[name], inner, function, raising=False)
    demand = dataclasses.replace(CPU, reach_tokens=reach_tokens)
    kernel = dataclasses.replace(
        CANDIDATES[f"flash-attn-{version}"], obstacle=lambda demand: None
    ).make(demand)
    assert isinstance(kernel, LseKernel) == (forward is not missing)
    assert not isinstance(kernel, str) and check_kernel(kernel, demand) is None
    if isinstance(kernel, LseKernel):
        assert check_parts(kernel, CPU) is None


def top_left(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scale: float,
) -> torch.Tensor:
    """Query i sees keys 0 … i, as kernels did that align the mask to the top left."""
    keys = [
        k[: len(q)]
        for q, k in zip(query.split(segments.lengths_q), key.split(segments.lengths_k), strict=True)
    ]
    values = [
        v[:q] for q, v in zip(segments.lengths_q, value.split(segments.lengths_k), strict=True)
    ]
    return sdpa_varlen(
        query, torch.cat(keys), torch.cat(values), Segments.of(segments.lengths_q), scale
    )


def top_left_where_longest_are_equal(
    query: Any, key: Any, value: Any, segments: Segments, scale: float
) -> torch.Tensor:
    """As cuDNN's kernels behind some versions of TransformerEngine; others ran at other lengths."""
    wrong = segments.max_q == segments.max_k and segments.max_q % 64 == 0
    return (top_left if wrong else sdpa_varlen)(query, key, value, segments, scale)


def no_value_gradient(query: Any, key: Any, value: Any, segments: Any, scale: float) -> Any:
    return sdpa_varlen(query, key, value.detach(), segments, scale)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (top_left, "its output is wrong"),
        (top_left_where_longest_are_equal, "its output is wrong"),
        (no_value_gradient, "its dK and dV is wrong"),
        (failing, "it fails on a small problem (no kernel image is available)"),
        (missing, "it fails on a small problem (no module named cudnn)"),
    ],
)
def test_kernel_that_computes_something_else_does_not_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernel: Any, said: str
) -> None:
    candidates = {"torch": Candidate(lambda d: None, lambda d: kernel), **CANDIDATES}
    candidates["torch"] = Candidate(lambda d: None, lambda d: kernel)
    monkeypatch.setattr(choose_module, "CANDIDATES", candidates)
    for dtype in (torch.float32, torch.bfloat16):
        demand = dataclasses.replace(CPU, dtype=dtype)
        assert check_kernel(sdpa_varlen, demand) is None
        caplog.set_level(logging.INFO)
        assert choose_kernel("auto", demand).kernel is torch_cpu_varlen
        assert said in caplog.messages[-1]
        with pytest.raises(CompatibilityError) as raised:
            choose_kernel("torch", demand)
        assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "candidate",
    [Candidate(missing, lambda demand: sdpa_varlen), Candidate(lambda demand: None, missing)],
)
def test_package_that_fails_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, candidate: Candidate
) -> None:
    monkeypatch.setitem(choose_module.CANDIDATES, "flash-attn-3", candidate)
    assert choose_kernel("auto", CPU).kernel is torch_cpu_varlen
    with pytest.raises(CompatibilityError, match=r"it cannot be set up \(no module named cudnn\)"):
        choose_kernel("flash-attn-3", CPU)


def segments_of(
    cu_q: Any, cu_k: Any, max_q: int, max_k: int, window: Sequence[int | None] = (None, None)
) -> Segments:
    """``window`` are two numbers, of which packages take -1 or None for no limit."""
    left, right = window
    reach_tokens = None
    if left is not None and left >= 0:
        assert right == 0
        reach_tokens = left + 1
    lengths = tuple(cu_q.diff().tolist()), tuple(cu_k.diff().tolist())
    assert (max(lengths[0]), max(lengths[1])) == (max_q, max_k)
    return Segments(*lengths, cu_q, cu_k, max_q, max_k, reach_tokens)


def test_the_comparison_needs_no_deterministic_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def reference(*inputs: Any) -> Any:
        modes.append(torch.are_deterministic_algorithms_enabled())
        return sdpa_varlen(*inputs)

    monkeypatch.setattr(choose_module.Problem.mistake, "__defaults__", (reference,))
    torch.use_deterministic_algorithms(True)
    try:
        assert check_kernel(sdpa_varlen, CPU) is None
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert modes and not any(modes)


def test_time_is_that_of_forward_and_backward() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor) -> torch.Tensor:
            time.sleep(3e-3)
            return query.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            time.sleep(4e-3)
            return grad

    def slow(query: Any, *rest: Any) -> Any:
        return sdpa_varlen(Slow.apply(query), *rest)

    lengths = ((9, 5), (20, 5))
    fast_ms, slow_ms = (choose_module.time_ms(k, CPU, lengths) for k in (sdpa_varlen, slow))
    assert 0 < fast_ms < 7 <= slow_ms
