"""The cost of a stage is what made-up times were made of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from _validation.fit import StageSample, fit_stage
from megatron_wlb.errors import ConfigError


def stage_samples(num, forward=(30.0, 4.0, 0.5, 0.002), backward=(55.0, 0.0, 1.25, 0.005)):
    random = np.random.default_rng(7)
    samples = []
    for _ in range(num):
        lengths = random.integers(1, 900, random.integers(1, 12)).tolist()
        counts = (1, len(lengths), sum(lengths), sum(d * d for d in lengths))
        times = [sum(c * n for c, n in zip(p, counts, strict=True)) for p in (forward, backward)]
        samples.append(StageSample(lengths, *times))
    return samples


def test_stage_fit_finds_the_coefficients_and_forgets_a_bad_measurement():
    samples = stage_samples(20)
    bad = dataclasses.replace(samples[3], forward_us=40 * samples[3].forward_us)
    fit = fit_stage([*samples[:3], bad, *samples[4:]])
    assert fit.forward == pytest.approx((30.0, 4.0, 0.5, 0.002), rel=1e-6)
    assert fit.backward == pytest.approx((55.0, 0.0, 1.25, 0.005), rel=1e-6, abs=1e-6)
    for sample in samples:
        work = fit.work(sample.lengths)
        assert work.forward_us == pytest.approx(sample.forward_us)
        assert work.backward_us == pytest.approx(sample.backward_us)
        assert work.overhead_us == 0
    assert fit.work([100, 20]).forward_attention_us == pytest.approx(0.002 * 10_400)
    assert fit_stage(samples).mean_error == pytest.approx(0, abs=1e-9)


def test_stage_fit_tells_slices_from_whole_documents():
    samples = stage_samples(20)
    slices = []
    for keys, length in [(0, 300), (300, 200), (500, 90), (0, 80), (80, 700)]:
        pairs = (keys + length) ** 2 - keys**2
        forward_us = 30 + 4 + 0.5 * length + 0.002 * pairs + 70
        backward_us = 55 + 1.25 * length + 0.005 * pairs + 90
        slices.append(StageSample([length], forward_us, backward_us, [keys], is_slice=True))
    fit = fit_stage([*samples, *slices])
    assert fit.mean_error == pytest.approx(0, abs=1e-9)
    assert fit.slice_us == pytest.approx((70, 90))
    assert fit.forward == pytest.approx((30.0, 4.0, 0.5, 0.002), rel=1e-6)
    assert fit_stage(samples).slice_us == (0, 0)


def test_stage_fit_refuses_what_cannot_be_fitted():
    with pytest.raises(ConfigError, match="7 micro-batches are too few"):
        fit_stage(stage_samples(7))
    for wrong in (0.0, -1.0, float("nan")):
        samples = stage_samples(9)
        samples[5] = dataclasses.replace(samples[5], backward_us=wrong)
        with pytest.raises(ConfigError, match="backward_us has a time that is not positive"):
            fit_stage(samples)
