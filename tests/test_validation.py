"""Checks name the argument, the value found and what would be right."""

import math

import pytest
import torch

import symexplin as sel
from symexplin.validation import (
    check_choice,
    check_finite,
    check_flag,
    check_fraction,
    check_not_negative,
    check_positive,
    check_whole,
)

MODES = ("mismatch", "congruent", "exp_only")
NOT_NUMBERS = (math.nan, math.inf, -math.inf, True, False, "1", None, [1.0], 1j)


def refused(check, value, *arguments, **keywords):
    """Return the message of the refusal, which must begin with the argument's name and give the value."""
    with pytest.raises(ValueError, match=r"^k0 must be ") as error:
        check("k0", value, *arguments, **keywords)
    assert f"got {value!r}" in str(error.value)
    return str(error.value)


def test_choices_come_back_or_the_nearest_is_named():
    for known in (MODES, dict.fromkeys(MODES), iter(MODES)):
        assert check_choice("mode", "congruent", known) == "congruent"
    for wrong, end in (("mismatc", "'mismatc'; did you mean 'mismatch'?"), ("xyz", "'xyz'"), ([], "[]")):
        message = refused(check_choice, wrong, MODES)
        assert "'mismatch', 'congruent', 'exp_only'" in message
        assert message.endswith(f"got {end}")


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (check_positive, (1, 7.5, 5e-324, 1e308), (0, 0.0, -0.0, -1, *NOT_NUMBERS)),
        (check_not_negative, (0, -0.0, 1, 5e-324, 1e308), (-1, -5e-324, *NOT_NUMBERS)),
        (check_finite, (0, -1, 7.5, -1e308), NOT_NUMBERS),
        (check_fraction, (0, 0.0, 0.5, 0.999), (1, -0.1, math.nan, math.inf, "0.5", None)),
        (check_flag, (True, False), (0, 1, "no", None)),
        (check_whole, (1, 7, 2**63 - 1), (0, -1, 1.0, True, "1", None, 2**63)),
    ],
)
def test_numbers_come_back_in_their_type_and_anything_else_is_refused(check, right, wrong):
    for value in right:
        result = check("beta", value)
        assert type(result) is {check_flag: bool, check_whole: int}.get(check, float)
        assert result == value
    for value in wrong:
        refused(check, value)


def test_whole_numbers_have_ends():
    assert check_whole("n", 0, minimum=0) == 0
    assert ">= 0," in refused(check_whole, -1, minimum=0)
    assert "<= 2," in refused(check_whole, 3, maximum=2)


@pytest.mark.parametrize("build", [sel.SELAdamW, sel.param_groups])
def test_a_warning_points_at_the_users_line(build):
    """Not into torch, whose constructor of optimizers stands between."""
    model, config = torch.nn.Sequential(torch.nn.Linear(8, 8)), sel.SELConfig(e=sel.Scale("row", k=50, base_lr=None))
    config = {"config": config} if build is sel.SELAdamW else sel.convert(model, config) and {}
    with pytest.warns(UserWarning, match="scale e learns at") as caught:
        build(model, lr=3e-3, **config)
    assert caught[0].filename == __file__
