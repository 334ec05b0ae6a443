"""Measuring attention, on a kernel whose times are known: no clock is judged here."""

import numpy as np
import pytest
import torch

from megatron_wlb.errors import ConfigError
from megatron_wlb.runtime.gpt.attention.kernels import Demand
from megatron_wlb.runtime.measuring import attention_rates
from megatron_wlb.runtime.measuring.attention_rates import (
    AttentionTimer,
    measure_attention,
)

DEMAND = Demand(torch.device("cpu"), torch.float32, 4, 2, 16)


class KnownTimer:
    """Instead of :class:`AttentionTimer`: a law of times, and what it was asked for."""

    clock = "law"
    unlike_us = 0.0
    jump = 0
    """Chunks of fewer queries take half as long again."""

    def __init__(self, kernel, demand, query_tokens, key_tokens, seed):
        self.sizes = (query_tokens, key_tokens)

    def __call__(self, queries, keys):
        assert int(queries.sum()) <= self.sizes[0] and int(keys.sum()) <= self.sizes[1]
        tiles = -(-queries // 64)
        part = np.where(queries == keys, 1.0, 2.0) * np.where(queries < self.jump, 1.5, 1.0)
        forward = (part * (3.0 * tiles + 0.01 * tiles * 64 * keys)).sum()
        if len(set(zip(queries.tolist(), keys.tolist(), strict=True))) > 1:
            forward += self.unlike_us * len(queries)
        return forward + 40.0, 2 * forward + 60.0


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(attention_rates, "AttentionTimer", KnownTimer)
    return KnownTimer


def measure(longest=256, kernel="sdpa", **more):
    settings = {"repeats": 2, "machine": "none"} | more
    return measure_attention(DEMAND, kernel, longest=longest, **settings)


def test_measured_profile_is_that_of_the_kernel(known):
    calls = []
    profile = measure(progress=lambda done, total: calls.append((done, total)))
    assert profile.call_us == pytest.approx((40.0, 60.0), abs=0.1)
    for q, k in ((1, 7), (64, 64), (130, 200), (256, 256), (100, 101)):
        expected = KnownTimer(None, None, q, k, 0)(np.array([q]), np.array([k]))
        found = [float(us) for us in profile.chunk_us(np.array(q), np.array(k))]
        # Rounded up to whole query tiles, which the law has and the grid's powers of two hide.
        assert found == pytest.approx([expected[0] - 40, expected[1] - 60], rel=0.35)
    assert profile.whole_forward_us[6] == pytest.approx(3 + 0.01 * 64 * 64, rel=1e-4)
    assert profile.forward_us[6][0] == pytest.approx(2 * (3 + 0.01 * 64 * 65), rel=1e-4)
    assert calls[-1][0] == calls[-1][1] == len(calls)


def test_measured_profile_knows_what_unlike_chunks_take_more(known, monkeypatch):
    assert measure(1024).unlike_forward_us < 1.0
    monkeypatch.setattr(known, "unlike_us", 25.0)
    profile = measure(1024)
    assert profile.unlike_forward_us == pytest.approx(25, abs=5)
    assert profile.unlike_backward_us == pytest.approx(50, abs=10)


def test_each_pass_finds_in_caches_what_training_has_just_written(monkeypatch):
    order = []

    def kernel(query, key, value, segments, scale):
        order.append("forward")
        query.register_hook(lambda grad: order.append("backward"))
        return query * (key.sum() + value.sum())

    def read(*tensors):
        order.append([(len(tensor), tensor.shape[1]) for tensor in tensors])

    monkeypatch.setattr(attention_rates, "_read", read)
    AttentionTimer(kernel, DEMAND, 8, 12, 0)(np.array([2, 3]), np.array([4, 5]))
    query, grad, key, value = (5, 4), (5, 4), (9, 2), (9, 2)
    assert order == [[query, key, value], "forward", [key, value, grad], "backward"]


def test_measuring_really_runs_the_kernel():
    seen = []

    def kernel(query, key, value, segments, scale):
        seen.append((segments.lengths_q, segments.lengths_k, tuple(query.shape), tuple(key.shape)))
        return query * scale + (key.sum() + value.sum())

    timer = AttentionTimer(kernel, DEMAND, 8, 12, 0)
    forward_us, backward_us = timer(np.array([2, 3]), np.array([4, 3]))
    assert seen == [((2, 3), (4, 3), (5, 4, 16), (7, 2, 16))]
    assert forward_us > 0 and backward_us > 0
    assert timer(np.array([], int), np.array([], int)) == (0.0, 0.0)


def test_measured_profile_of_a_real_kernel_is_a_profile():
    profile = measure(longest=64, repeats=9, num_checks=4)
    assert (profile.kernel, profile.dtype, profile.lengths[-1]) == ("sdpa", "float32", 64)
    # 4,096 pairs take longer than one.
    assert profile.whole_forward_us[-1] > profile.whole_forward_us[0]


def test_measured_profile_jumps_where_the_kernel_does(known, monkeypatch):
    monkeypatch.setattr(known, "jump", 192)

    def ratio(kernel):
        profile = measure(1024, kernel)
        short, long = (profile.chunk_us(np.array(q), np.array(900))[0] for q in (191, 192))
        return float(short / long)

    assert ratio("torch-cpu") == pytest.approx(1.5, rel=0.01)
    assert ratio("sdpa") < 1.05  # of which no break is known: between powers of two all is even


class SmallGpu(KnownTimer):
    """Holds dK and dV for every query head, as flash-attention 2 does, while there is room."""

    room_bytes = 0
    asked: list[int]
    """Of each attempt the most bytes."""

    def __init__(self, kernel, demand, query_tokens, key_tokens, seed):
        super().__init__(kernel, demand, query_tokens, key_tokens, seed)
        self.asked.append(0)

    def __call__(self, queries, keys):
        held = 2 * int(keys.sum()) * GPU.num_heads * GPU.head_dim * GPU.dtype.itemsize
        self.asked[-1] = max(self.asked[-1], held)
        if held > self.room_bytes:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return super().__call__(queries, keys)


GPU = Demand(torch.device("cuda"), torch.bfloat16, 64, 8, 128)  # 16 KiB a key for all query heads


@pytest.fixture
def small_gpu(monkeypatch):
    monkeypatch.setattr(attention_rates, "AttentionTimer", SmallGpu)
    monkeypatch.setattr(attention_rates, "choose_kernel", lambda name, demand: (name, None))
    monkeypatch.setattr(SmallGpu, "asked", [], raising=False)
    monkeypatch.setattr(SmallGpu, "room_bytes", 0)
    return SmallGpu


def measure_on_gpu(longest):
    return measure_attention(GPU, "flash-attn-2", longest=longest, repeats=1, machine="none")


def test_gradients_of_keys_for_all_query_heads_stay_within_their_bound(small_gpu, caplog):
    small_gpu.room_bytes = 2 * attention_rates.KEY_BYTES
    assert measure_on_gpu(16384).lengths[-1] == 16384
    assert len(small_gpu.asked) == 1 and not caplog.messages
    assert small_gpu.asked[0] > 0.9 * small_gpu.room_bytes  # and it is used


def test_out_of_memory_is_survived_by_a_smaller_size(small_gpu, caplog):
    small_gpu.room_bytes = attention_rates.KEY_BYTES // 2
    # Two windows of 16,384 keys fit with calls a quarter as large.
    assert measure_on_gpu(16384).lengths[-1] == 16384
    assert len(small_gpu.asked) == len(caplog.messages) + 1 == 3
    # Of 131,072 they do not: their dK and dV take 4 GiB each.
    profile = measure_on_gpu(131072)
    assert profile.lengths[-1] == 32768
    assert "calls half as large, up to 32768 tokens" in caplog.messages[-1]


def test_measuring_nothing_is_refused():
    with pytest.raises(ConfigError, match="repeats is 0"):
        measure(repeats=0)
