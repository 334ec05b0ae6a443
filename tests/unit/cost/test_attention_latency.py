import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost.attention_latency import (
    BACKWARD_FLOPS,
    AnalyticAttention,
    AttentionProfile,
    nearest_profile,
    pairs,
)
from megatron_wlb.errors import ConfigError

LENGTHS = tuple(2**n for n in range(11))


def profile(
    share_us=lambda q, k: 2.0 * q + 0.01 * q * k,
    tiles=(1, 1),
    lengths=LENGTHS,
    whole_us=None,
    **more,
):
    """Whose times are ``share_us`` at the grid, backward three times that."""
    forward = tuple(
        tuple(share_us(q, max(k, q + 1)) for k in lengths[i:]) for i, q in enumerate(lengths)
    )
    whole = tuple(whole_us(n) for n in lengths) if whole_us else [share_us(n, n) for n in lengths]
    sizes = {"num_heads": 4, "num_groups": 2, "head_dim": 64, "dtype": "float32"} | more
    return AttentionProfile(
        kernel="sdpa",
        machine="some",
        tile_queries=tiles[0],
        tile_keys=tiles[1],
        lengths=lengths,
        forward_us=forward,
        backward_us=tuple(tuple(3 * us for us in row) for row in forward),
        whole_forward_us=tuple(whole),
        whole_backward_us=tuple(3 * us for us in whole),
        **sizes,
    )


def chunk(latency, queries, keys):
    return [float(us) for us in latency.chunk_us(np.array(queries), np.array(keys))]


@settings(max_examples=200)
@given(
    st.integers(1, 300), st.integers(0, 300), st.sampled_from([(1, 1), (16, 1), (64, 32), (8, 8)])
)
def test_pairs_counts_the_tiles_that_have_any(queries, before, tiles):
    height, width = tiles
    computed = 0
    for top in range(0, queries, height):
        last_key = before + min(top + height, queries)  # of the tile's last query
        computed += -(-last_key // width)
    assert pairs(np.array(queries), np.array(before + queries), *tiles) == computed * height * width


def test_profile_gives_its_own_points_back():
    known = profile()
    for i, q in enumerate(LENGTHS):
        for j, k in list(enumerate(LENGTHS[i:]))[1:]:
            forward, backward = chunk(known, q, k)
            assert forward == pytest.approx(known.forward_us[i][j])
            assert backward == pytest.approx(known.backward_us[i][j])


@settings(max_examples=200)
@given(st.integers(1, 1024), st.integers(0, 1023))
def test_profile_is_close_between_its_points(queries, before):
    """Within a few per cent of a smooth law, on the diagonal too."""
    keys = min(queries + before, 1024)
    queries = min(queries, keys)

    def law(q, k):
        return 3.0 + 0.5 * q + 0.01 * float(pairs(np.array(q), np.array(k)))

    assert chunk(profile(law), queries, keys)[0] == pytest.approx(law(queries, keys), rel=0.1)


def test_profile_refuses_to_extrapolate_unless_told():
    known = profile()
    with pytest.raises(ConfigError, match="ends at 1024 tokens, but 1025 were asked for"):
        known.chunk_us(np.array([3, 4]), np.array([3, 1025]))
    told = replace(known, extrapolate=True)
    rate = chunk(told, 1024, 1024)[0] / float(pairs(np.array(1024), np.array(1024)))
    assert chunk(told, 4096, 4096)[0] == pytest.approx(rate * pairs(np.array(4096), np.array(4096)))


def test_profile_survives_json():
    known = profile(extrapolate=True, call_forward_us=2.5, spread=0.1)
    assert AttentionProfile.from_dict(json.loads(json.dumps(known.as_dict()))) == known


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"lengths": [1, 16, 8]}, "ascending from 1"),
        ({"lengths": [16, 32]}, "ascending from 1"),
        ({"forward_us": [[1.0, 2.0]]}, "needs a row for each of 11 lengths"),
        (
            {"backward_us": [[1.0] * (11 - i) for i in range(10)] + [[-1.0]]},
            "backward_us is -1.0; give at least",
        ),
        ({"whole_forward_us": [1.0]}, "need a time for each of 11 lengths"),
        ({"tile_queries": 3, "tile_keys": 2}, "a multiple of the key tile"),
        ({"num_heads": 0}, "num_heads is 0; give at least 1"),
        ({"head_dims": 3}, "unknown entry head_dims; use head_dim"),
        ({"lengths": ["a", "b"]}, "lengths is 'a'; give a whole number"),
        ({"forward_us": 7}, "forward_us is 7; give a list"),
        ({"backward_us": None}, "backward_us is missing"),
    ],
)
def test_profile_refuses_what_is_no_table(change, complaint):
    values = {k: v for k, v in (profile().as_dict() | change).items() if v is not None}
    with pytest.raises(ConfigError, match=complaint):
        AttentionProfile.from_dict(values)


def test_nearest_profile_scales_to_the_heads_of_the_run():
    many, few = profile(), profile(num_heads=2, num_groups=1)
    found = nearest_profile(
        [many, few, profile(head_dim=128), profile(dtype="bfloat16")],
        num_heads=1, num_groups=1, head_dim=64, dtype="float32",
    )  # fmt: skip
    assert (found.num_heads, found.forward_us[0][0]) == (1, few.forward_us[0][0] / 2)
    assert nearest_profile([many], num_heads=4, num_groups=2, head_dim=32, dtype="float32") is None


def test_analytic_attention_pays_for_whole_tiles():
    latency = AnalyticAttention(num_heads=32, head_dim=128, tflops=400)
    assert chunk(latency, 1, 4000) == chunk(latency, 128, 4000)
    assert chunk(latency, 129, 4000)[0] > 1.9 * chunk(latency, 128, 4000)[0]
    forward, backward = chunk(latency, 2**17, 2**17)
    assert forward == pytest.approx(2 * 32 * 128 * 2**34 / 400e6, rel=0.01)
    assert backward == BACKWARD_FLOPS * forward


def test_tflops_count_exact_pairs():
    known = profile(lambda q, k: 100.0)
    flops = 4 * 4 * 64 * (64 * 128 - 64 * 63 / 2)
    assert known.tflops(64, 128) == pytest.approx(flops / 100e6)
    assert known.tflops(64, 128, backward=True) == pytest.approx(BACKWARD_FLOPS * flops / 300e6)
