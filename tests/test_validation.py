"""Checks name the argument, the value found and what would be right."""

import math

import pytest

from symexplin.validation import (
    check_choice,
    check_finite,
    check_fraction,
    check_not_negative,
    check_positive,
    check_whole,
)

MODES = ("mismatch", "congruent", "exp_only")
NOT_NUMBERS = (math.nan, math.inf, -math.inf, True, False, "1", None, [1.0], 1j)


def refused(check, value, *arguments, **keywords):
    """Return the message of the refusal, which must begin with the argument's name and give the value."""
    with pytest.raises(ValueError) as error:
        check("k0", value, *arguments, **keywords)
    message = str(error.value)
    assert message.startswith("k0 must be ")
    assert f"got {value!r}" in message
    return message


def test_a_right_choice_is_returned():
    for choice in MODES:
        for known in (MODES, dict.fromkeys(MODES), iter(MODES)):
            assert check_choice("mode", choice, known) == choice


def test_a_wrong_choice_names_all_and_the_nearest():
    for wrong, near in (("mismatc", "mismatch"), ("Congruent", "congruent"), ("exp-only", "exp_only")):
        message = refused(check_choice, wrong, MODES)
        assert "'mismatch', 'congruent', 'exp_only'" in message
        assert message.endswith(f"did you mean {near!r}?")


def test_nothing_near_gives_no_hint():
    for wrong in ("xyz", "", None, 3, ["mismatch"]):
        assert refused(check_choice, wrong, ("fixed", "absorbed")).endswith(f"got {wrong!r}")


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (check_positive, (1, 7.5, 5e-324, 1e308), (0, 0.0, -0.0, -1, *NOT_NUMBERS)),
        (check_not_negative, (0, -0.0, 1, 5e-324, 1e308), (-1, -5e-324, *NOT_NUMBERS)),
        (check_finite, (0, -1, 7.5, -1e308), NOT_NUMBERS),
        (check_fraction, (0, 0.0, 0.5, 0.999), (1, -0.1, math.nan, math.inf, "0.5", None)),
    ],
)
def test_a_number_comes_back_as_float_and_anything_else_is_refused(check, right, wrong):
    for value in right:
        result = check("beta", value)
        assert type(result) is float
        assert result == value
    for value in wrong:
        refused(check, value)


def test_whole_numbers_pass_between_their_ends():
    for value, ends in ((1, {}), (7, {}), (0, {"minimum": 0}), (2, {"maximum": 2})):
        assert check_whole("n", value, **ends) == value
    for value in (0, -1, 1.0, True, "1", None):
        assert ">= 1," in refused(check_whole, value)
    assert ">= 0," in refused(check_whole, -1, minimum=0)
    assert "<= 2," in refused(check_whole, 3, maximum=2)
