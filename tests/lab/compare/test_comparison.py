import math

import pytest

from planted import compare, run, runs_of
from symexplin.lab.compare.cells import cells
from symexplin.lab.compare.comparison import Comparison, Run
from symexplin.lab.compare.words import ONE_LR, notes, verdict
from table_folders import comparison as written

ONE_SEED = runs_of(
    {
        ("SEL", 0.001): [2.5],
        ("AdamW", 0.001): [2.2],
        ("AdamW", 0.003): [2.0],
        ("SEL", 0.003): [2.1],
        ("SEL", 0.01): [1.0],
        ("AdamW", 0.01): [2.4],
    }
)
# Means: AdamW 2.2 and 2.5, SEL 2.1 and 2.0. At lr 0.1, SEL minus AdamW is -0.5, 0.4 and -0.2 by seed; its losses 1.5,
# 2.6, 2.2 deviate by -0.6, 0.5, 0.1: variance (0.36 + 0.25 + 0.01)/2 = 0.31.
THREE_SEEDS = {
    ("AdamW", 0.1): [2.0, 2.2, 2.4],
    ("AdamW", 0.2): [1.9, 2.5, 3.1],
    ("SEL", 0.1): [1.5, 2.6, 2.2],
    ("SEL", 0.2): [1.0, 1.0, 4.0],
}


def test_the_best_rate_has_the_lowest_mean_of_those_that_stayed_finite_in_every_seed():
    comparison = compare(runs_of(THREE_SEEDS), "AdamW")
    assert [comparison.best_lr(v) for v in comparison.variants] == [0.1, 0.2]  # AdamW's lowest single run is at 0.2
    assert compare(runs_of({**THREE_SEEDS, ("SEL", 0.2): [1.0, None, 4.0]}), "AdamW").best_lr("SEL") == 0.1
    assert compare([run("SEL", 0.1, None)], "SEL").best_lr("SEL") is None
    lone = [*runs_of(THREE_SEEDS), run("SEL", 0.3, 0.5)]  # one seed makes no best rate beside three
    assert compare(lone, "AdamW").best_lr("SEL") == 0.2


def test_variants_are_compared_at_the_shared_rate_and_at_their_best():
    """5 -> 2 in 100 steps; the variant with 5 -> 1 is at 2 after 75, the one that ends at 2.1 never."""
    comparison = compare(ONE_SEED, "AdamW")
    assert (comparison.shared_lr, comparison.lrs, comparison.seeds) == (0.003, (0.001, 0.003, 0.01), (0,))
    rows = [(row.variant, row.lr, row.loss, row.delta, row.speedup, row.reached) for row in comparison.shared]
    assert rows == [("AdamW", 0.003, 2.0, 0, 1, 1), ("SEL", 0.003, 2.1, pytest.approx(0.1), None, 0)]
    best = comparison.best[1]
    assert (best.lr, best.loss, best.delta, best.speedup) == (0.01, 1.0, -1.0, pytest.approx(100 / 75))
    assert verdict(comparison) == [
        "At its best learning rate, 0.01, SEL ends at 1.0000, 1.0000 below AdamW's 2.0000.",
        "There is no verdict, since these seeds chose the learning rates: add --confirm-seeds.",
    ]
    assert notes(comparison) == [
        "The best learning rate of SEL is the highest tried: a wider sweep may find a better one.",
    ]


def test_seeds_are_paired():
    """The interval is -0.1 ± 9.9248 * 0.4583 / sqrt(3), with Student's quantile of two degrees of freedom."""
    chose = [run(name, lr, loss) for name, lr, loss in (("AdamW", 0.1, 1), ("AdamW", 0.2, 2), ("SEL", 0.2, 1))]
    chose += [run("SEL", 0.1, 2)]
    comparison = compare([*chose, *runs_of(THREE_SEEDS, first_seed=7)], "AdamW", confirm_seeds=(7, 8, 9))
    base, row = comparison.shared
    assert (base.loss, base.spread, base.deltas, base.reached) == (pytest.approx(2.2), pytest.approx(0.2), (0, 0, 0), 3)
    assert (row.loss, row.spread) == (pytest.approx(2.1), pytest.approx(math.sqrt(0.31)))
    assert (row.delta, row.deltas) == (pytest.approx(-0.1), pytest.approx((-0.5, 0.4, -0.2)))
    assert (row.seeds, row.finite, row.reached, row.speedup) == ((7, 8, 9), 3, 2, None)
    assert verdict(comparison)[-1] == (
        "At AdamW's best learning rate, 0.1, SEL ends at 2.1000, 0.1000 below AdamW's 2.2000 "
        "(no difference detected; 99% interval -2.7259 to +2.5259; the smallest detectable difference is 2.6259)."
    )


@pytest.mark.parametrize(("variant", "finite"), [("SEL", (3, 2)), ("AdamW", (2, 3))])
def test_a_seed_that_broke_down_leaves_pairs_without_it(variant, finite):
    """In the second stage the baseline may break down, too."""
    table = {key: losses for key, losses in THREE_SEEDS.items() if key[1] == 0.1}
    table[variant, 0.1] = [table[variant, 0.1][0], None, table[variant, 0.1][2]]
    chose = [run(name, lr, 10 * lr, seed=3) for name in ("AdamW", "SEL") for lr in (0.1, 0.2)]
    comparison = compare([*chose, *runs_of(table)], "AdamW", confirm_seeds=(0, 1, 2))
    base, row = comparison.shared
    assert (base.finite, row.finite) == finite
    assert (base.loss is None, row.loss is None) == (variant == "AdamW", variant == "SEL")
    assert row.deltas == (pytest.approx(-0.5), None, pytest.approx(-0.2))
    assert (row.delta, row.speedup, row.reached) == (None, None, 2)


def test_a_variant_that_never_stays_finite_has_no_numbers_and_a_baseline_is_an_error():
    runs = runs_of({("AdamW", 0.1): [2.0], ("SEL", 0.1): [None], ("AdamW", 1.0): [3.0], ("SEL", 1.0): [None]})
    comparison = compare(runs, "AdamW")
    assert [(row.variant, row.lr, row.loss) for row in comparison.best] == [("AdamW", 0.1, 2.0), ("SEL", None, None)]
    assert verdict(comparison) == ["SEL diverged in at least one seed at every learning rate tried."]
    assert comparison.chosen_lrs()["SEL"] == (0.1,)  # where a second stage confirms it
    with pytest.raises(ValueError, match=r"SEL diverged in at least one seed at every.* added to --lrs 0\.1 1$"):
        compare(runs, "SEL").chosen_lrs()


def test_a_loss_above_the_start_is_reached_without_a_speedup():
    """The baseline diverges from 5 to 18, so that a variant is below that before its first step, or never."""
    for high, reached in ((5.0, 1), (20.0, 0)):
        other = Run("SEL", 0.1, 0, ((0, high), (100, 18.5)))
        comparison = compare([run("AdamW", 0.1, 18.0), other], "AdamW")
        assert (comparison.shared[1].reached, comparison.shared[1].speedup) == (reached, None)
        assert ONE_LR in notes(comparison)


# By seed 7 alone AdamW is best at 0.2 and SEL at 0.1; seeds 8 and 9 would choose otherwise.
CHOOSING = {("AdamW", 0.1): [2.0], ("AdamW", 0.2): [1.9], ("SEL", 0.1): [1.5], ("SEL", 0.2): [1.7], ("SEL", 0.4): [1.6]}
CONFIRMING = {("AdamW", 0.2): [2.3, 2.7], ("SEL", 0.1): [9.0, 3.0], ("SEL", 0.2): [2.0, 2.5]}
STAGES = [*runs_of({**CHOOSING, ("AdamW", 0.4): [3.0]}, 7), *runs_of(CONFIRMING, 8)]


def test_seeds_that_confirm_have_no_say_in_the_learning_rates_and_count_alone():
    """SEL's mean over all seeds is 4.5 at lr 0.1 and 2.07 at 0.2; seed 7 alone chose 0.1. Only it ran Lion."""
    assert compare([r for r in STAGES if r.seed == 7], "AdamW").chosen_lrs() == {"AdamW": (0.2,), "SEL": (0.2, 0.1)}
    comparison = compare([*STAGES, run("Lion", 0.1, 1.8, seed=7)], "AdamW", confirm_seeds=(8, 9))
    assert (comparison.seeds, comparison.confirm_seeds, comparison.lrs) == ((7, 8, 9), (8, 9), (0.1, 0.2, 0.4))
    shared, (base, best, lion) = comparison.shared[1], comparison.best
    assert (comparison.shared_lr, shared.lr, best.lr) == (0.2, 0.2, 0.1)
    assert (base.loss, shared.loss, best.loss) == (pytest.approx(2.5), pytest.approx(2.25), pytest.approx(6.0))
    assert (shared.deltas, best.deltas) == (pytest.approx((-0.3, -0.2)), pytest.approx((6.7, 0.3)))
    assert (lion.seeds, lion.deltas) == ((7,), (pytest.approx(-0.1),))
    assert verdict(compare(STAGES, "AdamW", (8, 9)))[-1].startswith("Two seeds are not enough evidence")
    assert notes(comparison)[-1] == "Seed 7 chose the learning rates; the results use only seeds 8, 9."
    one_rate = compare(runs_of({("AdamW", 0.1): [2.0, 2.1, 2.2], ("SEL", 0.1): [1.9, 2.0, 2.1]}), "AdamW", (1, 2))
    assert (one_rate.best[1].seeds, len(verdict(one_rate))) == ((0, 1, 2), 2)  # nothing was chosen
    assert verdict(one_rate)[0].startswith("At learning rate 0.1, SEL ends at 2.0000")
    assert [title for title, _ in one_rate.tables] == ["At learning rate 0.1"]
    left_by_an_earlier_stage = [run("AdamW", 0.1, 0.1, seed=8), run("SEL", 0.8, 0.1, seed=8)]
    assert compare([*STAGES, *left_by_an_earlier_stage], "AdamW", (8, 9)).best == comparison.best[:2]


def test_a_file_has_all_that_the_comparison_has(tmp_path):
    folder = written(tmp_path / "c", seeds=(0, 1, 2), broken=("SEL", 0.01, 1), labels={"SEL": "mine"}, unit="bits")
    loaded = Comparison.load(folder)
    assert (loaded.label("SEL"), loaded.unit, loaded.map_of("AdamW"), loaded.map_of("SEL").beta) == (
        *("mine", "bits", None),
        pytest.approx(7.5 / 8**0.5),
    )
    loaded.save(tmp_path)
    assert (tmp_path / "comparison.json").read_bytes() == (folder / "comparison.json").read_bytes()
    assert [row.finite for row in loaded.shared] == [3, 2]


def test_a_noisy_variant_has_an_interval_of_its_own():
    ends = {"A": [2.0, 2.1, 2.2], "quiet": [1.0, 1.11, 1.2], "noisy": [1.0, 3.1, 1.1]}
    comparison = compare(runs_of({(name, 0.1): losses for name, losses in ends.items()}), "A")
    quiet, noisy = (row.interval for row in comparison.best[1:])
    assert (quiet.pooled, noisy.pooled) == (2, 1)
    notes = [cell.note for cell in dict(cells(comparison, comparison.best))["99% interval"]]
    assert ["own variance" in note for note in notes[1:]] == [False, True]


def test_runs_in_both_tables_have_one_interval():
    table = {("A", 0.1): [2.0, 2.1, 2.2], ("B", 0.1): [1.9, 2.01, 2.0], ("C", 0.1): [3.0, 2.0, 4.0]}
    table |= {("C", 0.2): [1.8, 1.9, 2.1]}
    chose = [
        run(name, lr, losses[1], 7)
        for (name, lr), losses in {**table, ("A", 0.2): [0, 9.0], ("B", 0.2): [0, 9.0]}.items()
    ]
    comparison = compare([*chose, *runs_of(table)], "A", confirm_seeds=(0, 1, 2))
    assert comparison.shared[1] == comparison.best[1]
    assert comparison.shared[2].lr != comparison.best[2].lr
