import pytest

import symexplin as sel
from pages import Page
from symexplin.lab.compare.comparison import Comparison
from symexplin.lab.compare.words import notes, verdict
from symexplin.lab.report.pages import report_comparison
from table_folders import comparison, panel_folder

EVIL = "</pre><script>alert('x')</script>"


def page_of(folder):
    return Page(report_comparison(Comparison.load(folder)))


def test_a_page_is_self_contained_and_repeats(tmp_path):
    folder = comparison(tmp_path, config={"data": EVIL})
    page = page_of(folder)
    assert page_of(folder).html == page.html
    for name, value in page.attributes:
        assert name != "src"
        assert name not in ("href", "xlink:href") or value.startswith("#"), value
    assert not [word for word in ("@import", "url(http", "<script") if word in page.html]
    assert page.html.count("<svg") == page.html.count("<figcaption>") == 2  # every chart has its sentence
    assert EVIL in page.text  # as text


@pytest.mark.usefixtures("undrawn")
def test_the_tables_of_a_comparison_hold_the_numbers_and_the_map(tmp_path):
    config = sel.preset("frozen", beta=2.65165, l=sel.Scale(start=0.35355), e=sel.Scale("row", k=(30, 10)))
    maps = {"SEL": {"home": "module", "start": "mismatched", **config.to_dict()}}
    page = page_of(comparison(tmp_path, maps=maps, config={"compare": {"lrs": [0.001, 0.01]}}))
    assert ["SEL", "no verdict", "-0.5000", "1.5000", "1.20x", "2,000", "12.0"] in page.rows
    assert ["AdamW", "–", "–", "2.0000", "–", "2,000", "12.0"] in page.rows
    assert ["SEL", "0.001", "0", "2.3000", "+0.3000", "2,000", "12.0"] in page.rows
    assert ["train_tokens", "1,234,567"] in page.rows
    assert ["compare.lrs", "0.001, 0.01"] in page.rows
    assert ["commit of symexplin", "unknown"] in page.rows
    assert ["map of AdamW", "ordinary weights"] in page.rows
    told = "curved in the modules; mismatch, beta 2.652, l 0.3535, e learned (row, k 30 to 10), mismatched start"
    assert ["map of SEL", told] in page.rows
    found = Comparison.load(tmp_path)
    card, _, after = page.text.partition("At learning rate 0.01, the best for all")
    assert all(sentence in card for sentence in verdict(found))
    assert all(sentence in after for sentence in notes(found))
    assert "There is no verdict, since these seeds chose the learning rates" in card
    assert page.html.index("<table") < page.html.index("<svg")
    assert page.titles == ["All runs", "Where it comes from", "All settings"]


@pytest.mark.usefixtures("undrawn")
def test_small_losses_keep_four_digits(tmp_path):
    losses = {"AdamW": 2e-6, "SEL": 1.5e-6}
    panel_folder(tmp_path, list(losses), lambda variant, _, seed: losses[variant] + 1e-8 * seed, lrs=(0.01,))
    page = page_of(tmp_path)
    assert page.rows[2][2:5] == ["-0.000000490", "-0.000000547 to -0.000000433", "0.000001520 ± 0.000000020"]
    assert "as the command reports it" in page.text  # no unit


@pytest.mark.usefixtures("undrawn")
def test_what_has_no_number_has_words_or_a_dash(tmp_path):
    page = page_of(comparison(tmp_path, seeds=(0, 1), broken=("SEL", 0.01, 1), more={"broken": None}))
    assert ["SEL", "0.01", "1", "step 3: loss is nan", "–", "0", "0.0"] in page.rows
    assert ["broken", "diverged", "–", "diverged", "–", "–", "–", "–"] in page.rows


@pytest.mark.usefixtures("undrawn")
def test_a_page_has_the_command_and_the_digests_of_its_files(tmp_path):
    command = {"first command": "python train.py", "SHA-256 of train.py": "0a1b"}
    page = page_of(comparison(tmp_path, command=command))
    assert ["SHA-256 of train.py", "0a1b"] in page.rows
