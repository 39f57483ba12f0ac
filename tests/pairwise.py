"""Few cases that meet every pair: what a bug needs is seldom more than two choices at once."""

import itertools

import pytest

__all__ = ["every_pair", "pairwise"]


def pairwise(keep=None, /, **choices):
    """Return rows, a value of each list in order, in which every two values of two lists meet; always the same rows.

    `keep(**row)` says whether a row is allowed: then every pair is met that an allowed row has. Each row is the one
    with the most pairs not met so far. Lists whose triples matter are given as one list of tuples.

    >>> rows = pairwise(mode=["sinh", "linear"], beta=[1.5, 7.5, 30.0], n=[0.0, 1.0])
    >>> len(rows), rows[:2]
    (6, [('sinh', 1.5, 0.0), ('sinh', 7.5, 1.0)])
    >>> met = [{(row[i], row[j]) for row in rows} for i, j in [(0, 1), (0, 2), (1, 2)]]
    >>> [len(pairs) for pairs in met]  # 2 x 3, 2 x 2, 3 x 2
    [6, 4, 6]
    >>> rows = pairwise(lambda mode, n, **_: mode != "linear" or n == 0.0, mode=["sinh", "linear"], n=[0.0, 1.0])
    >>> sorted(rows)
    [('linear', 0.0), ('sinh', 0.0), ('sinh', 1.0)]
    """
    lists = [list(values) for values in choices.values()]
    number = {}  # of a pair: its bit in a row's set
    sets = {}
    for places in itertools.product(*(range(len(values)) for values in lists)):
        row = tuple(values[place] for values, place in zip(lists, places, strict=True))
        if keep is None or keep(**dict(zip(choices, row, strict=True))):
            pairs = itertools.combinations(enumerate(places), min(2, len(lists)))
            sets[places] = sum(1 << number.setdefault(pair, len(number)) for pair in pairs)
    rows, left = [], (1 << len(number)) - 1
    while left:
        places = max(sets, key=lambda places: (sets[places] & left).bit_count())
        rows.append(tuple(values[place] for values, place in zip(lists, places, strict=True)))
        left &= ~sets[places]
    return rows


def every_pair(keep=None, /, **choices):
    """Return the mark that runs a test for the rows of :func:`pairwise`, by name."""
    return pytest.mark.parametrize(tuple(choices), pairwise(keep, **choices), ids=_name)


def _name(value):
    """Name a dtype by itself and a tuple by its values ("fixed-True"); leave the rest to pytest."""
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    return str(value) if type(value).__name__ == "dtype" else None
