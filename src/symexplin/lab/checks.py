"""Checks that several configurations of the lab share."""

from symexplin.validation import check_positive

__all__ = ["check_fraction", "check_whole"]


def check_whole(name: str, value: object, minimum: int = 1) -> int:
    """Return `value` if it is a whole number of at least `minimum`, else raise ValueError.

    >>> check_whole("steps", 0)
    Traceback (most recent call last):
    ValueError: steps must be a whole number >= 1, got 0
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be a whole number >= {minimum}, got {value!r}")
    return value


def check_fraction(name: str, value: object) -> float:
    """Return `value` as a float if it lies in [0, 1), else raise ValueError.

    >>> check_fraction("floor", 1.5)
    Traceback (most recent call last):
    ValueError: floor must be a number in [0, 1), got 1.5
    """
    if value == 0:
        return 0.0
    try:
        number = check_positive(name, value)
    except ValueError:
        number = 1.0
    if number >= 1.0:
        raise ValueError(f"{name} must be a number in [0, 1), got {value!r}")
    return number
