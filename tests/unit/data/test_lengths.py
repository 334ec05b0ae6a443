import numpy as np
import pytest

from megatron_wlb.data.lengths import DISTRIBUTIONS, sample_lengths
from megatron_wlb.errors import ConfigError


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(("num_windows", "window"), [(1, 131072), (50, 4096), (3, 1), (7, 1000)])
def test_lengths_fill_windows_and_cross_none(name, num_windows, window):
    lengths = sample_lengths(name, num_windows, seed=2, window=window)
    assert lengths.min() >= 1
    ends = set(np.cumsum(lengths).tolist())
    assert ends >= {window * (i + 1) for i in range(num_windows)}
    assert max(ends) == window * num_windows


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_lengths_depend_on_the_seed_alone(name):
    first, again, other = (sample_lengths(name, 20, seed=seed) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def uncut(name):
    return DISTRIBUTIONS[name](np.random.default_rng(3), 400_000)


def test_reference_is_what_figures_are_stated_for():
    """82 % of the tokens in documents under half a window, some 31 documents a window."""
    lengths = sample_lengths("reference", 1200, seed=16)
    assert lengths[lengths < 65536].sum() / lengths.sum() == pytest.approx(0.82, abs=0.03)
    assert len(lengths) / 1200 == pytest.approx(31, abs=2)
    assert uncut("reference").max() <= 262144


def test_stdlib_has_the_stated_quantiles():
    lengths = uncut("stdlib")
    assert np.median(lengths) == pytest.approx(1700, rel=0.02)
    assert lengths.mean() == pytest.approx(4500, rel=0.05)
    assert np.percentile(lengths, 99) == pytest.approx(43_000, rel=0.05)


def test_magi_has_the_stated_shares():
    lengths = uncut("magi")
    assert (lengths <= 1024).mean() == pytest.approx(0.714, abs=0.005)
    assert (lengths <= 4096).mean() == pytest.approx(0.944, abs=0.003)
    assert (lengths >= 32768).mean() == pytest.approx(0.0045, abs=0.0005)


def test_slimpack_has_the_stated_shares():
    lengths = uncut("slimpack")
    assert (lengths < 4096).mean() == pytest.approx(0.8, abs=0.005)
    assert (lengths > 131072).mean() == pytest.approx(0.01, abs=0.001)
    work = np.square(lengths)
    assert work[lengths > 131072].sum() / work.sum() == pytest.approx(0.44, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("referense", 1), "unknown distribution referense; did you mean reference?"),
        (("xyz", 1), "unknown distribution xyz; use one of reference, stdlib, magi, slimpack"),
        (("magi", 0), "num_windows is 0; give at least 1"),
        (("magi", 1, 0), "window is 0"),
    ],
)
def test_lengths_refuse_what_is_no_sample(arguments, complaint):
    name, num_windows, window = (*arguments, 4096)[:3]
    with pytest.raises(ConfigError) as caught:
        sample_lengths(name, num_windows, seed=1, window=window)
    assert complaint in str(caught.value)
