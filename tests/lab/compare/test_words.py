import re

import pytest

from planted import compare, run, runs_of
from symexplin.lab.compare.cells import text_table
from symexplin.lab.compare.comparison import Run
from symexplin.lab.compare.words import notes, shown, verdict


def test_only_what_is_better_has_a_share_of_the_steps_and_a_loss_that_no_seed_changes_is_told():
    losses = {("AdamW", 0.1): [2.0, 2.0, 2.0], ("SEL", 0.1): [1.0, 1.1, 1.05]}
    comparison = compare(runs_of(losses), "AdamW")
    assert re.search(
        r"\(better; 99% interval .*\), and reaches AdamW's loss in \d+% of the steps\.$", verdict(comparison)[0]
    )
    assert "All seeds of AdamW have the same loss: do its runs use the seed?" in notes(comparison)
    assert len(comparison.tables) == 1  # as both have one best learning rate


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
    first, *second = verdict(compare([*chose, *judge], "A", confirm_seeds=(0, 1, 2)))
    assert first.startswith(f"Of 2 variants besides A, {words}")
    assert "; 99% interval " in first
    assert len(second) == (lr == 0.2)  # the shared rate, where it is another


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
    assert verdict(comparison)[0] == f"At learning rate 0.1, {words}."


def test_a_difference_that_rounds_to_zero_has_no_minus():
    table = {("AdamW", 0.1): [2.0, 2.0, 2.0], ("SEL", 0.1): [1.99996, 1.99997, 1.99996]}
    comparison = compare(runs_of(table), "AdamW")
    assert "-0.0000" not in text_table(comparison) + shown(comparison, -0.0)
    assert "-0.0000" not in str(comparison.best[1].interval)
    assert verdict(comparison)[0].endswith(
        "(better; 99% interval -0.0001 to +0.0000), and reaches AdamW's loss in 100% of the steps."
    )


def test_the_sentence_says_one_speedup_over_the_seeds():
    """The variant needs 90% of the steps with two seeds and 20% with one: 66.7% in the mean, 1.5 times fewer."""
    runs = [Run("A", 0.1, seed, ((0, 5.0), (100, 2.0))) for seed in range(3)]
    ends = (1.9, 1.9001, 1.9)
    runs += [Run("B", 0.1, seed, ((0, 5.0), (at, 2.0), (100, ends[seed]))) for seed, at in enumerate((90, 90, 20))]
    comparison = compare(runs, "A")
    assert comparison.best[1].speedup == pytest.approx(1.5)
    assert verdict(comparison)[0].endswith("reaches A's loss in 67% of the steps.")
