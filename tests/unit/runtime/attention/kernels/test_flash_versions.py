"""What flash-attn 3's inner functions are called with, bound to their signatures in its releases.

Parameters are those of ``hopper/flash_attn_interface.py`` at the tags of the sources, in order; a
star marks one that has a default.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_choose import CPU

from megatron_wlb.runtime.attention.kernels import CANDIDATES, Demand, flash
from megatron_wlb.runtime.attention.kernels import choose as choose_module

V2_7_4 = (
    "q k v k_new v_new out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k "
    "max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin q_descale "
    "k_descale v_descale softmax_scale causal window_size* sink_token_length* softcap* "
    "rotary_interleaved* num_splits* pack_gqa* sm_margin*",
    "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q "
    "max_seqlen_k dq dk dv softmax_scale causal window_size* sink_token_length* softcap* "
    "deterministic* sm_margin*",
)
V2_8 = (  # 2.8.0 to 2.8.3.post1
    "q k v k_new v_new qv out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k "
    "max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin "
    "seqlens_rotary q_descale k_descale v_descale softmax_scale causal window_size* "
    "attention_chunk* softcap* rotary_interleaved* scheduler_metadata* num_splits* pack_gqa* "
    "sm_margin*",
    "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q "
    "max_seqlen_k dq dk dv softmax_scale causal window_size* softcap* deterministic* sm_margin*",
)
MAIN = (  # of August 2026
    "q k v k_new* v_new* qv* out_* cu_seqlens_q* cu_seqlens_k* cu_seqlens_k_new* seqused_q* "
    "seqused_k* max_seqlen_q* max_seqlen_k* page_table* kv_batch_idx* leftpad_k* rotary_cos* "
    "rotary_sin* seqlens_rotary* q_descale* k_descale* v_descale* softmax_scale* causal* "
    "window_size_left* window_size_right* attention_chunk* softcap* rotary_interleaved* "
    "scheduler_metadata* num_splits* pack_gqa* sm_margin*",
    "dout q k v out softmax_lse cu_seqlens_q* cu_seqlens_k* sequed_q* sequed_k* max_seqlen_q* "
    "max_seqlen_k* dq* dk* dv* softmax_scale* is_causal* window_size_left* window_size_right* "
    "softcap* deterministic* sm_margin*",
)
LENGTHS = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), 5)


def function(parameters: str) -> Any:
    """A function of these parameters that gives what it was called with, by name."""
    made = [
        inspect.Parameter(
            name.rstrip("*"),
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=0 if name.endswith("*") else inspect.Parameter.empty,
        )
        for name in parameters.split()
    ]
    signature = inspect.Signature(made)

    def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return signature.bind(*args, **kwargs).arguments

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


@pytest.mark.parametrize("parameters", [V2_7_4, V2_8, MAIN])
def test_inner_functions_of_each_release_are_called_as_they_are_meant(
    parameters: tuple[str, str],
) -> None:
    forward, backward = map(function, parameters)
    said = LENGTHS | {"softmax_scale": 0.5, "causal": True}
    given = forward(1, 2, 3, **flash._fitted(forward, said, 3))
    assert (given["q"], given["k"], given["v"], given["causal"]) == (1, 2, 3, True)
    assert {name: given[name] for name in LENGTHS} == LENGTHS
    # Caches, tables and scales that a release has no defaults for are nothing.
    rest = {k: v for k, v in given.items() if k not in {*said, "q", "k", "v"}}
    assert set(rest.values()) <= {None}
    said |= {"dq": 7, "dk": 8, "dv": 9, "deterministic": True}
    given = backward(1, 2, 3, 4, 5, 6, **flash._fitted(backward, said, 6))
    assert given["softmax_lse"] == 6 and given["deterministic"] is True
    assert given.get("causal", given.get("is_causal")) is True


def test_a_kernel_without_log_sum_exps_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def old(demand: Demand) -> Any:
        raise AttributeError("no _flash_attn_forward")

    candidate = replace(CANDIDATES["torch-cpu"], build_lse=old)
    with caplog.at_level(logging.INFO):
        assert not isinstance(candidate.make(CPU), str)
    (said,) = caplog.messages
    assert "without its log-sum-exps" in said and "no _flash_attn_forward" in said


def test_a_reference_that_raises_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's matrix products do in deterministic mode without CUBLAS_WORKSPACE_CONFIG."""

    def reference(*inputs: Any) -> torch.Tensor:
        raise RuntimeError("CUBLAS_WORKSPACE_CONFIG is not set")

    monkeypatch.setattr(choose_module.Problem.mistake, "__defaults__", (reference,))
    made = CANDIDATES["torch-cpu"].make(replace(CPU, deterministic=True))
    assert "CUBLAS_WORKSPACE_CONFIG is not set" in str(made)
