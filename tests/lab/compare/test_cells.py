"""The cells of a comparison's tables against runs whose numbers are planted."""

import pytest

from symexplin.lab.compare.cells import cells, run_cells, text_table
from symexplin.lab.compare.comparison import Comparison, Run

SEEDS = (0, 1, 2)


def curve(end):
    return ((0, 5.0), (50, 3.0), (100, end))


def run(variant, end, lr=0.1, seed=0, pace=1.0, **others):
    """A run whose steps take `pace` hundredths of a second each."""
    if end is None:
        return Run(variant, lr, seed, ((0, 5.0),), error="step 1: loss is nan")
    by_time = tuple((pace * step / 100, loss) for step, loss in curve(end))
    return Run(variant, lr, seed, curve(end), 10.0, 1234.5, by_time=by_time, **others)


def lines(comparison):
    """Return the words of each line of the text."""
    return [line.split() for line in text_table(comparison).splitlines()]


def columns(comparison, which="best"):
    """Return {heading: texts of a row's cells}."""
    return {heading: [cell.text for cell in cells] for heading, cells in cells(comparison, comparison.rows(which))}


def test_lines_of_one_seed():
    """5 -> 2 in 100 steps; the variant with 5 -> 1 is at 2 after 75, the one that ends at 2.1 never."""
    ends = {("A", 0.1): 2.0, ("A", 0.2): 2.5, ("B", 0.1): 2.1, ("B", 0.2): 1.0}
    comparison = Comparison(tuple(run(name, end, lr) for (name, lr), end in ends.items()), "A")
    best, shared = (lines(comparison)[start : start + 4] for start in (0, 4))
    assert shared[0] == ["At", "the", "shared", "learning", "rate,", "0.1"]
    assert shared[2:] == [["A", "-", "-", "2.0000", "-"], ["B", "no", "verdict", "+0.1000", "2.1000", "not", "reached"]]
    assert best[1] == ["variant", "verdict", "difference", "loss", "learning", "rate", "speedup", "in", "steps"]
    assert best[3] == ["B", "no", "verdict", "-1.0000", "1.0000", "0.2", "1.33x"]


def test_seeds_have_a_spread_an_interval_and_a_verdict():
    """The interval is Student's: -0.5 ± 9.9248 * 0.1 / sqrt(3)."""
    ends = {"A": (2.0, 2.1, 2.2), "B": (1.5, 1.5, 1.8), "C": (2.0, None, 2.2)}
    comparison = Comparison(tuple(run(name, ends[name][seed], seed=seed) for name in ends for seed in SEEDS), "A")
    found = columns(comparison, "shared")
    assert found["verdict"] == ["", "not resolved", "diverged"]
    assert found["loss ± std. dev."] == ["2.1000 ± 0.1000", "1.6000 ± 0.1732", "diverged in 1 of 3"]
    assert found["99% interval"] == ["", "-1.0730 to +0.0730", ""]
    note = dict(cells(comparison, comparison.best))["99% interval"][1].note
    assert note == "about 1 more seed would settle a difference of this size"
    every = dict(run_cells(comparison))
    assert [cell.text for cell in every["difference"]][3:6] == ["-0.5000", "-0.6000", "-0.4000"]
    assert every["loss"][7].text == "step 1: loss is nan"


def test_a_difference_at_equal_time_is_that_when_the_faster_run_ended():
    """B takes twice as long: it is at step 50 when A ends, at 3.0 against 2.0."""
    comparison = Comparison((run("A", 2.0), run("B", 1.5, pace=2.0)), "A")
    assert columns(comparison)["at equal time"] == ["", "+1.0000"]
    silent = Comparison((run("A", 2.0), Run("B", 0.1, 0, curve(1.5))), "A")
    assert "at equal time" not in columns(silent)


def test_columns_that_no_row_fills_are_left_out_and_numbers_of_a_users_own_are_shown():
    runs = [Run("A", 0.1, seed, ((100, 2.0 + seed),), extra={"accuracy": 0.5, "odd": seed}) for seed in (0, 1)]
    runs += [Run("B", 0.1, seed, ((100, 1.0 + seed),), extra={"accuracy": 0.25 + seed / 2}) for seed in (0, 1)]
    comparison = Comparison(tuple(runs), "A")
    found = columns(comparison)
    assert list(found) == ["variant", "verdict", "difference", "loss ± std. dev.", "accuracy", "odd"]
    assert (found["accuracy"], found["odd"]) == (["0.5", "0.5"], ["0.5", ""])
    assert "accuracy" not in text_table(comparison)  # which has to fit a terminal


@pytest.mark.parametrize(("ends", "told"), [((1.9, 2.05), "in some seeds"), ((2.1, 2.2), "not reached")])
def test_a_speedup_needs_every_seed(ends, told):
    runs = [run("A", 2.0, seed=seed) for seed in (0, 1)] + [run("B", end, seed=seed) for seed, end in enumerate(ends)]
    assert columns(Comparison(tuple(runs), "A"))["speedup in steps"] == ["", told]
