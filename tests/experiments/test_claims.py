import pytest

import symexplin as sel
from symexplin.experiments.claims import VERDICTS, Claim, PanelResult, judge
from symexplin.lab.compare.comparison import Comparison, Run
from table_folders import panel_folder

DID_NOT, DISAGREES, NO_DIFFERENCE, NOT_RESOLVED, HELD, AGREES, UNTESTED = VERDICTS
LOSSES = {"1x1": {"A": 2.0, "B": 1.9}, "9x9": {"A": 1.5, "B": 1.2}}  # the paper's


def claim(test="below", variant="B", against="A", **more):
    return Claim("B is better.", "Table 1", variant, test, against, **more)


def panel(folder, loss, name="p", stands_for="1x1", variants=("A", "B"), lrs=(0.001,), **more):
    """Return a panel of losses by variant, or by (variant, lr): a number, or one for each seed."""

    def one(variant, lr, seed):
        value = loss[variant, lr] if (variant, lr) in loss else loss[variant]
        return value[seed] if isinstance(value, list) else value

    return PanelResult(name, stands_for, panel_folder(folder / name, list(variants), one, lrs=lrs, judged=True, **more))


def unfinished(name, stands_for):
    return PanelResult(name, stands_for, None)


def verdict(found, said):
    return judge(said, [found], LOSSES, "mini")


def test_a_claim_is_judged_at_own_best_rates_and_of_runs_that_should_be_the_same_at_the_shared_one(tmp_path):
    # Own best rates: 0.01 for A, 0.001 for B.
    loss = {("A", 0.001): 2.5, ("A", 0.01): [2.0, 2.1, 2.2], ("B", 0.001): [1.9, 2.01, 2.1], ("B", 0.01): 2.4}
    found = verdict(panel(tmp_path, loss, lrs=(0.001, 0.01)), claim())
    only = found.panels[0]
    assert found.verdict == only.verdict == HELD
    assert only.interval.values == pytest.approx((-0.1, -0.09, -0.1))
    assert only.sentence == (
        "p: held: final loss of B minus that of A: -0.0967 (99%: -0.1297 to -0.0636); the paper has -0.1."
    )
    # The seed that chose the rates does not count.
    loss = {"A": [2.0, *A], "B": [1.9, *(loss + 0.1 for loss in A)]}
    only = verdict(
        panel(tmp_path, loss, "c", lrs=(0.001, 0.01), seeds=range(4), confirm_seeds=(1, 2, 3)), claim()
    ).panels[0]
    assert (only.verdict, only.interval.values) == (DID_NOT, pytest.approx((0.1, 0.1, 0.1)))
    loss = {("A", 0.001): 2.0, ("A", 0.01): 3.0, ("B", 0.001): 2.0 + 1e-5, ("B", 0.01): 1.9}
    same = claim("same", measure="most_apart", bound=1e-3)
    only = verdict(panel(tmp_path, loss, "q", lrs=(0.001, 0.01)), same).panels[0]
    assert (only.verdict, only.interval.mean) == (HELD, pytest.approx(1e-5, rel=1e-2))


A = [2.0, 2.1, 2.2]


@pytest.mark.parametrize(
    ("test", "gaps", "bound", "expected"),
    [
        ("below", [-0.1, -0.1, -0.12], None, HELD),
        ("below", [0.1, 0.1, 0.12], None, DID_NOT),
        ("below", [-0.1, 0.1, -0.1], None, NO_DIFFERENCE),
        ("below", [0.0, 0.0, 0.0], None, NO_DIFFERENCE),
        ("below", [-0.1, 0.0, -0.2], None, NO_DIFFERENCE),
        ("above", [-0.1, -0.2, -0.3], None, NOT_RESOLVED),
        ("above", [0.1, 0.1, 0.12], None, HELD),
        ("above", [-0.1, -0.1, -0.12], None, DID_NOT),
        ("within", [0.0002, -0.0002, 0.0001], 0.003, HELD),
        ("within", [-0.004, -0.004, -0.004], 0.003, DID_NOT),
        ("within", [0.001, -0.001, 0.008], 0.003, UNTESTED),
        ("within", [0.080, 0.088, 0.090], 0.003, DID_NOT),  # as wide an interval, but far beyond
        ("at_most", [0.006, 0.006, 0.006], 0.005, DID_NOT),
        ("at_most", [-0.7, -0.8, -0.9], 0.005, HELD),  # however wide the interval
        ("at_most", [0.1, -0.1, 0.01], 0.005, UNTESTED),
        # One seed is judged by itself, two are too few.
        ("below", [-0.5], None, AGREES),
        ("below", [0.5], None, DISAGREES),
        ("above", [0.5], None, AGREES),
        ("within", [-0.002], 0.003, AGREES),
        ("within", [-0.004], 0.003, DISAGREES),
        ("at_most", [0.05], 0.1, AGREES),
        ("at_most", [0.2], 0.1, DISAGREES),
        ("below", [-0.5, -0.5], None, UNTESTED),
        ("within", [0.0, 0.0], 0.003, UNTESTED),
        # Runs that should be the same are tested in every seed, however few.
        ("same", [1e-4], 1e-3, HELD),
        ("same", [1e-4, 1e-4, 2e-3], 1e-3, DID_NOT),
    ],
)
def test_the_rule(tmp_path, test, gaps, bound, expected):
    loss = {"A": A, "B": [a + gap for a, gap in zip(A, gaps, strict=False)]}
    said = claim(test, bound=bound, measure="final_apart" if test == "same" else "final")
    found = verdict(panel(tmp_path, loss, seeds=range(len(gaps))), said)
    assert found.verdict == expected
    if expected == UNTESTED:
        reason = "too few seeds; " if len(gaps) < 3 else f"the interval contains the bound of {bound:g}; "
        assert found.panels[0].text.startswith(reason)


def curves(gaps):
    """Return curves of A, which is lowest at 75, and of B, by `gaps` above it after 0, 25, 50, 75 and 100 steps."""

    def curve(variant, _, seed):
        return [
            (step, 5.0 - (step / 50 if step < 100 else 1.25) + 0.01 * seed + (gap if variant == "B" else 0.0))
            for step, gap in zip((0, 25, 50, 75, 100), gaps, strict=True)
        ]

    return curve


@pytest.mark.parametrize(
    ("measure", "gaps", "value"),
    [
        ("behind", [9.0, -0.1, -0.1, -0.1, -0.1], 0.0),
        ("behind", [-9.0, -0.1, 0.1, -0.1, 0.0], 0.5),
        ("mean_apart", [9.0, 1e-4, -1e-4, 1e-2, -1e-4], (1e-2 + 3e-4) / 4),
        ("most_apart", [9.0, 1e-4, -4e-3, 0.0, 0.0], 4e-3),
        ("final_apart", [0.0, 1.0, 1.0, 1.0, -5e-4], 5e-4),
        ("final", [0.0, 1.0, 1.0, 1.0, -5e-4], -5e-4),
        ("lowest", [0.0, 1.0, 1.0, -1.0, -5e-4], 0.25 - 5e-4),
        ("steps", [0.0, 0.0, -0.5, -0.5, -0.5], 43.75 / 62.5),  # to 3.75: A has 4.0 at 50, B 4.5 at 25, 3.5 there
        ("steps", [0.0, 1.0, 1.0, 1.0, 0.25], 1.0),
        ("steps", [0.0, 1.0, 1.0, 1.0, -0.5], 1.0),  # B is later than A
    ],
)
def test_measures_of_curves(tmp_path, measure, gaps, value):
    found = panel(tmp_path, {"A": 3.0, "B": 3.0}, curve=curves(gaps))
    (judged,) = verdict(found, claim("same", measure=measure, bound=1.0)).panels
    assert judged.interval.mean == pytest.approx(value, abs=1e-9)
    assert (judged.paper is None) == (measure != "final")  # its losses say nothing about whole curves


def test_steps_to_a_loss_and_time():
    """A falls from 5.0 by 0.02 a step, B by 0.025; a token takes B a tenth longer."""

    def found(measure, fall, pace):
        falls, paces = {"A": 0.02, "B": fall}, {"A": 1100.0, "B": pace}
        curves = {name: tuple((step, 5.0 - step * falls[name]) for step in (0, 30, 60, 90, 120)) for name in falls}
        runs = tuple(Run(name, 0.001, 0, curve, tokens_per_second=paces[name]) for name, curve in curves.items())
        ended = PanelResult("p", "1x1", Comparison(runs, "A"))
        return verdict(ended, claim("within", measure=measure, bound=30.0)).panels[0]

    assert found("steps_to_3", 0.025, 1000.0).interval.mean == pytest.approx(2.0 / 0.025 - 2.0 / 0.02)
    assert found("slower", 0.025, 1000.0).interval.mean == pytest.approx(0.1)
    nothing = ("p", None, UNTESTED, "the runs of B and A do not have it", None)
    assert found("steps_to_3", 0.01, None) == found("slower", 0.01, None) == nothing


def test_what_one_scale_alone_can_test_is_no_test_elsewhere(tmp_path):
    found = panel(tmp_path, {"A": 2.0, "B": 1.9})
    said = claim(scale="paper")
    assert judge(said, [found], LOSSES, "paper").verdict == HELD
    (only,) = judge(said, [found], LOSSES, "mini").panels
    assert only == ("p", pytest.approx(-0.1), UNTESTED, "only scale paper can test it", None)


def test_scales_are_read_from_the_runs(tmp_path):
    def stats(_, __, seed):
        return {
            "e/mean": 1.3 + 0.01 * seed,
            "l/mean": 0.25 * (0.6 + 0.01 * seed),
            "kappa/mean": 0.25 * 7.5 * (0.97 + 0.01 * seed),
        }

    maps = {"B": sel.preset("paper").resolve(64).to_dict()}  # beta and l are a quarter of those at 1024
    found = panel(tmp_path, {"A": 2.0, "B": 2.0}, maps=maps, stats=stats)
    for measure, mean in (("e_change", 0.31), ("l_change", -0.39), ("m_change", -0.02)):
        judged = verdict(found, claim("within", against="", measure=measure, bound=0.5, paper=0.38)).panels[0]
        assert judged.interval.mean == pytest.approx(mean)
        assert (judged.verdict, judged.paper) == (HELD, 0.38)


def test_what_has_no_numbers_is_no_test_but_for_a_variant_that_diverges_alone(tmp_path):
    found = panel(tmp_path, {"A": 2.0, "B": None, "C": 1.9}, variants=("A", "B", "C"))
    of_scale = {"against": "", "measure": "e_change"}
    for ended, said, expected, reason in (
        (found, claim(), DID_NOT, "B diverged in at least one seed"),
        (found, claim(variant="A", against="B"), UNTESTED, "B diverged in at least one seed"),
        (found, claim("above"), UNTESTED, "B diverged in at least one seed"),
        (found, claim("above", **of_scale), UNTESTED, "B diverged in at least one seed"),
        (found, claim("above", variant="C", **of_scale), UNTESTED, "the runs of C do not have it"),
    ):
        only = verdict(ended, said).panels[0]
        assert (only.verdict, only.text, only.interval) == (expected, reason, None)
    # What did not run has no verdict.
    assert verdict(found, claim(variant="D")).panels == verdict(unfinished("p", "1x1"), claim()).panels == []
    for seeds, expected in (((0,), DISAGREES), ((0, 1), UNTESTED)):
        few = panel(tmp_path, {"A": 2.0, "B": None}, f"{len(seeds)}", seeds=seeds)
        assert verdict(few, claim()).verdict == expected


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        ([0.1, 0.1, 0.1], [0.21, 0.23, 0.21], HELD),
        ([0.1, 0.1, 0.1], [0.1, 0.0, 0.3], NO_DIFFERENCE),
        ([0.1, 0.1, 0.1], [0.05, 0.05, 0.051], DID_NOT),
        ([-0.2, -0.2, -0.2], [-0.1, -0.1, -0.101], DID_NOT),  # a smaller loss is no gain
        ([0.1], [0.2], AGREES),
        ([-0.2], [-0.1], DISAGREES),
        ([0.1, 0.1, 0.1], [0.2], UNTESTED),  # of other seeds
    ],
)
def test_growth_of_a_gain_is_paired_over_panels(tmp_path, first, last, expected):
    small, large = (
        panel(tmp_path, {"A": 2.0, "B": [2.0 - gain for gain in gains]}, name, paper, seeds=range(len(gains)))
        for name, paper, gains in (("small", "1x1", first), ("large", "9x9", last))
    )
    said = claim(panels=("9x9",), since="1x1")
    found = judge(said, [small, large], LOSSES, "mini")
    assert found.verdict == expected
    (only,) = found.panels
    assert (only.panel, only.paper) == ("small to large", pytest.approx(-0.2))
    if len(first) == len(last):
        assert only.interval.values == pytest.approx([a - b for a, b in zip(first, last, strict=True)])
    assert judge(said, [small, unfinished("large", "9x9")], LOSSES, "mini").verdict == UNTESTED
    assert judge(said, [large], LOSSES, "mini").panels == []


def test_the_worst_panel_counts_and_what_tests_nothing_does_not(tmp_path):
    gain, loss = (
        panel(tmp_path, {"A": 2.0, "B": end}, name, paper)
        for name, paper, end in (("s", "1x1", 1.9), ("m", "9x9", 2.1))
    )
    panels = [gain, loss, unfinished("l", "7x7")]
    assert [each.verdict for each in judge(claim(), panels, LOSSES, "mini").panels] == [HELD, DID_NOT]
    for named, expected in (((), DID_NOT), (("9x9",), DID_NOT), (("1x1", "7x7"), HELD), (("5x5",), UNTESTED)):
        assert judge(claim(panels=named), panels, LOSSES, "mini").verdict == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"test": "under"}, "test must be one of 'below'"),
        ({"test": "within"}, "bound must be given"),
        ({"scale": "papr"}, "scale must be one of '', 'paper'"),
        ({"bound": 0.1}, "bound must be given"),
        ({"measure": "kurtosis"}, "measure must be one of 'final'"),
        ({"against": ""}, "against must be given with measure 'final'"),
    ],
)
def test_a_wrong_claim_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        claim(**changes)
