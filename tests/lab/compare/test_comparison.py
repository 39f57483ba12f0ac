import math
import re

import pytest

from symexplin.lab.compare.cells import cells, text_table
from symexplin.lab.compare.comparison import ONE_LR, Comparison, Run, share_of_steps
from symexplin.lab.files import write_json
from table_folders import comparison as written


def run(variant, lr, final, seed=0):
    """A run of 100 steps whose loss falls linearly from 5 to `final`; None: it broke down."""
    if final is None:
        return Run(variant, lr, seed, ((0, 5.0),), error="step 1: loss is nan")
    return Run(variant, lr, seed, ((0, 5.0), (100, final)), 10.0, 1234.5)


def runs_of(table, first_seed=0):
    """Runs of {(variant, lr): losses of the seeds}."""
    return [
        run(variant, lr, loss, seed)
        for (variant, lr), losses in table.items()
        for seed, loss in enumerate(losses, first_seed)
    ]


def compare(runs, baseline, confirm_seeds=()):
    return Comparison(tuple(runs), baseline, confirm_seeds)


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
    assert comparison.verdict == [
        "At its best learning rate, 0.01, SEL ends at 1.0000, 1.0000 below AdamW's 2.0000.",
        "There is no verdict, since these seeds chose the learning rates: add --confirm-seeds.",
    ]
    assert comparison.notes == [
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
    assert comparison.verdict[-1] == (
        "At AdamW's best learning rate, 0.1, SEL ends at 2.1000, 0.1000 below AdamW's 2.2000 "
        "(no difference detected; 99% interval -2.7259 to +2.5259; the smallest mean that would count is 2.6259)."
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
    assert [comparison.shown_loss(one) for one in (base, row) if one.loss is None] == ["finite in 2 of 3"]


def test_a_variant_that_never_stays_finite_has_no_numbers_and_a_baseline_is_an_error():
    runs = runs_of({("AdamW", 0.1): [2.0], ("SEL", 0.1): [None], ("AdamW", 1.0): [3.0], ("SEL", 1.0): [None]})
    comparison = compare(runs, "AdamW")
    assert [(row.variant, row.lr, row.loss) for row in comparison.best] == [("AdamW", 0.1, 2.0), ("SEL", None, None)]
    assert comparison.verdict == ["No learning rate tried kept SEL finite in every seed."]
    assert comparison.chosen_lrs()["SEL"] == (0.1,)  # where a second stage confirms it
    with pytest.raises(ValueError, match=r"no learning rate kept SEL finite.* added to --lrs 0\.1 1$"):
        compare(runs, "SEL").chosen_lrs()


def test_only_what_is_better_has_a_share_of_the_steps_and_a_loss_that_no_seed_changes_is_told():
    losses = {("AdamW", 0.1): [2.0, 2.0, 2.0], ("SEL", 0.1): [1.0, 1.1, 1.05]}
    comparison = compare(runs_of(losses), "AdamW")
    assert re.search(
        r"\(better; 99% interval .*\), and reaches that loss in \d+% of the steps\.$", comparison.verdict[0]
    )
    assert "All seeds of AdamW have the same loss: do its runs use the seed?" in comparison.notes
    assert len(comparison.tables) == 1  # as both have one best learning rate


def test_a_loss_above_the_start_is_reached_without_a_speedup():
    """The baseline diverges from 5 to 18, so that a variant is below that before its first step, or never."""
    for high, reached in ((5.0, 1), (20.0, 0)):
        other = Run("SEL", 0.1, 0, ((0, high), (100, 18.5)))
        comparison = compare([run("AdamW", 0.1, 18.0), other], "AdamW")
        assert (comparison.shared[1].reached, comparison.shared[1].speedup) == (reached, None)
        assert ONE_LR in comparison.notes


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
    assert compare(STAGES, "AdamW", (8, 9)).verdict[-1].startswith("Two seeds are not enough evidence")
    assert comparison.notes[-1] == "Seed 7 chose the learning rates; the results use only seeds 8, 9."
    one_rate = compare(runs_of({("AdamW", 0.1): [2.0, 2.1, 2.2], ("SEL", 0.1): [1.9, 2.0, 2.1]}), "AdamW", (1, 2))
    assert (one_rate.best[1].seeds, len(one_rate.verdict)) == ((0, 1, 2), 2)  # nothing was chosen
    assert one_rate.verdict[0].startswith("At learning rate 0.1, SEL ends at 2.0000")
    assert [title for title, _ in one_rate.tables] == ["At learning rate 0.1"]
    left_by_an_earlier_stage = [run("AdamW", 0.1, 0.1, seed=8), run("SEL", 0.8, 0.1, seed=8)]
    assert compare([*STAGES, *left_by_an_earlier_stage], "AdamW", (8, 9)).best == comparison.best[:2]


@pytest.mark.parametrize(
    ("lr", "lost", "words"),
    [
        (
            0.1,
            False,
            "B has the lowest loss. At learning rate 0.1, the best for both, B ends at 2.0333",
        ),
        (0.2, False, "B has the lowest loss. At its best learning rate, 0.2, B ends at 2.0333"),
        (
            0.1,
            True,
            "C has the lowest loss. At learning rate 0.1, the best for both, C ends at 3.1000",
        ),
    ],
)
def test_the_verdict_is_of_the_lowest_variant_in_at_most_two_sentences(lr, lost, words):
    table = {("A", 0.1): [2.0, 2.2, 2.4], ("A", 0.2): [3.0] * 3, ("C", 0.1): [3.0, 3.1, 3.2], ("C", 0.2): [4.0] * 3}
    table |= {("B", 0.1): [2.5] * 3, ("B", 0.2): [2.6] * 3} | {("B", lr): [1.9, 2.0, 2.2]}
    judge = [run(r.variant, r.lr, None, r.seed) if lost and r.variant == "B" else r for r in runs_of(table)]
    chose = [run(r.variant, r.lr, r.loss, 7) for r in judge if r.seed == 1]
    first, *second = compare([*chose, *judge], "A", confirm_seeds=(0, 1, 2)).verdict
    assert first.startswith(f"Of 2 variants beside A, {words}")
    assert "; 99% interval " in first
    assert len(second) == (lr == 0.2)  # the shared rate, where it is another


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
    with pytest.raises(FileNotFoundError, match=r"has no comparison\.json: finish the comparison with --resume"):
        Comparison.load(tmp_path / "none")
    write_json(tmp_path / "comparison.json", {})
    with pytest.raises(
        ValueError, match=r"comparison\.json' is damaged, or of another version of symexplin: delete it"
    ):
        Comparison.load(tmp_path)


@pytest.mark.parametrize(
    ("scale", "last", "words"),
    [
        (1e-6, 1.9, "SEL ends at 0.000001900, 0.000000100 below AdamW's 0.000002000"),
        (1e-6, 1.9999, "SEL ends at 0.000002000, within 1e-09 of AdamW's 0.000002000"),
        (1.0, 1.99996, "SEL ends at 2.0000, within 0.0001 of AdamW's 2.0000"),
        (-1e-9, 2.1, "SEL ends at -0.000000002100, 0.000000000100 below AdamW's -0.000000002000"),
        (0.0, 1.0, "SEL ends at 0.0000, equal to AdamW's 0.0000"),
    ],
)
def test_losses_have_four_decimals_or_those_that_show_four_digits_of_the_baselines(scale, last, words):
    comparison = compare([run("AdamW", 0.1, 2.0 * scale), run("SEL", 0.1, last * scale)], "AdamW")
    assert comparison.verdict[0] == f"At learning rate 0.1, {words}."
    assert comparison.shown_loss(comparison.best[1]) == words.split()[3].rstrip(",")


def test_a_difference_that_rounds_to_zero_has_no_minus():
    table = {("AdamW", 0.1): [2.0, 2.0, 2.0], ("SEL", 0.1): [1.99996, 1.99997, 1.99996]}
    comparison = compare(runs_of(table), "AdamW")
    assert "-0.0000" not in text_table(comparison) + comparison.shown(-0.0)
    assert "-0.0000" not in str(comparison.best[1].interval)
    assert comparison.verdict[0].endswith(
        "(better; 99% interval -0.0001 to +0.0000), and reaches that loss in 100% of the steps."
    )


BASELINE = [(0, 5.0), (50, 3.0), (100, 2.0)]


RISES = [(0, 5.0), (40, 1.0), (100, 3.0)]  # at 3 first after 20 steps


@pytest.mark.parametrize(
    ("baseline", "variant", "expected"),
    [
        (BASELINE, BASELINE, 1.0),
        (BASELINE, [(0, 5.0), (50, 2.0), (100, 1.5)], 0.5),
        (BASELINE, [(0, 5.0), (50, 3.0), (100, 1.0)], 0.75),  # halfway between its evaluations
        (BASELINE, [(0, 4.0), (40, 1.0), (100, 3.0)], 0.4 * 2 / 3),  # the first time counts, not the last
        (BASELINE, [(0, 5.0), (50, 3.0), (100, 2.001)], None),
        (BASELINE, [(0, 2.0), (100, 1.0)], None),
        (BASELINE, [(0, 5.0)], None),
        (RISES, RISES, 1.0),
        (RISES, BASELINE, 50 / 20),
        ([(0, 3.0), (50, 1.0), (100, 4.0)], BASELINE, None),  # the baseline starts below its final loss
        ([(0, 2.0)], BASELINE, None),
    ],
)
def test_the_share_of_the_steps_to_the_final_loss_of_the_baseline(baseline, variant, expected):
    assert share_of_steps(baseline, variant) == (None if expected is None else pytest.approx(expected))


def test_the_sentence_says_one_speedup_over_the_seeds():
    """The variant needs 90% of the steps with two seeds and 20% with one: 66.7% in the mean, 1.5 times fewer."""
    runs = [Run("A", 0.1, seed, ((0, 5.0), (100, 2.0))) for seed in range(3)]
    ends = (1.9, 1.9001, 1.9)
    runs += [Run("B", 0.1, seed, ((0, 5.0), (at, 2.0), (100, ends[seed]))) for seed, at in enumerate((90, 90, 20))]
    comparison = compare(runs, "A")
    assert comparison.best[1].speedup == pytest.approx(1.5)
    assert comparison.verdict[0].endswith("reaches that loss in 67% of the steps.")


def test_a_noisy_variant_has_an_interval_of_its_own():
    ends = {"A": [2.0, 2.1, 2.2], "quiet": [1.0, 1.11, 1.2], "noisy": [1.0, 3.1, 1.1]}
    comparison = compare(runs_of({(name, 0.1): losses for name, losses in ends.items()}), "A")
    quiet, noisy = (row.interval for row in comparison.best[1:])
    assert (quiet.pooled, noisy.pooled) == (2, 1)
    notes = [cell.note for cell in dict(cells(comparison, comparison.best))["99% interval"]]
    assert ["varies more" in note for note in notes[1:]] == [False, True]


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
