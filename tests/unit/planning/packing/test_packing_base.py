import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.packing.base import Limits


def limits(num_micro_batches=4, window=10, max_tokens=20, step_tokens=40, **others):
    return Limits(num_micro_batches, window, max_tokens, step_tokens, **others)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches is 0; give at least 1"),
        ({"window": 0}, "window is 0"),
        ({"max_age": -1}, "max_age is -1; give at least 0"),
        ({"max_tokens": 9}, r"\(S_max\) 9 is below the window of 10.*raise it"),
        ({"step_tokens": 81}, "4 micro-batches of at most 20 tokens hold 80, but 81 arrive"),
        ({"max_step_tokens": 39}, "max_step_tokens 39 is below the 40 tokens"),
    ],
)
def test_limits_refuse_what_cannot_run(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        limits(**settings)


def test_limits_may_be_tight():
    assert limits(max_tokens=10, max_step_tokens=40).token_cap == 40
    assert limits().token_cap == 80
    assert limits(max_step_tokens=50).token_cap == 50
    assert limits(max_step_tokens=500).token_cap == 80
