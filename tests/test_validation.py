"""Checks name the argument, the value found and what would be right."""

import math

import pytest

from symexplin.validation import check_choice, check_positive

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
