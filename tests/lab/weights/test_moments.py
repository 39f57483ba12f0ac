import math

import numpy as np
import pytest
import torch

from symexplin.lab.weights.moments import Moments


def merged(parts):
    whole = Moments()
    for part in parts:
        whole = whole.merge(Moments.of(torch.tensor(part, dtype=torch.float64)))
    return whole


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_merged_parts_are_the_whole(shift):
    """Also far from zero, where sums of powers would lose every digit of the fourth moment."""
    generator = np.random.default_rng(0)
    sample = shift + generator.standard_t(5, size=10_000) * np.linspace(0.1, 2, 10_000)
    whole = merged(np.split(sample, [1, 2, 700, 700, 5000]))
    d = sample - sample.mean()
    assert whole.number == sample.size
    assert whole.mean == pytest.approx(sample.mean(), rel=1e-13, abs=1e-13)
    assert whole.std == pytest.approx(sample.std(), rel=1e-10)
    assert whole.m3 == pytest.approx((d**3).sum(), rel=1e-7)
    assert whole.excess_kurtosis == pytest.approx((d**4).mean() / (d**2).mean() ** 2 - 3, rel=1e-8)


def test_known_distributions():
    even = merged([np.linspace(-1, 1, 20_001)])
    assert even.excess_kurtosis == pytest.approx(-1.2, abs=1e-3)
    assert even.std == pytest.approx(1 / math.sqrt(3), rel=1e-3)


def test_nothing_and_nothing_that_varies():
    assert merged([]) == merged([[]]) == Moments()
    assert (Moments().std, Moments().excess_kurtosis) == (0.0, None)
    assert merged([[2.0, 2.0], [2.0]]).excess_kurtosis is None


def test_extreme_sizes():
    assert merged([[1e90, -1e90], [1e90]]).excess_kurtosis is None  # out of float64's range, and no crash
    assert merged([[1e-60, -1e-60], [3e-60, -3e-60]]).excess_kurtosis == pytest.approx(41 / 25 - 3)
