import dataclasses

import pytest

from symexplin.lab.compare import Run, best_run, compare, format_table, headline


def run(arm, lr, final, error=None):
    """A run of 100 steps whose loss falls linearly from 5 to `final`."""
    return Run(arm, lr, ((0, 5.0), (100, final)), 10.0, 1234.5, error)


RUNS = [
    run("SEL", 0.001, 2.5),
    run("AdamW", 0.001, 2.2),
    run("AdamW", 0.003, 2.0),
    run("SEL", 0.003, 2.1),
    run("SEL", 0.01, 1.0),
    run("AdamW", 0.01, 2.4),
]


def test_best_run_is_the_lowest_that_finished():
    assert best_run(RUNS, "AdamW").lr == 0.003
    assert best_run(RUNS, "SEL").lr == 0.01
    assert best_run([*RUNS, run("SEL", 0.1, 0.5, error="step 3")], "SEL").lr == 0.01
    with pytest.raises(ValueError, match="no run of SEL stayed finite"):
        best_run([run("SEL", 0.1, 1.0, error="step 3")], "SEL")


def test_both_comparisons():
    """5 -> 2 in 100 steps; the arm with 5 -> 1 is at 2 after 75, the one that ends at 2.1 never."""
    comparison = compare(RUNS, "AdamW")
    assert comparison.shared_lr == 0.003
    assert comparison.lrs == (0.001, 0.003, 0.01)
    shared, best = comparison.shared, comparison.best
    assert [(row.arm, row.lr, row.loss) for row in shared] == [("AdamW", 0.003, 2.0), ("SEL", 0.003, 2.1)]
    assert [(row.arm, row.lr, row.loss) for row in best] == [("AdamW", 0.003, 2.0), ("SEL", 0.01, 1.0)]
    assert [row.delta for row in (*shared, *best)] == pytest.approx([0, 0.1, 0, -1.0])
    assert shared[1].speedup is None
    assert best[1].speedup == pytest.approx(100 / 75)


def test_a_run_that_broke_down_is_a_row():
    runs = [run("AdamW", 0.1, 2.0), Run("SEL", 0.1, (), 0.0, 0.0, "step 1"), run("AdamW", 1.0, 3), run("SEL", 1.0, 3)]
    comparison = compare(runs, "AdamW")
    assert (comparison.shared[1].loss, comparison.shared[1].delta, comparison.shared[1].speedup) == (None,) * 3
    assert "SEL did not stay finite" in headline(comparison)[0]
    assert "not finite" in format_table(comparison)


def test_headline_says_gains_and_losses_in_the_same_words():
    first, second, *edges = headline(compare(RUNS, "AdamW"))
    assert first == (
        "At AdamW's best learning rate, 0.003, SEL ends at 2.100 nats a token, 0.100 above AdamW's 2.000, "
        "and never reaches that loss."
    )
    assert second == (
        "At its own best learning rate, 0.01, SEL ends at 1.000 nats a token, 1.000 below AdamW's 2.000, "
        "and reaches that loss in 75 % of the steps."
    )
    assert edges == ["The best learning rate of SEL is the highest tried: a wider sweep may find better."]


def test_headline_when_both_are_best_at_one_rate():
    sentences = headline(compare([run("AdamW", 0.1, 2.0), run("SEL", 0.1, 2.0)], "AdamW"))
    assert "equal to AdamW's 2.000" in sentences[0]
    assert sentences[1:] == ["That is the best learning rate of SEL too."]


def test_table_has_every_number():
    table = format_table(compare(RUNS, "AdamW"))
    lines = [line.split() for line in table.splitlines()]
    assert ["SEL", "0.003", "2.1000", "+0.1000", "not", "reached", "1,234", "10.0"] in lines
    assert ["SEL", "0.01", "1.0000", "-1.0000", "1.33x", "1,234", "10.0"] in lines
    assert lines.count(["AdamW", "0.003", "2.0000", "-", "-", "1,234", "10.0"]) == 2


def test_several_arms_keep_their_order():
    runs = [*RUNS, *(dataclasses.replace(r, arm="other") for r in RUNS if r.arm == "SEL")]
    assert [row.arm for row in compare(runs, "AdamW").best] == ["AdamW", "SEL", "other"]
