"""Checks name the argument, the value found and what would be right."""

import math

import pytest

from symexplin.validation import check_choice, check_fraction, check_positive, check_whole

MODES = ("mismatch", "congruent", "exp_only")


@pytest.mark.parametrize("choice", MODES)
def test_a_right_choice_is_returned(choice):
    assert check_choice("mode", choice, MODES) == choice
    assert check_choice("mode", choice, dict.fromkeys(MODES)) == choice
    assert check_choice("mode", choice, iter(MODES)) == choice


@pytest.mark.parametrize(
    ("wrong", "near"), [("mismatc", "mismatch"), ("Congruent", "congruent"), ("exp-only", "exp_only")]
)
def test_a_wrong_choice_names_all_and_the_nearest(wrong, near):
    with pytest.raises(ValueError) as error:
        check_choice("mode", wrong, MODES)
    known = "'mismatch', 'congruent', 'exp_only'"
    assert str(error.value) == f"mode must be one of {known}, got {wrong!r}; did you mean {near!r}?"


@pytest.mark.parametrize("wrong", ["xyz", "", None, 3, ["mismatch"]])
def test_nothing_near_gives_no_hint(wrong):
    with pytest.raises(ValueError) as error:
        check_choice("curvature", wrong, ("fixed", "absorbed"))
    assert str(error.value) == f"curvature must be one of 'fixed', 'absorbed', got {wrong!r}"


@pytest.mark.parametrize("value", [1, 7.5, 5e-324, 1e308])
def test_a_positive_number_comes_back_as_float(value):
    result = check_positive("beta", value)
    assert type(result) is float
    assert result == value


@pytest.mark.parametrize("value", [0, 0.0, -0.0, -1, math.nan, math.inf, -math.inf, True, False, "1", None, [1.0], 1j])
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(ValueError) as error:
        check_positive("k0", value)
    assert str(error.value) == f"k0 must be a positive finite number, got {value!r}"


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
