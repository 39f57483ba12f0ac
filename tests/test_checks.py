"""Numbers of every kind that checks refuse; test_config and test_checks have the messages."""

import math

import pytest

from symexplin.checks import (
    check_finite,
    check_flag,
    check_fraction,
    check_not_negative,
    check_positive,
    check_whole,
)

NOT_NUMBERS = (math.nan, math.inf, -math.inf, True, "1", None, [1.0], 1j)


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (check_positive, (1, 7.5, 5e-324), (0, -0.0, -1, *NOT_NUMBERS)),
        (check_not_negative, (0, -0.0, 1), (-5e-324, *NOT_NUMBERS)),
        (check_finite, (0, -1, 7.5), NOT_NUMBERS),
        (check_fraction, (0, 0.999), (1, -0.1, *NOT_NUMBERS)),
        (check_flag, (True, False), (0, 1, "no", None)),
        (check_whole, (1, 2**63 - 1), (0, 1.0, True, "1", None, 2**63)),
    ],
)
def test_numbers_come_back_in_their_type_and_anything_else_is_refused(check, right, wrong):
    for value in right:
        result = check("beta", value)
        assert type(result) is {check_flag: bool, check_whole: int}.get(check, float)
        assert result == value
    for value in wrong:
        with pytest.raises(ValueError, match=r"^beta must be .*, got "):
            check("beta", value)
