from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost.fit import Sample, fit_document_cost
from megatron_wlb.errors import ConfigError

LENGTHS = [128, 512, 2048, 8192, 32768, 131072]


def samples(forward, backward, lengths=LENGTHS, noise=0.0, seed=0):
    """Exact or noisy times of ``(constant, linear, quadratic)`` passes."""
    random = np.random.default_rng(seed)

    def time(coefficients, d):
        constant, linear, quadratic = coefficients
        return (constant + linear * d + quadratic * d * d) * np.exp(noise * random.normal())

    return [Sample(d, time(forward, d), time(backward, d)) for d in lengths]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ((300, 0.05, 2e-6), (700, 0.11, 5e-6)),
        ((0, 0.05, 2e-6), (700, 0, 5e-6)),
        ((300, 0.05, 0), (0, 0.11, 0)),
        ((0, 0, 2e-6), (700, 0, 0)),
    ],
)
def test_fit_recovers_exact_times(forward, backward):
    fit = fit_document_cost(samples(forward, backward))
    cost = fit.cost
    found = (cost.forward_linear_us, cost.forward_quadratic_us)
    assert found == pytest.approx(forward[1:], rel=1e-6, abs=1e-12)
    found = (cost.backward_linear_us, cost.backward_quadratic_us)
    assert found == pytest.approx(backward[1:], rel=1e-6, abs=1e-12)
    assert cost.micro_batch_us == pytest.approx(forward[0] + backward[0], rel=1e-6, abs=1e-6)
    assert fit.max_error < 1e-6
    assert fit.num_samples == len(LENGTHS)


@settings(max_examples=100)
@given(
    times=st.lists(st.floats(1, 1e6), min_size=4, max_size=8),
    lengths=st.lists(st.integers(1, 10_000), min_size=8, max_size=8, unique=True),
)
def test_fit_is_the_best_without_negative_coefficients(times, lengths):
    """No step from it along any axis, within the non-negative ones, lowers the error."""
    measured = [Sample(d, us, 2 * d + us) for d, us in zip(lengths, times, strict=False)]
    try:
        cost = fit_document_cost(measured).cost
    except ConfigError as error:
        assert "do not grow" in str(error)
        return
    d = np.array([s.length for s in measured], dtype=float)
    us = np.array([s.backward_us for s in measured])
    columns = d[:, None] ** np.arange(3) / us[:, None]
    # The constants of the passes are reported as one: find backward's again.
    rest = 1 - columns[:, 1:] @ [cost.backward_linear_us, cost.backward_quadratic_us]
    constant = max(0.0, float(columns[:, 0] @ rest / (columns[:, 0] @ columns[:, 0])))
    best = np.array([constant, cost.backward_linear_us, cost.backward_quadratic_us])
    error = np.square(columns @ best - 1).sum()
    scale = 1 / np.linalg.norm(columns, axis=0)
    for axis, sign in product(range(3), (-1, 1)):
        moved = best.copy()
        moved[axis] = max(0.0, moved[axis] + sign * 1e-3 * scale[axis])
        assert np.square(columns @ moved - 1).sum() >= error * (1 - 1e-9) - 1e-12


@pytest.mark.parametrize(
    ("measured", "complaint"),
    [
        ([], "0 distinct lengths"),
        ([Sample(8, 1, 1), Sample(9, 2, 2), Sample(9, 3, 3)], "2 distinct lengths"),
        ([Sample(d, d, d - 2) for d in (2, 3, 4)], r"backward_us=0\) is not a measurement"),
        ([Sample(d, float("nan"), d) for d in (2, 3, 4)], "is not a measurement"),
        ([Sample(d, 1, 1) for d in (0, 3, 4)], r"Sample\(length=0, .* is not a measurement"),
        ([Sample(d, 50, 90) for d in (2, 3, 4)], "do not grow with the length over 2-4 tokens"),
    ],
)
def test_fit_refuses_what_tells_too_little(measured, complaint):
    with pytest.raises(ConfigError, match=complaint):
        fit_document_cost(measured)
