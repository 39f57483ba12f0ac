import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

import symexplin as sel
from symexplin.lab import report as module
from symexplin.lab.compare import Run, compare, headline
from symexplin.lab.report import render_report

EVIL = "</pre><script>alert('x')</script>"


def summary(final=1.5, error=None):
    runs = [
        Run(arm, lr, ((0, 5.0), (50, 2.5), (100, loss)), 12.0, 2000.0)
        for arm, lr, loss in (("AdamW", 0.001, 2.2), ("SEL", 0.001, 2.3), ("AdamW", 0.01, 2.0), ("SEL", 0.01, final))
    ]
    if error:
        runs[1] = Run("SEL", 0.001, (), 0.0, 0.0, error)
    comparison = compare(runs, "AdamW")
    return {
        "headline": headline(comparison),
        "comparison": dataclasses.asdict(comparison),
        "runs": [{**dataclasses.asdict(r), "final_loss": r.final_loss} for r in runs],
        "sample": {"arm": "SEL", "lr": 0.01, "text": EVIL},
        "export": {"file": "model.safetensors", "bit_equal": True},
        "corpus": {"train_tokens": 1234567},
        "config": {"lrs": (0.001, 0.01), "seed": 7},
        "maps": {},
        "parameters": 4321,
        "provenance": {"commit": None, "processor": "A <fast> one"},
        "seconds": 99.5,
    }


class Page(HTMLParser):
    """Collects rows of tables and checks that tags are balanced."""

    VOID = frozenset({"meta", "br", "path", "use", "rect"})

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_the_page_is_self_contained_and_fits_phones():
    page = Page(render_report(summary()))
    for tag, name, value in page.attributes:
        assert name != "src", tag
        assert name not in ("href", "xlink:href") or value.startswith("#"), value
    assert ("meta", "name", "viewport") in page.attributes
    assert "@import" not in page.text
    assert "url(http" not in page.text


def test_the_tables_hold_the_numbers():
    page = Page(render_report(summary()))
    assert ["SEL", "0.01", "1.5000", "-0.5000", "1.33×", "2,000", "12.0"] in page.rows
    assert page.rows.count(["AdamW", "0.01", "2.0000", "–", "–", "2,000", "12.0"]) == 2
    assert ["SEL", "0.001", "2.3000", "2,000", "12.0"] in page.rows
    assert ["train tokens", "1,234,567"] in page.rows
    assert ["lrs", "0.001, 0.01"] in page.rows
    assert ["commit", "unknown"] in page.rows
    for sentence in summary()["headline"]:
        assert sentence in page.text


def test_a_loss_is_told_like_a_gain():
    page = Page(render_report(summary(final=2.1)))
    assert page.rows.count(["SEL", "0.01", "2.1000", "+0.1000", "not reached", "2,000", "12.0"]) == 2
    assert "0.100 above AdamW" in page.text


def test_a_run_that_broke_down_is_named():
    page = Page(render_report(summary(error="step 3: loss is nan")))
    assert ["SEL", "0.001", "step 3: loss is nan"] in page.rows


def test_foreign_text_stays_text():
    html = render_report(summary())
    assert "<script" not in html
    assert EVIL in Page(html).text
    assert "A <fast> one" in Page(html).text


def test_the_charts_have_axes_units_legends_and_points():
    curves, sweep = re.findall(r"<svg.*?</svg>", render_report(summary()), flags=re.DOTALL)
    words = []
    for chart in (curves, sweep):
        root = ElementTree.fromstring(chart)
        words.append({"".join(node.itertext()).strip() for node in root.iter() if node.tag.endswith("}text")})
    assert {"optimizer steps", "evaluation loss (nats a token)"} <= words[0]
    assert {f"{arm}, lr {lr}" for arm in ("AdamW", "SEL") for lr in ("0.001", "0.01")} <= words[0]
    assert {"peak learning rate (log scale)", "final evaluation loss (nats a token)"} <= words[1]
    assert {"AdamW", "SEL", "0.001", "0.01"} <= words[1]
    for chart in (curves, sweep):
        assert chart.count("#0072b2") >= 2
        assert chart.count("#d55e00") >= 2


def test_the_same_data_give_the_same_page():
    assert render_report(summary()) == render_report(summary())


def test_a_missing_number_is_an_error():
    with pytest.raises(KeyError):
        render_report({key: value for key, value in summary().items() if key != "corpus"})


def test_a_map_is_told_with_its_start_and_its_scales():
    config = sel.preset("frozen", beta=2.65165, l=sel.Scale(start=0.35355), e=sel.Scale("row", peak_lr=(0.003, 0.001)))
    line = module._map({"start": "matched", **config.to_dict()})
    assert line == (
        "mode mismatch; beta 2.65165; curvature fixed; matched start; e row with peak learning rate 0.003 to 0.001; "
        "l fixed at 0.3535"
    )
