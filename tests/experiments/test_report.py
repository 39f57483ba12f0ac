import base64
import csv
import json
import re

import pytest
from matplotlib.figure import Figure

from pages import Page
from symexplin.config import Scale, SELConfig
from symexplin.experiments import figures
from symexplin.experiments.report import report_table
from symexplin.experiments.tables import load_table
from table_folders import table_folder


class TablePage(Page):
    VOID = Page.VOID | {"img"}


BASE = {"AdamW": 2.0, "full": 1.9, "fixed_curvature": 1.85, "fixed_pathways": 1.99, "frozen": 2.05}


def loss(variant, lr, seed):
    """AdamW, frozen-congruent and frozen are best at 0.01, the others at 0.001, and worse by 0.3 elsewhere."""
    if variant == "fixed_pathways" and lr == 0.01:
        return None
    best = 0.01 if variant in ("AdamW", "frozen", "frozen-congruent") else 0.001
    noise = (0.0, 0.002, -0.001)[seed] if variant != "AdamW" else 0.0
    return BASE.get(variant, 2.0001) + 0.1 * seed + noise + (0.3 if lr != best else 0.0)


@pytest.fixture
def frozen(tmp_path):
    return table_folder(tmp_path / "frozen-mini", "frozen", loss)


def row_of(page, start):
    return next(row for row in page.rows if row and row[0] == start)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_page_and_the_files_of_a_finished_table(frozen):
    page = TablePage(report_table(frozen))
    assert page.html.startswith("<!doctype html>")
    assert ["processor", "A <fast> one"] in page.rows
    assert any(row[0] == "map.beta" for row in page.rows)
    assert "<fast>" not in page.html
    assert page.titles[:2] == ["The paper's claims", "128x4, for the paper's 1024x12"]
    assert (
        "Claims tried at scale mini, far below the paper's: 8; 3 held; 3 did not hold; 1 no difference detected; "
        "1 not tested at this scale."
    ) in page.text
    row = row_of(page, "Fixed curvaturefixed_curvature")
    assert row[1:4] == ["0.001*", "1.9503 ± 0.0995", "-0.1497 ± 0.0088better"]
    assert row[5:7] == ["2.2503 ± 0.0995", "+0.1503 ± 0.0088worse"]
    assert row[7:] == ["2.9177", "-0.0345", "–", "-0.1152"]
    baseline = row_of(page, "AdamW")
    assert baseline[1:] == ["0.01*", "2.1000 ± 0.1000", "–", "–", "2.1000 ± 0.1000", "–", "2.9522", "–", "–", "–"]


def test_verdicts_stand_on_the_page_gains_and_losses_alike(frozen):
    lines = []
    page = TablePage(report_table(frozen, lines.append))
    (text,) = lines
    assert "128x4: Fixed curvature ends below AdamW (-0.1497" in text
    assert "Did not hold: final loss of frozen minus that of AdamW: +0.0503" in text
    found = {row["claim"]: row for row in rows_of(frozen / "claims.csv")}
    assert {row["verdict"] for row in found.values()} == {
        "held",
        "did not hold",
        "no difference detected",
        "not tested at this scale",
    }
    for text, row in found.items():
        told = page.text.partition(text)[2]
        assert told.split(".\n")[1].startswith(f"{row['verdict'].capitalize()}: {row['text']}")
    frozen_row = next(row for row in found.values() if (row["variant"], row["against"]) == ("frozen", "AdamW"))
    assert frozen_row["verdict"] == "did not hold"
    assert float(frozen_row["measured"]) == pytest.approx(0.0503, abs=1e-4)
    assert float(frozen_row["paper"]) == pytest.approx(2.9341 - 2.9522)


def test_numbers_of_the_csv_are_the_comparisons(frozen):
    report_table(frozen)
    found = json.loads((frozen / "panels/128x4/comparison.json").read_text())["comparison"]
    rows = rows_of(frozen / "table.csv")
    assert len(rows) == 2 * len(found["best"])
    for kind, side in (("own best rate", "best"), ("shared rate", "shared")):
        chosen = [row for row in rows if row["compared_at"] == kind]
        for row, wanted in zip(chosen, found[side], strict=True):
            assert (row["panel"], row["stands_for"], row["variant"]) == ("128x4", "1024x12", wanted["variant"])
            for name in ("loss", "delta", "speedup"):
                expected = wanted[name]
                assert (row[name] == "") if expected is None else float(row[name]) == pytest.approx(expected, abs=1e-6)
    full = next(row for row in rows if row["variant"] == "full")
    assert float(full["paper_delta"]) == pytest.approx(2.9295 - 2.9522)


def test_a_gain_at_the_shared_rate_alone_is_told(tmp_path):
    def equal(variant, lr, seed):
        lower = 0.0 if variant == "AdamW" else {0.01: -0.1, 0.001: (-0.5, 0.11, -0.15)[seed]}[lr]
        return (2.5 if (variant, lr) == ("AdamW", 0.001) else 2.0) + lower

    page = TablePage(report_table(table_folder(tmp_path / "b", "frozen", equal)))
    row = row_of(page, "Full SELfull")
    assert (row[3].endswith("no difference detected"), row[6]) == (True, "-0.1000 ± 0.0000better")
    assert "A learning-rate effect: it held at the shared rate" in page.text
    assert "; no difference detected) at its own best" in page.text
    assert "AdamW (-0.1000 ± 0.0000; better) at the shared rate: a gain that the learning rate explains." in page.text


def test_an_unfinished_table_says_what_is_missing(tmp_path):
    out = table_folder(
        tmp_path / "grid",
        "main_grid",
        lambda variant, *_: 2.0 if variant == "AdamW" else 1.9,
        missing=("64x4", "128x4"),
    )
    page = TablePage(report_table(out))
    assert "Unfinished: 2 of 4 panels to go (64x4, 128x4)." in page.text
    assert "Did not hold" not in page.text.partition("Mismatch without offset ends below AdamW.")[2][:400]
    assert "Held: 2 of 4 panels; not tested at this scale: 2 of 4 panels." in page.text
    # What the rows of the variants show is not said again among the other numbers.
    assert "beta of the better variant" in page.text
    assert "as printed" not in page.text
    assert "In each panel: final loss of mismatch minus that of AdamW." in page.text
    claims = rows_of(out / "claims.csv")
    waiting = [row for row in claims if row["panel"] == "64x4"]
    assert {row["verdict"] for row in waiting} == {"not tested at this scale"}
    assert {row["text"] for row in waiting} == {"the panel has not ended"}
    growth = {row["panel"]: row["verdict"] for row in claims if row["kind"] == "grows"}
    assert growth == {"64x2 to 64x4": "not tested at this scale", "64x2 to 128x2": "no difference detected"}


def test_the_page_opens_without_network_and_shows_figures(tmp_path, monkeypatch):
    drawn = []

    def draw(name, sources):
        drawn.append((name, [source.name for source in sources]))
        figure = Figure()
        figure.add_subplot().plot([0, 1], [0, 1])
        if name == "loss_curves":
            raise ValueError("sources must be others")
        return figure

    monkeypatch.setattr(figures, "draw", draw)
    out = table_folder(
        tmp_path / "f", "frozen", loss, figures=("mechanism_ablations", "loss_curves", "no_such", "mismatched_start")
    )
    page = TablePage(report_table(out))
    assert drawn == [("mechanism_ablations", ["128x4"]), ("loss_curves", ["128x4"]), ("mismatched_start", [])]
    (weaker,) = (row for row in page.rows if row[0].startswith("by how much negative weights start weaker"))
    assert weaker[1:] == ["–", "20 to 25", "%"]
    assert "no_such: not drawn, figures must be one of" in page.text
    images = [value for tag, name, value in page.attributes if (tag, name) == ("img", "src")]
    kind, _, data = images[0].partition(",")
    assert (len(images), kind) == (2, "data:image/svg+xml;base64")
    assert base64.b64decode(data) == (out / "figures/mechanism_ablations.svg").read_bytes()
    assert (out / "figures/mechanism_ablations.png").stat().st_size > 0
    assert "not drawn, sources must be others." in page.text
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert "panels/128x4/report.html" in links
    for link in links:
        assert (out / link).exists(), link
    assert not re.search(r"(?:src|href)=.https?:", page.html)
    assert "<script" not in page.html


def test_the_papers_number_of_a_claim_stands_beside_the_measured_one(tmp_path):
    def stats(*_):
        return {"e/mean": 1.2, "l/mean": 0.7, "kappa/mean": 7.0 * 0.99}

    maps = {"annealed": SELConfig(beta=7.0, l=Scale(start=1)).resolve(1024).to_dict()}
    out = table_folder(
        tmp_path / "a", "lr_annealing", lambda variant, *_: 2.0 - 0.01 * (variant == "annealed"), stats=stats, maps=maps
    )
    text = TablePage(report_table(out)).text
    told = text.partition("The exponential scale e rises above 1.")[2]
    assert "change of the mean e of annealed: +0.2000 (99%: +0.2000 to +0.2000)" in told
    assert "The paper's number: +0.38." in told.partition("The linear scale")[0]
    numbers = {
        row["kind"]: (float(row["measured"]), float(row["paper"]))
        for row in rows_of(out / "claims.csv")
        if row["paper"]
    }
    assert numbers["l_falls"] == pytest.approx((-0.3, -0.46))
    assert numbers["m_stays"] == pytest.approx((-0.01, -0.02))


def test_an_empty_table_tests_nothing_and_one_seed_shows_signs(tmp_path):
    missing = [panel.name for panel in load_table("frozen", "mini").panels]
    empty = table_folder(tmp_path / "empty", "frozen", loss, missing=missing)
    assert "Unfinished: 1 of 1 panels to go" in TablePage(report_table(empty)).text
    assert (empty / "table.csv").read_text() == ""
    page = TablePage(report_table(table_folder(tmp_path / "one", "frozen", loss, seeds=(0,), lrs=(0.01,))))
    assert "1 same sign as the paper, one seed; 5 other sign than the paper, one seed; 2 not tested" in page.text
    assert row_of(page, "Full SELfull")[3].endswith("+0.2000other sign than the paper, one seed")
    assert "Full SEL ends above AdamW (+0.2000; other sign than the paper, one seed) at its own best" in page.text
    assert "With one learning rate tried" in page.text
    page = TablePage(report_table(table_folder(tmp_path / "two", "frozen", loss, seeds=(0, 1))))
    assert row_of(page, "Full SELfull")[3].endswith("too few seeds")
    widths = table_folder(
        tmp_path / "widths", "widths", lambda variant, *_: 2.0 + 0.1 * (variant == "number"), seeds=(0,)
    )
    row = row_of(TablePage(report_table(widths)), "One number a matrixnumber")
    assert row[3] == "+0.1000too few seeds"  # no sign of the paper's


def test_beyond_the_paper_there_are_no_claims(tmp_path):
    widths = table_folder(tmp_path / "widths", "widths", lambda variant, *_: 2.0 + 0.1 * (variant == "number"))
    page = TablePage(report_table(widths))
    assert "The paper has no claim that this table tests." in page.text
    assert row_of(page, "One number a matrixnumber")[3] == "+0.1000 ± 0.0000worse"
