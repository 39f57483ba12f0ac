import math

import pytest

from symexplin.lab.checks import check_fraction, check_whole


@pytest.mark.parametrize("value", [1, 7])
def test_whole_numbers_pass(value):
    assert check_whole("n", value) == value


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_others_are_named(value):
    with pytest.raises(ValueError, match=f"n must be a whole number >= 1, got {value!r}"):
        check_whole("n", value)


def test_minimum():
    assert check_whole("n", 0, minimum=0) == 0
    with pytest.raises(ValueError, match=">= 0, got -1"):
        check_whole("n", -1, minimum=0)


@pytest.mark.parametrize("value", [0, 0.0, 0.5, 0.999])
def test_fractions_pass(value):
    assert check_fraction("x", value) == value


@pytest.mark.parametrize("value", [1, -0.1, math.nan, math.inf, "0.5", None])
def test_other_fractions_are_named(value):
    with pytest.raises(ValueError, match=r"x must be a number in \[0, 1\)"):
        check_fraction("x", value)
