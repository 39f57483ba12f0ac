import dataclasses
import math

import pytest

from symexplin.lab.compare.table import Run, best_lr, chosen_lrs, compare, format_table, headline


def run(variant, lr, final, error=None, seed=0):
    """A run of 100 steps whose loss falls linearly from 5 to `final`."""
    return Run(variant, lr, seed, ((0, 5.0), (100, final)), 10.0, 1234.5, error)


def broken(variant, lr, seed=0):
    return Run(variant, lr, seed, ((0, 5.0),), 0.0, 0.0, "step 1: loss is nan")


RUNS = [
    run("SEL", 0.001, 2.5),
    run("AdamW", 0.001, 2.2),
    run("AdamW", 0.003, 2.0),
    run("SEL", 0.003, 2.1),
    run("SEL", 0.01, 1.0),
    run("AdamW", 0.01, 2.4),
]
# Two learning rates, three seeds. Means: AdamW 2.2 and 2.5, SEL 2.1 and 2.0. At lr 0.1, SEL minus AdamW is -0.5, 0.4
# and -0.2 by seed; its losses 1.5, 2.6, 2.2 deviate by -0.6, 0.5, 0.1: variance (0.36 + 0.25 + 0.01)/2 = 0.31.
SEEDS = [
    run(variant, lr, loss, seed=seed)
    for variant, lr, losses in (
        ("AdamW", 0.1, (2.0, 2.2, 2.4)),
        ("AdamW", 0.2, (1.9, 2.5, 3.1)),
        ("SEL", 0.1, (1.5, 2.6, 2.2)),
        ("SEL", 0.2, (1.0, 1.0, 4.0)),
    )
    for seed, loss in enumerate(losses, start=7)
]
ONE_SEED = "One seed is no evidence: the difference may be run-to-run noise. Three show an interval."


def test_best_lr_is_the_lowest_that_finished():
    assert best_lr(RUNS, "AdamW") == 0.003
    assert best_lr(RUNS, "SEL") == 0.01
    assert best_lr([*RUNS, run("SEL", 0.1, 0.5, error="step 3")], "SEL") == 0.01
    assert best_lr([run("SEL", 0.1, 1.0, error="step 3")], "SEL") is None


def test_best_lr_is_that_of_the_mean_over_seeds():
    assert best_lr(SEEDS, "AdamW") == 0.1  # though 0.2 has the lowest single run
    assert best_lr(SEEDS, "SEL") == 0.2
    one_broken = [broken("SEL", 0.2, 8) if (r.variant, r.lr, r.seed) == ("SEL", 0.2, 8) else r for r in SEEDS]
    assert best_lr(one_broken, "SEL") == 0.1


def test_both_comparisons():
    """5 -> 2 in 100 steps; the variant with 5 -> 1 is at 2 after 75, the one that ends at 2.1 never."""
    comparison = compare(RUNS, "AdamW")
    assert comparison.shared_lr == 0.003
    assert comparison.lrs == (0.001, 0.003, 0.01)
    assert comparison.seeds == (0,)
    shared, best = comparison.shared, comparison.best
    assert [(row.variant, row.lr, row.loss, row.spread) for row in shared] == [
        ("AdamW", 0.003, 2.0, None),
        ("SEL", 0.003, 2.1, None),
    ]
    assert [(row.variant, row.lr, row.loss) for row in best] == [("AdamW", 0.003, 2.0), ("SEL", 0.01, 1.0)]
    assert [row.delta for row in (*shared, *best)] == pytest.approx([0, 0.1, 0, -1.0])
    assert (shared[1].speedup, shared[1].reached) == (None, 0)
    assert (best[1].speedup, best[1].reached) == (pytest.approx(100 / 75), 1)


def test_seeds_are_paired():
    """Speedup at seed 7 and lr 0.1: 5 -> 1.5 is at 2.0 after 3/3.5 of the steps; seed 9: 2.6/2.8; seed 8 never."""
    comparison = compare(SEEDS, "AdamW")
    assert comparison.seeds == (7, 8, 9)
    base, row = comparison.shared
    assert (base.loss, base.spread) == (pytest.approx(2.2), pytest.approx(0.2))
    assert (base.delta, base.deltas, base.reached) == (0, (0, 0, 0), 3)
    assert (row.loss, row.spread) == (pytest.approx(2.1), pytest.approx(math.sqrt(0.31)))
    assert row.deltas == pytest.approx((-0.5, 0.4, -0.2))
    assert row.delta == pytest.approx(-0.1)
    assert (row.seeds, row.finite, row.reached, row.speedup) == ((7, 8, 9), 3, 2, None)


def test_speedup_is_the_mean_of_the_seeds():
    runs = [
        run(variant, 0.1, loss, seed=s)
        for variant, losses in (("A", (2, 3)), ("B", (1, 1)))
        for s, loss in enumerate(losses)
    ]
    row = compare(runs, "A").shared[1]
    assert (row.reached, row.speedup) == (2, pytest.approx((4 / 3 + 4 / 2) / 2))


def test_one_broken_seed_is_told():
    runs = [broken("SEL", 0.1, 8) if (r.variant, r.lr, r.seed) == ("SEL", 0.1, 8) else r for r in SEEDS]
    comparison = compare(runs, "AdamW")
    row = comparison.shared[1]
    assert (row.loss, row.delta, row.finite, row.reached) == (None, None, 2, 2)
    assert (row.deltas[0], row.deltas[1], row.deltas[2]) == (pytest.approx(-0.5), None, pytest.approx(-0.2))
    assert "SEL did not stay finite in 1 of 3 seeds." in headline(comparison)[0]
    assert "finite in 2 of 3" in format_table(comparison)


def test_a_variant_that_never_stays_finite_has_no_numbers():
    comparison = compare(
        [run("AdamW", 0.1, 2.0), broken("SEL", 0.1), run("AdamW", 1.0, 3), broken("SEL", 1.0)], "AdamW"
    )
    assert [(row.variant, row.lr, row.loss) for row in comparison.best] == [("AdamW", 0.1, 2.0), ("SEL", None, None)]
    lines = [line.split() for line in format_table(comparison).splitlines()]
    assert ["SEL", "0.1", "not", "finite", "-", "-", "-", "-"] in lines
    assert ["SEL", "-", "not", "finite", "-", "-", "-", "-"] in lines
    assert headline(comparison)[1] == "No learning rate tried kept SEL finite."


def test_a_baseline_that_never_stays_finite_is_an_error():
    with pytest.raises(
        ValueError, match=r"no learning rate of AdamW stayed finite.*the runs stay.* added to --lrs 0\.1 "
    ):
        compare([broken("AdamW", 0.1), run("SEL", 0.1, 2.0)], "AdamW")


def test_headline_says_gains_and_losses_in_the_same_words():
    first, second, *edges = headline(compare(RUNS, "AdamW"))
    assert first == (
        "At AdamW's best learning rate, 0.003, SEL ends at 2.1000, 0.1000 above AdamW's 2.0000, "
        "and never reaches that loss."
    )
    assert second == (
        "At its own best learning rate, 0.01, SEL ends at 1.0000, 1.0000 below AdamW's 2.0000, "
        "and reaches that loss in 75 % of the steps."
    )
    assert edges == ["The best learning rate of SEL is the highest tried: a wider sweep may find better.", ONE_SEED]


def test_headline_counts_the_seeds():
    first, second, *edges = headline(compare(SEEDS, "AdamW"))
    assert first == (
        "At AdamW's best learning rate, 0.1, SEL ends at 2.1000 ± 0.5568, 0.1000 below AdamW's "
        "2.2000 ± 0.2000 (no difference detected; 99 % interval -2.7259 to +2.5259), and reaches that loss in 2 of 3 "
        "seeds."
    )
    assert "at 2.0000 ± 1.7321, 0.2000 below AdamW's 2.2000 ± 0.2000 (no difference detected; 99 % interval" in second
    assert ONE_SEED not in edges
    worse = [dataclasses.replace(r, variant={"AdamW": "SEL", "SEL": "AdamW"}[r.variant]) for r in SEEDS if r.lr == 0.1]
    sentence = headline(compare(worse, "AdamW"))[0]
    words = "(no difference detected; 99 % interval -2.5259 to +2.7259), and reaches that loss in 1 of 3"
    assert f"0.1000 above AdamW's 2.1000 ± 0.5568 {words}" in sentence


def test_a_gap_has_the_digits_of_the_table():
    ends = (1.99946, 2.00004)
    sentences = [headline(compare([run("AdamW", 0.1, 2.0), run("SEL", 0.1, end)], "AdamW"))[0] for end in ends]
    assert "at 1.9995, 0.0005 below AdamW's 2.0000" in sentences[0]
    assert "at 2.0000, within 0.0001 of AdamW's 2.0000, and never reaches" in sentences[1]


@pytest.mark.parametrize("final", [4.0, 18.5])
def test_a_loss_above_the_start_is_reached_without_a_speedup(final):
    """The baseline diverges from 5 to 18, so that every variant is below that before its first step."""
    comparison = compare([run("AdamW", 0.1, 18.0), run("SEL", 0.1, final)], "AdamW")
    row = comparison.shared[1]
    assert (row.reached, row.speedup) == (1, None)
    assert headline(comparison)[0].endswith("AdamW's 18.0000.")
    cells = format_table(comparison).splitlines()[3].split()
    assert (cells[0], cells[4]) == ("SEL", "-")


def test_a_loss_that_the_curve_stays_above_is_never_reached():
    high = Run("SEL", 0.1, 0, ((0, 20.0), (50, 19.0), (100, 18.5)), 1.0, 1.0)
    assert headline(compare([run("AdamW", 0.1, 18.0), high], "AdamW"))[0].endswith("and never reaches that loss.")


def test_table_has_every_number():
    table = format_table(compare(RUNS, "AdamW"))
    lines = [line.split() for line in table.splitlines()]
    assert ["SEL", "0.003", "2.1000", "+0.1000", "not", "reached", "1,234", "10.0"] in lines
    assert ["SEL", "0.01", "1.0000", "-1.0000", "1.33x", "1,234", "10.0"] in lines
    assert lines.count(["AdamW", "0.003", "2.0000", "-", "-", "1,234", "10.0"]) == 2


# By seed 7 alone AdamW is best at 0.2 and SEL at 0.1; seeds 8 and 9 would choose otherwise.
STAGES = [
    *(
        run(variant, lr, loss, seed=7)
        for variant, lr, loss in (("AdamW", 0.1, 2.0), ("AdamW", 0.2, 1.9), ("AdamW", 0.4, 3.0))
    ),
    *(
        run(variant, lr, loss, seed=7)
        for variant, lr, loss in (("SEL", 0.1, 1.5), ("SEL", 0.2, 1.7), ("SEL", 0.4, 1.6))
    ),
    *(run("AdamW", 0.2, loss, seed=seed) for seed, loss in ((8, 2.3), (9, 2.7))),
    *(run("SEL", 0.1, loss, seed=seed) for seed, loss in ((8, 9.0), (9, 3.0))),
    *(run("SEL", 0.2, loss, seed=seed) for seed, loss in ((8, 2.0), (9, 2.5))),
]


def test_seeds_that_confirm_have_no_say_in_the_learning_rates():
    """SEL's mean over all seeds is 4.5 at lr 0.1 and 2.07 at 0.2; seed 7 alone chose 0.1."""
    assert chosen_lrs([r for r in STAGES if r.seed == 7], "AdamW") == {"AdamW": (0.2,), "SEL": (0.2, 0.1)}
    comparison = compare(STAGES, "AdamW", confirm_seeds=(8, 9))
    assert (comparison.seeds, comparison.confirm_seeds, comparison.lrs) == ((7, 8, 9), (8, 9), (0.1, 0.2, 0.4))
    assert [(row.variant, row.lr, row.seeds) for row in (*comparison.shared, *comparison.best)] == [
        ("AdamW", 0.2, (7, 8, 9)),
        ("SEL", 0.2, (7, 8, 9)),
        ("AdamW", 0.2, (7, 8, 9)),
        ("SEL", 0.1, (7, 8, 9)),
    ]
    shared, best = comparison.shared[1], comparison.best[1]
    assert (shared.loss, best.loss) == (pytest.approx((1.7 + 2.0 + 2.5) / 3), pytest.approx(4.5))
    assert shared.deltas == pytest.approx((-0.2, -0.3, -0.2))
    assert best.deltas == pytest.approx((-0.4, 6.7, 0.3))
    assert headline(comparison)[-1] == (
        "The learning rates were chosen by seed 7 alone; seeds 8, 9 ran at those rates only."
    )


def test_what_an_earlier_second_stage_left_at_other_rates_is_left_out():
    extra = [run("AdamW", 0.1, 0.1, seed=8), run("SEL", 0.4, 0.1, seed=9), run("SEL", 0.8, 0.1, seed=8)]
    assert compare([*STAGES, *extra], "AdamW", (8, 9)) == compare(STAGES, "AdamW", (8, 9))


def test_a_baseline_that_breaks_down_while_confirming_leaves_pairs_without_it():
    runs = [broken("AdamW", 0.2, 8) if (r.variant, r.seed) == ("AdamW", 8) else r for r in STAGES]
    comparison = compare(runs, "AdamW", (8, 9))
    base, row = comparison.shared
    assert (base.loss, base.finite, base.delta) == (None, 2, None)
    assert (row.loss, row.finite, row.delta) == (pytest.approx((1.7 + 2.0 + 2.5) / 3), 3, None)
    assert (row.deltas[0], row.deltas[1], row.deltas[2]) == (pytest.approx(-0.2), None, pytest.approx(-0.2))
    assert row.speedup is None
    assert headline(comparison)[0].endswith("0.2, AdamW did not stay finite in 1 of 3 seeds.")
    assert "finite in 2 of 3" in format_table(comparison)


def test_a_variant_without_a_finite_rate_is_confirmed_at_the_shared_one():
    runs = [run("AdamW", 0.1, 2.0), broken("SEL", 0.1), run("AdamW", 1.0, 3), broken("SEL", 1.0)]
    assert chosen_lrs(runs, "AdamW")["SEL"] == (0.1,)
    comparison = compare([*runs, run("AdamW", 0.1, 2.2, seed=1), run("SEL", 0.1, 2.1, seed=1)], "AdamW", (1,))
    assert (comparison.shared[1].finite, comparison.best[1].lr) == (1, None)
    assert "No learning rate tried kept SEL finite." in headline(comparison)
