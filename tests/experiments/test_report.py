import re

import pytest

from pages import Page
from symexplin.experiments.claims import judge
from symexplin.experiments.report import report_table
from symexplin.experiments.tables import load_table, read_table
from table_folders import table_folder

BASE = {"AdamW": 2.0, "full": 1.9, "fixed_curvature": 1.85, "fixed_pathways": 1.99, "frozen": 2.05}


def loss(variant, lr, seed):
    """AdamW, frozen-congruent and frozen are best at 0.01, the others at 0.001, and worse by 0.3 elsewhere."""
    if variant == "fixed_pathways" and lr == 0.01:
        return None
    best = 0.01 if variant in ("AdamW", "frozen", "frozen-congruent") else 0.001
    noise = (0.0, 0.002, -0.001)[seed] * (1 + 0.01 * len(variant)) if variant != "AdamW" else 0.0
    return BASE.get(variant, 2.0001) + 0.1 * seed + noise + (0.3 if lr != best else 0.0)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """The folder of a finished table, its page, and what was told of it."""
    folder, lines = table_folder(tmp_path_factory.mktemp("tables") / "frozen-mini", "frozen", loss), []
    page = Page(report_table(folder, lines.append))
    return folder, page, *lines


def row_of(page, start):
    return next(row for row in page.rows if row and row[0] == start)


def test_the_page_of_a_finished_table(frozen):
    folder, page, _ = frozen
    assert page.html.startswith("<!doctype html>")
    assert any(row[0] == "map.beta" for row in page.rows)  # an assumption
    assert page.titles == [
        *("The paper's claims", "How a claim is judged", "128x4, for the paper's 1024x12"),
        *("Where it comes from", "What the paper leaves unsaid"),
    ]
    assert (
        "Claims tried at scale mini, far below the paper's: 7; 3 did not hold; 1 no difference detected; 3 held."
    ) in page.text
    best, shared, *_ = (row for row in page.rows if row[0] == "Fixed curvaturefixed_curvature")
    assert [*shared[1:3], shared[4]] == ["worse", "+0.1504", "2.2504 ± 0.0994"]
    assert shared[3].startswith("+0.1256 to +0.1752")  # ± 0.0248, one variant less
    assert [*best[1:3], best[4]] == ["better", "-0.1496", "1.9504 ± 0.0994"]
    assert best[3].startswith("-0.1764 to -0.1228")
    assert best[5:7] == ["2.9177", "-0.0345"]
    assert row_of(page, "AdamW")[5:7] == ["2.9522", "–"]
    _, broken, *_ = (row for row in page.rows if row[0] == "Fixed pathway scalesfixed_pathways")
    assert broken[1:5] == ["diverged", "–", "–", "diverged in 3 of 3"]  # at the shared rate
    assert page.html.count("<svg") == 3  # curves at both choices of rates, and the sweep
    for name, value in page.attributes:
        assert name != "href" or value.startswith("#") or (folder / value).exists(), value
    assert not re.search(r"(?:src|href)=.https?:", page.html)
    assert "<script" not in page.html


def test_verdicts_are_the_same_on_the_page_and_the_terminal(frozen):
    folder, page, told = frozen
    table = read_table(folder)
    for claim in table.claims:
        judged = judge(claim, table.panels, table.reported["loss"], "mini")
        said = f"{judged.verdict}: {claim.text}"
        assert said in told
        (panel,) = judged.panels
        for text in (told.partition(said)[2], page.text.partition(claim.text)[2]):
            assert panel.sentence in " ".join(text.split("\n")[:5])
    (line,) = (line for line in told.splitlines() if "final loss of frozen minus that of AdamW: " in line)
    assert line.startswith("  128x4: did not hold: final loss of frozen minus that of AdamW: +0.050")
    assert line.endswith(f"; the paper has {2.9341 - 2.9522:+.4g}.")


@pytest.mark.usefixtures("undrawn")
def test_an_unfinished_table_says_what_is_missing(tmp_path):
    out = table_folder(
        tmp_path / "grid",
        "main_grid",
        lambda variant, *_: 2.0 if variant == "AdamW" else 1.9,
        missing=("64x4", "128x4"),
    )
    page = Page(report_table(out))
    assert "Unfinished: 2 of 4 panels to go (64x4, 128x4)." in page.text
    assert set(re.findall(r"(\d+x\d+(?: to \d+x\d+)?): ", page.text)) == {"64x2", "128x2", "64x2 to 128x2"}
    assert "64x2 to 128x2: not tested at this scale" in page.text  # all differences are equal
    missing = [panel.name for panel in load_table("frozen", "mini").panels]
    empty = table_folder(tmp_path / "empty", "frozen", loss, missing=missing)
    text = Page(report_table(empty)).text
    assert "Unfinished: 1 of 1 panels to go" in text
    assert "No claim of the paper is about what was run." in text


@pytest.mark.usefixtures("undrawn")
def test_beyond_the_paper_there_are_no_claims(tmp_path):
    widths = table_folder(tmp_path / "widths", "widths", lambda variant, *_: 2.0 + 0.1 * (variant == "number"))
    page = Page(report_table(widths))
    assert "The paper has no claim that this table tests." in page.text
    assert row_of(page, "One learned scale per matrixnumber")[1:3] == ["worse", "+0.1000"]
