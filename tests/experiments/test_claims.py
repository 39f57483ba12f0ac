from pathlib import Path

import pytest
import torch

import symexplin as sel
from symexplin.experiments.claims import VERDICTS, judge
from symexplin.experiments.comparison import Evidence
from symexplin.experiments.paper import Claim, Paper
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.weights import save_model
from table_folders import panel_folder

HELD, DID_NOT, NO_DIFFERENCE, SAME_SIGN, OTHER_SIGN, UNTESTED = VERDICTS
PAPER = Paper({("t", "1x1", "A"): 2.0, ("t", "1x1", "B"): 1.9}, (), ())


def claim(kind="below", variant="B", against="A", **more):
    return Claim(("t",), variant, kind, "B is better.", "Table 1", against, **more)


def panel(folder, loss, name="p", paper="1x1", variants=("A", "B"), **more):
    found = panel_folder(folder / name, list(variants), loss, **more)
    return Evidence(name, folder / name, found, paper)


def unfinished(name, paper):
    return Evidence(name, Path(name), {}, paper)


def ends(table):
    """Return losses by (variant, lr), a number or one for each seed."""

    def loss(variant, lr, seed):
        found = table[variant, lr]
        return found[seed] if isinstance(found, list) else found

    return loss


def verdict(found, said):
    return judge(said, "t", [found], PAPER)


def test_a_gain_at_own_best_rates_holds(tmp_path):
    # Own best rates: 0.01 for A, 0.001 for B.
    table = {("A", 0.001): 2.5, ("A", 0.01): [2.0, 2.1, 2.2], ("B", 0.001): [1.9, 2.01, 2.1], ("B", 0.01): 2.4}
    found = verdict(panel(tmp_path, ends(table)), claim())
    only = found.panels[0]
    assert (found.verdict, only.best.verdict, only.shared.verdict) == (HELD, HELD, NO_DIFFERENCE)
    assert only.best.interval.values == pytest.approx((-0.1, -0.09, -0.1))
    assert only.shared.interval.mean == pytest.approx(0.3)
    assert only.paper == pytest.approx(-0.1)
    assert only.note == ""
    assert found.sentence.startswith("Held: ")
    assert "-0.0967 (99%: -0.1297 to -0.0636)." in found.sentence


def test_a_gain_at_the_shared_rate_alone_is_a_learning_rate_effect(tmp_path):
    # B leads C at the rate that is A's best; at C's own best rate C leads B at its own.
    table = {("A", 0.01): [2.0, 2.1, 2.2], ("B", 0.01): [1.9, 2.0, 2.1], ("C", 0.01): [1.95, 2.05, 2.15]}
    table |= {("A", 0.1): [3.0] * 3, ("B", 0.1): [2.5] * 3, ("C", 0.1): [1.7, 1.8, 1.9]}
    found = panel(tmp_path, ends(table), lrs=(0.01, 0.1), variants=("A", "B", "C"))
    effect = verdict(found, claim(against="C"))
    assert effect.verdict == DID_NOT
    assert effect.panels[0].shared.verdict == HELD
    assert effect.panels[0].note.startswith("A learning-rate effect: it held at the shared rate")
    assert effect.panels[0].best.interval.mean == pytest.approx(0.2)
    one = panel(tmp_path, ends(table), "one", lrs=(0.01, 0.1), variants=("A", "B", "C"), seeds=(0,))
    assert "the sign is the paper's at the shared rate" in verdict(one, claim(against="C")).sentence


def test_an_interval_that_contains_zero_is_no_difference(tmp_path):
    table = {("A", 0.001): [2.0, 2.1, 2.2], ("A", 0.01): 3.0, ("B", 0.001): [1.9, 2.2, 2.1], ("B", 0.01): 3.0}
    found = verdict(panel(tmp_path, ends(table)), claim())
    assert found.verdict == NO_DIFFERENCE
    assert found.sentence.startswith("No difference detected: final loss of B minus that of A: ")
    assert found.panels[0].shared == found.panels[0].best  # the same rates


def test_one_seed_shows_a_sign_and_two_are_no_test_and_one_rate_is_named(tmp_path):
    table = {("A", 0.001): 2.0, ("A", 0.01): 3.0, ("B", 0.001): 1.5, ("B", 0.01): 3.0}
    found = panel(tmp_path, ends(table), "one", seeds=(0,))
    one, other = verdict(found, claim()), verdict(found, claim("above"))
    assert (one.verdict, other.verdict) == (SAME_SIGN, OTHER_SIGN)
    assert one.sentence == "Same sign as the paper, one seed: final loss of B minus that of A: -0.5000."
    assert verdict(found, claim("no_worse", bound=0.1)).sentence.startswith("Not tested at this scale: too few seeds; ")
    two = verdict(panel(tmp_path, ends(table), "two", seeds=(0, 1)), claim())
    assert two.sentence.startswith("Not tested at this scale: too few seeds; ")
    alone = verdict(panel(tmp_path, ends(table), "alone", lrs=(0.001,)), claim())
    assert alone.panels[0].note == "With one learning rate tried, this may be a learning-rate effect."


def test_a_variant_that_was_not_trained_is_no_test(tmp_path):
    table = {("A", 0.001): 2.0, ("B", 0.001): 1.5}
    found = panel(tmp_path, ends(table), lrs=(0.001,))
    assert verdict(found, claim(variant="C")).sentence == "Not tested at this scale: C was not trained."


def test_divergence_fails_the_variant_and_proves_nothing_about_the_other(tmp_path):
    table = {("A", 0.001): 2.0, ("A", 0.01): 3.0, ("B", 0.001): None, ("B", 0.01): None}
    found = panel(tmp_path, ends(table))
    assert verdict(found, claim()).verdict == DID_NOT
    assert verdict(found, claim()).sentence == "Did not hold: B did not stay finite in every seed."
    assert verdict(found, claim("e_rises", against="")).verdict == UNTESTED
    assert verdict(found, claim(variant="A", against="B")).verdict == UNTESTED
    assert verdict(found, claim("above")).verdict == UNTESTED


@pytest.mark.parametrize(
    ("kind", "gaps", "bound", "expected"),
    [
        ("above", [0.1, 0.1, 0.12], None, HELD),
        ("within", [0.0002, -0.0002, 0.0001], 0.003, HELD),
        ("within", [0.004, 0.004, 0.004], 0.003, DID_NOT),
        ("within", [-0.004, -0.004, -0.004], 0.003, DID_NOT),
        ("within", [0.001, -0.001, 0.008], 0.003, UNTESTED),
        ("within", [0.080, 0.088, 0.090], 0.003, DID_NOT),  # as wide an interval, but far beyond
        ("no_worse", [0.006, 0.006, 0.006], 0.005, DID_NOT),
        ("no_worse", [-0.7, -0.8, -0.9], 0.005, HELD),  # however wide the interval
        ("no_worse", [0.1, -0.1, 0.01], 0.005, UNTESTED),
    ],
)
def test_kinds_of_final_differences(tmp_path, kind, gaps, bound, expected):
    table = {("A", 0.001): [2.0, 2.1, 2.2], ("B", 0.001): [2.0 + 0.1 * i + gap for i, gap in enumerate(gaps)]}
    found = verdict(panel(tmp_path, ends(table), lrs=(0.001,)), claim(kind, bound=bound))
    assert found.verdict == expected
    assert ("the interval contains the bound of 0.00" in found.sentence) == (expected == UNTESTED)


def curves(gaps):
    """Return curves of A, and of B that lies by `gaps` above it after 0, 25, 50, 75 and 100 steps."""

    def curve(variant, _, seed):
        return [
            (step, 5.0 - step / 50 + 0.01 * seed + (gap if variant == "B" else 0.0))
            for step, gap in zip((0, 25, 50, 75, 100), gaps, strict=True)
        ]

    return curve


@pytest.mark.parametrize(
    ("kind", "gaps", "bound", "expected", "value"),
    [
        ("ahead", [9.0, -0.1, -0.1, -0.1, -0.1], 0.005, HELD, 0.0),
        ("ahead", [-9.0, -0.1, 0.1, -0.1, -0.1], 0.005, DID_NOT, 0.25),
        ("mean_apart", [9.0, 1e-4, -1e-4, 1e-4, -1e-4], 8.6e-4, HELD, 1e-4),
        ("mean_apart", [0.0, 1e-2, -1e-2, 1e-4, -1e-4], 8.6e-4, DID_NOT, 5.05e-3),
        ("most_apart", [9.0, 1e-4, -4e-3, 0.0, 0.0], 4.9e-3, HELD, 4e-3),
        ("most_apart", [0.0, 1e-4, -6e-3, 0.0, 0.0], 4.9e-3, DID_NOT, 6e-3),
        ("final_apart", [0.0, 1.0, 1.0, 1.0, -5e-4], 9.3e-4, HELD, 5e-4),
        ("final_apart", [0.0, 0.0, 0.0, 0.0, -1e-3], 9.3e-4, DID_NOT, 1e-3),
    ],
)
def test_kinds_of_whole_curves(tmp_path, kind, gaps, bound, expected, value):
    found = panel(tmp_path, lambda *_: 3.0, lrs=(0.001,), curve=curves(gaps))
    judged = verdict(found, claim(kind, bound=bound))
    assert judged.verdict == expected
    assert judged.panels[0].best.interval.mean == pytest.approx(value)


def test_the_lowest_loss_of_a_baseline_counts_where_it_is_not_the_last(tmp_path):
    def curve(variant, *_):
        return [(0, 5.0), (50, 1.0), (100, 2.0)] if variant == "A" else [(0, 5.0), (50, 3.0), (100, 1.5)]

    found = panel(tmp_path, lambda *_: 3.0, lrs=(0.001,), curve=curve)
    assert verdict(found, claim("below")).verdict == HELD
    assert verdict(found, claim("unreached")).verdict == DID_NOT


def test_overlap_is_tried_at_one_rate(tmp_path):
    table = {("A", 0.001): 2.0, ("A", 0.01): 3.0, ("B", 0.001): 2.0 + 1e-5, ("B", 0.01): 1.9}
    found = panel(tmp_path, ends(table))
    judged = verdict(found, claim("most_apart", bound=1e-3))
    assert judged.verdict == HELD
    assert judged.panels[0].shared == judged.panels[0].best
    assert judged.panels[0].best.interval.mean == pytest.approx(1e-5)
    # The same runs have no spread: one seed is a test, and each of several.
    one = panel(tmp_path, ends(table), "one", seeds=(0,))
    assert [verdict(one, claim("most_apart", bound=b)).verdict for b in (1e-3, 1e-6)] == [HELD, DID_NOT]
    apart = panel(tmp_path, ends(table | {("B", 0.001): [2.0, 2.0, 2.002]}), "apart")
    assert verdict(apart, claim("most_apart", bound=1e-3)).verdict == DID_NOT
    assert judged.panels[0].paper is None  # its losses say nothing about whole curves
    assert verdict(found, claim("most_apart", bound=1e-3, paper=4e-3)).panels[0].paper == 4e-3


def test_scales_are_read_from_the_runs(tmp_path):
    def stats(_, __, seed):
        return {"e/mean": 1.3 + 0.01 * seed, "l/mean": 0.25 * (0.6 + 0.01 * seed), "kappa/mean": 0.25 * 7.5 * 0.98}

    maps = {"B": sel.preset("paper", beta="auto").resolve(64).to_dict()}  # beta and l are a quarter of those at 1024
    found = panel(tmp_path, lambda *_: 2.0, lrs=(0.001,), maps=maps, stats=stats)
    assert verdict(found, claim("e_rises", against="")).sentence.startswith(
        "Held: change of the mean e of B: +0.3100 (99%: +0.2527 to +0.3673)"
    )
    assert verdict(found, claim("l_falls", against="")).verdict == HELD
    assert verdict(found, claim("m_stays", against="", bound=0.05)).verdict == HELD
    assert verdict(found, claim("m_stays", against="", bound=0.01)).verdict == DID_NOT


def test_an_early_change_is_most_of_it(tmp_path):
    def stats(*_):
        return {step: {"e/mean": e, "l/mean": l} for step, e, l in ((20, 1.2, 0.9), (40, 1.3, 0.7), (100, 1.4, 0.6))}

    maps = {"B": sel.preset("paper").resolve(1024).to_dict()}
    found = panel(tmp_path, lambda *_: 2.0, lrs=(0.001,), maps=maps, stats=stats)
    # After a quarter of 100 steps e is at 1.225 of 1.4, l at 0.85 of 0.6.
    early, late = (verdict(found, claim(f"{role}_early", against="")) for role in "el")
    assert (early.verdict, late.verdict) == (HELD, DID_NOT)
    assert early.panels[0].best.interval.mean == pytest.approx((0.225 - 0.175) / 0.4)
    assert late.panels[0].best.interval.mean == pytest.approx((0.15 - 0.25) / 0.4)


def test_tails_are_those_of_the_curved_matrices(tmp_path):
    found = panel(tmp_path, lambda *_: 2.0, lrs=(0.001,), seeds=(0,))
    assert verdict(found, claim("tails")).sentence.endswith("the runs of B do not have it.")
    for variant, share in (("A", 1.0), ("B", 0.25)):
        # Of plus and minus one with a share p, the others zero, the excess kurtosis is 1/p - 3, whatever the unit.
        model = Transformer(ModelConfig(width=16, depth=2, heads=2, context=8))
        for number, parameter in enumerate(model.parameters()):
            with torch.no_grad():
                values = torch.arange(parameter.numel()) % round(2 / share)
                values = torch.where(values < 2, 2.0 * values - 1.0, 0.0).reshape(parameter.shape)
                parameter.copy_((number + 1) * values if parameter.dim() == 2 else torch.rand(parameter.shape))
        model.embedding.weight.data[0] = 1e6  # no curved matrix
        folder = found.folder / "runs" / f"{variant}-lr0.001-seed0"
        folder.mkdir(parents=True)
        save_model(model, folder / "model.safetensors")
    judged = verdict(found, claim("tails"))
    assert judged.verdict == SAME_SIGN
    assert judged.panels[0].best.interval.mean == pytest.approx(3.0)


def test_the_better_variant_of_each_panel_counts(tmp_path):
    table = {("A", 0.1): 2.0, ("B", 0.1): 1.9, ("C", 0.1): 2.1}
    said = claim("below", variant="C", alternative="B")
    found = verdict(panel(tmp_path, ends(table), lrs=(0.1,), variants=("A", "B", "C")), said)
    assert (found.verdict, found.what) == (HELD, "final loss of the better of C and B minus that of A")
    assert found.panels[0].note.startswith("The better variant is B. ")
    assert found.panels[0].paper == pytest.approx(-0.1)
    alone = panel(tmp_path, ends(table), "alone", lrs=(0.1,))
    assert verdict(alone, said).sentence == "Not tested at this scale: C was not trained."
    assert judge(said, "t", [unfinished("l", "1x1")], PAPER).verdict == UNTESTED


def test_scales_that_no_run_tells_are_no_test(tmp_path):
    found = panel(tmp_path, lambda *_: 2.0, lrs=(0.001,), maps={"B": {"beta": "auto"}})
    assert verdict(found, claim("e_rises", against="")).sentence.endswith("the runs of B do not have it.")
    silent = panel(tmp_path, lambda *_: 2.0, "silent", lrs=(0.001,), stats=lambda *_: {})
    assert verdict(silent, claim("e_rises", against="")).sentence.endswith("the runs of B do not have it.")


def two_sizes(tmp_path, gains, paper=("1x1", "9x9")):
    return [
        panel(tmp_path, ends({("A", 0.1): 2.0, ("B", 0.1): [2.0 - g for g in gain]}), name, size, lrs=(0.1,))
        for name, size, gain in zip(("s", "m"), paper, gains, strict=True)
    ]


def test_growth_of_a_gain_is_paired_over_panels(tmp_path):
    said = claim("grows", panels=("1x1", "9x9"))
    for name, second, expected, word in (
        ("grown", [0.21, 0.23, 0.21], HELD, "-0.1167"),
        ("mixed", [0.1, 0.0, 0.3], NO_DIFFERENCE, "-0.0333"),
        ("shrunk", [0.05, 0.05, 0.05], DID_NOT, "+0.0500"),
    ):
        panels = two_sizes(tmp_path / name, ([0.1, 0.1, 0.1], second))
        found = judge(said, "t", panels, PAPER)
        assert found.verdict == expected
        assert [panel.panel for panel in found.panels] == ["s to m"]
        assert f"{word} (99%: " in found.sentence
        alone = judge(said, "t", [panels[0], unfinished("m", "9x9")], PAPER)
        assert alone.sentence == "Not tested at this scale: the panel has not ended."


def test_a_smaller_loss_is_no_grown_gain(tmp_path):
    panels = two_sizes(tmp_path, ([-0.2, -0.2, -0.2], [-0.1, -0.1, -0.1]))
    found = judge(claim("grows", panels=("1x1", "9x9")), "t", panels, PAPER)
    assert found.sentence.startswith("Did not hold: there is no gain at m; ")


def test_growth_at_one_seed_is_a_sign(tmp_path):
    said, words = claim("grows", panels=("1x1", "9x9")), {(0.1, 0.2): SAME_SIGN, (0.2, 0.1): OTHER_SIGN}
    words[-0.2, -0.1] = OTHER_SIGN  # a smaller loss is no gain
    for (first, last), word in words.items():
        panels = [
            panel(
                tmp_path / f"{first}",
                ends({("A", 0.1): 2.0, ("B", 0.1): 2.0 - gain}),
                size,
                size,
                lrs=(0.1,),
                seeds=(3,),
            )
            for size, gain in (("1x1", first), ("9x9", last))
        ]
        assert judge(said, "t", panels, PAPER).verdict == word


def test_growth_is_not_told_from_other_seeds_or_runs_that_broke_down(tmp_path):
    said = claim("grows", panels=("1x1", "9x9"))
    first = panel(tmp_path, lambda variant, *_: 2.0 - 0.1 * (variant == "B"), "s", "1x1", lrs=(0.1,))
    other = panel(tmp_path, lambda variant, *_: 2.0 - 0.2 * (variant == "B"), "m", "9x9", lrs=(0.1,), seeds=(0, 1, 3))
    broken = panel(tmp_path, lambda variant, *_: None if variant == "B" else 2.0, "l", "9x9", lrs=(0.1,))
    assert judge(said, "t", [first, other], PAPER).sentence == "Not tested at this scale: the seeds differ."
    assert "B did not stay finite" in judge(said, "t", [first, broken], PAPER).sentence


def test_several_panels_are_counted(tmp_path):
    panels = two_sizes(tmp_path, ([0.1, 0.1, 0.1], [-0.1, -0.1, -0.1]))
    found = judge(claim(), "t", [*panels, unfinished("l", "7x7")], PAPER)
    assert found.verdict == DID_NOT
    counts = "Held: 1 of 3 panels; did not hold: 1 of 3 panels; not tested at this scale: 1 of 3 panels."
    assert found.sentence == counts
    assert judge(claim(panels=("9x9",)), "t", [*panels, unfinished("l", "7x7")], PAPER).verdict == DID_NOT
    assert judge(claim(panels=("1x1",)), "t", [*panels, unfinished("l", "7x7")], PAPER).verdict == HELD
    waiting = judge(claim(panels=("1x1", "7x7")), "t", [*panels, unfinished("l", "7x7")], PAPER)
    assert [each.best.verdict for each in waiting.panels] == [HELD, UNTESTED]
    none = judge(claim(panels=("7x7",)), "t", panels, PAPER)
    assert none.sentence == "Not tested at this scale: the table has no such panels."
