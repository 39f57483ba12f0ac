import pytest

from symexplin.experiments.claims import KINDS
from symexplin.experiments.paper import load_paper
from symexplin.experiments.tables import load_table, names

PAPER = load_paper()
LOSSES = PAPER.losses
NUMBERS = {(n.table, n.name, n.panel, n.variant): n.value for n in PAPER.numbers}


def of_panels(name):
    return {key[2]: (key[3], value) for key, value in NUMBERS.items() if key[:2] == ("main_grid", name)}


def test_names_are_those_of_the_tables():
    tables = {table for table, _, _ in LOSSES} | {table for claim in PAPER.claims for table in claim.tables}
    assert tables <= names().keys()
    for name in tables:
        table = load_table(name, "paper")
        panels = {panel.name for panel in table.panels}
        for other, panel, variant in LOSSES:
            assert other != name or (panel in panels and variant in table.labels), (name, panel, variant)
        for number in PAPER.numbers_of(name):
            assert number.variant in {*table.labels, ""}, number
            assert number.panel in {*panels, ""}, number
        for claim in PAPER.claims_of(name):
            assert {claim.variant, claim.against} <= {*table.labels, ""}, (name, claim)
            assert set(claim.panels) <= panels, claim


def test_every_claim_is_what_the_papers_own_losses_say():
    tried = 0
    for claim in PAPER.claims:
        for table in claim.tables:
            panels = {panel for other, panel, _ in LOSSES if other == table}
            for panel in panels & set(claim.panels or panels):
                ends = [LOSSES.get((table, panel, variant)) for variant in (claim.variant, claim.against)]
                if None in ends or claim.kind not in ("below", "above", "within", "unreached"):
                    continue
                difference = ends[0] - ends[1]
                assert claim.paper is None or claim.paper == pytest.approx(difference, abs=1.1e-4), claim
                told = {"above": difference > 0, "within": abs(difference) <= (claim.bound or 0)}
                assert told.get(claim.kind, difference < 0), (claim, table, panel)
                tried += 1
    assert tried > 50


def test_gains_grow_where_a_claim_says_so():
    growing = [claim for claim in PAPER.claims if claim.kind == "grows"]
    assert len(growing) == 2
    for claim in growing:
        first, last = (
            LOSSES[claim.tables[0], panel, claim.variant] - LOSSES[claim.tables[0], panel, claim.against]
            for panel in claim.panels
        )
        assert last < first < 0


def test_the_main_table_has_the_better_variant_of_each_size():
    deltas, speedups = of_panels("delta"), of_panels("speedup")
    assert len(deltas) == len(speedups) == len(of_panels("beta")) == 9
    for panel, (variant, delta) in deltas.items():
        assert LOSSES["main_grid", panel, variant] == min(
            LOSSES["main_grid", panel, name] for name in ("mismatch", "mismatch+offset")
        )
        # Rounded from losses that are themselves rounded.
        assert delta == pytest.approx(
            LOSSES["main_grid", panel, variant] - LOSSES["main_grid", panel, "AdamW"], abs=0.0011
        )
        assert speedups[panel][0] == of_panels("beta")[panel][0] == variant
    assert min(s for _, s in speedups.values()) == 1.32  # as the abstract says
    assert max(s for _, s in speedups.values()) == 1.49
    assert min(deltas.values(), key=lambda delta: delta[1]) == ("mismatch", -0.052)


@pytest.mark.parametrize("panel", ["1024x12", "3072x36"])
def test_timings_agree_with_the_overhead_and_the_speedup(panel):
    def value(name):
        return NUMBERS["profiling", name, panel, ""]

    parts = ("forward", "backward", "optimizer")
    baseline, curved = (sum(value(f"{part}_ms_{which}") for part in parts) for which in ("baseline", "sel"))
    assert 100 * (curved / baseline - 1) == pytest.approx(value("overhead"), abs=0.1)
    steps = of_panels("speedup")[panel][1]
    assert steps / (1 + value("overhead") / 100) == pytest.approx(value("wall_clock_speedup"), abs=0.01)


def test_every_entry_is_there_once_and_every_claim_has_what_its_kind_needs():
    assert len(NUMBERS) == len(PAPER.numbers)
    tried = [(t, x.variant, x.against, x.kind, *x.panels) for x in PAPER.claims for t in x.tables]
    assert len(set(tried)) == len(tried)
    for claim in PAPER.claims:
        needs_bound = KINDS[claim.kind].test in ("within", "no_worse", "same")
        assert needs_bound == (claim.bound is not None), claim
        assert claim.kind != "grows" or len(claim.panels) == 2, claim
