import json
import shutil

import pytest

import symexplin as sel
from pages import Page
from run_folders import EVIL, comparison, trained
from symexplin.lab.maps import CurveConfig
from symexplin.lab.report import pages as module
from symexplin.lab.report.pages import report, report_comparison, report_run


@pytest.fixture(scope="module")
def learned(data, tmp_path_factory):
    return trained(data, tmp_path_factory.mktemp("learned"), CurveConfig(preset="paper", start="mismatched"))


@pytest.fixture
def run(learned, tmp_path):
    """A folder of a finished run that a test may change."""
    return shutil.copytree(learned, tmp_path / "run")


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_pages_are_self_contained_and_fit_phones_and_repeat(run, tmp_path):
    for folder in (run, comparison(tmp_path)):
        page = Page(report(folder))
        assert report(folder).read_text() == page.html
        assert page.html.startswith("<!doctype html>")
        for tag, name, value in page.attributes:
            assert name != "src", tag
            assert name not in ("href", "xlink:href") or value.startswith("#"), value
        assert ("meta", "name", "viewport") in page.attributes
        assert "@import" not in page.text
        assert "url(http" not in page.html
        assert "<script" not in page.html
        # Every figure has its sentence, and every row of charts shrinks with the page.
        assert page.html.count("<svg") == page.html.count("<figcaption>") > 0
        assert "overflow-x: auto" in page.html


def test_the_page_of_a_run(run):
    summary = json.loads((run / "summary.json").read_text())
    page = Page(report_run(run))
    assert page.titles == ["Curves", "Evaluations", "Settings", "Where it comes from"]
    assert "Finished: 6 steps." in page.text
    assert f"Held-out loss {summary['final_loss']:.4f} nats per token after step 6." in page.text
    assert ["parameters", f"{summary['parameters']:,}"] in page.rows
    assert ["tokens", "384"] in page.rows  # 6 steps of 4 sequences of 16
    assert ["train.lr", "0.01"] in page.rows
    assert ["log.tensorboard", "False"] in page.rows
    assert ["train.betas", "0.9, 0.999"] in page.rows
    (words,) = [row[1] for row in page.rows if row[0] == "map"]
    assert words.startswith("curved in the optimizer; mismatch, beta 7.5, e and l learned (row_col_mult, k 50 to 8)")
    assert "The map at step 6" in page.text
    assert {"q", "k", "v", "o", "gate", "up", "down"} <= {word.strip() for word in page.text.splitlines()}


@pytest.mark.usefixtures("undrawn")
def test_the_table_of_evaluations_holds_the_numbers(run):
    page = Page(report_run(run))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {str(record["step"]): f"{record['eval_loss']:.4f}" for record in records if "eval_loss" in record}
    assert {row[0]: row[1] for row in page.rows if len(row) == 5 and row[0] != "step"} == losses


@pytest.mark.usefixtures("undrawn")
def test_many_evaluations_are_thinned(run):
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(7, 500):
            file.write(json.dumps({"step": step, "eval_loss": 1.0 + (step != 333)}) + "\n")
    page = Page(report_run(run))
    steps = [row[0] for row in page.rows if len(row) == 5 and row[0] != "step"]
    assert 30 < len(steps) <= 41
    assert steps[-1] == "499"
    assert f"{len(steps)} of 497" in " ".join(page.text.split())
    assert "lowest after step 333: 1.0000" in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_goes_on_is_reported_without_touching_it(run):
    (run / "summary.json").unlink()
    (run / "model.safetensors").unlink()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:-4]) + b'{"step": 5, "lo')
    shutil.rmtree(run / "checkpoints/step-00000006")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    page = Page(report_run(run))
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "report.html"}
    assert before == after
    assert "Unfinished: step 4 of 6. It is still running, or was stopped." in page.text
    assert "The map at step 4" in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_run_on_given_weights_is_reported_with_them_and_without(learned, data, tmp_path):
    """Without them its start is not known, nor its map now."""
    base = shutil.copytree(learned, tmp_path / "base")
    folder = trained(data, tmp_path / "on", CurveConfig(), weights=str(base))
    page = Page(report_run(folder))
    assert ["train.weights", str(base)] in page.rows
    assert "The map at step 6" in page.text
    shutil.rmtree(base)
    page = Page(report_run(folder))
    words = f"warning: no figure of the map: weights must be the folder of a run or a model's file, got '{base}'"
    assert words in page.text
    assert "The map at step 6" not in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_has_just_begun_is_reported(run):
    for name in ("summary.json", "model.safetensors", "metrics.jsonl", "timing.jsonl"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints")
    page = Page(report_run(run))
    assert "Unfinished: step 0 of 6" in page.text
    assert page.titles == ["Settings", "Where it comes from"]


@pytest.mark.usefixtures("undrawn")
def test_the_error_that_ended_a_run_is_told(run):
    (run / "summary.json").write_text(json.dumps({"error": "step 7: loss is nan; <layer>", "step": 7}))
    assert "Ended by an error: step 7: loss is nan; <layer>." in Page(report_run(run)).text


@pytest.mark.usefixtures("undrawn")
def test_damaged_files_become_warnings_and_the_rest_is_drawn(run):
    (run / "checkpoints/step-00000006/model.safetensors").write_bytes(b"")
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[:4], lines[4][:5] + b"\n", *lines[5:]]))
    told = []
    page = Page(report(run, told.append))
    assert [line.startswith("warning: ") for line in told] == [True] * 2
    for words in ("line 5", "step-00000006 is damaged"):
        assert words in page.text
        assert any(words in line for line in told)
    assert "The map at step 4" in page.text


@pytest.mark.usefixtures("undrawn")
def test_foreign_text_stays_text(run, tmp_path):
    (run / "sample.txt").write_text(EVIL)
    facts = json.loads((run / "run.json").read_text())
    edit(run / "run.json", provenance={**facts["provenance"], "processor": EVIL})
    page = Page(report_run(run))
    assert "<script" not in page.html
    assert page.text.count(EVIL) == 2
    assert "What it writes" in page.titles
    page = Page(report_comparison(comparison(tmp_path, headline=[EVIL])))
    assert "<script" not in page.html
    assert page.text.count(EVIL) == 2
    assert "A <fast> one" in page.text


@pytest.mark.usefixtures("undrawn")
def test_the_tables_of_a_comparison_hold_the_numbers(tmp_path):
    page = Page(report_comparison(comparison(tmp_path)))
    assert page.rows.count(["SEL", "0.01", "1.5000", "-0.5000", "1.33×", "2,000", "12.0"]) == 2
    assert page.rows.count(["AdamW", "0.01", "2.0000", "–", "–", "2,000", "12.0"]) == 2
    assert ["SEL", "0.001", "0", "2.3000", "2,000", "12.0"] in page.rows
    assert ["train_tokens", "1,234,567"] in page.rows
    assert ["compare.lrs", "0.001, 0.01"] in page.rows
    assert ["commit", "unknown"] in page.rows
    assert ["map of AdamW", "ordinary weights"] in page.rows
    for sentence in json.loads((tmp_path / "comparison.json").read_text())["headline"]:
        assert sentence in page.text
    assert "One seed: a demonstration, not evidence." in page.text
    assert "Differences by seed" not in page.titles


def test_seeds_have_a_spread_and_differences(tmp_path):
    page = Page(report_comparison(comparison(tmp_path, seeds=(0, 1, 2), final=2.4)))
    assert ["AdamW", "0.01", "2.1000 ± 0.1000", "–", "–", "2,000", "12.0"] in page.rows
    assert ["SEL", "0.01", "2.5000 ± 0.1000", "+0.4000", "not reached", "2,000", "12.0"] in page.rows
    assert ["arm", "seed 0", "seed 1", "seed 2"] in page.rows
    assert ["SEL", "+0.4000", "+0.4000", "+0.4000"] in page.rows
    assert ["SEL", "+0.3000", "+0.3000", "+0.3000"] in page.rows
    assert "3 seeds. At each seed all runs start" in " ".join(page.text.split())
    assert "not evidence" not in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_broke_down_is_named(tmp_path):
    page = Page(report_comparison(comparison(tmp_path, seeds=(0, 1), broken=("SEL", 0.01, 1))))
    assert ["SEL", "0.01", "1", "step 3: loss is nan"] in page.rows
    assert ["SEL", "0.01", "finite in 1 of 2"] in [row[:3] for row in page.rows]
    assert ["SEL", "-0.5000", "–"] in page.rows


@pytest.mark.usefixtures("undrawn")
def test_what_has_no_number_has_words_or_a_dash(tmp_path):
    folder = comparison(tmp_path, seeds=(0, 1, 2))
    found = json.loads((folder / "comparison.json").read_text())
    nothing = {"finite": 0, "loss": None, "delta": None, "speedup": None, "reached": 0}
    nothing |= {"seconds": None, "tokens_per_second": None}
    found["comparison"]["shared"][1] |= {"speedup": None, "reached": 2}
    found["comparison"]["best"][1] |= nothing | {"lr": None}
    edit(folder / "comparison.json", comparison=found["comparison"])
    rows = Page(report_comparison(folder)).rows
    assert ["SEL", "0.01", "1.6000 ± 0.1000", "-0.5000", "reached in 2 of 3", "2,000", "12.0"] in rows
    assert ["SEL", "–", "not finite", "–", "–", "–", "–"] in rows


@pytest.mark.usefixtures("undrawn")
def test_sample_and_export_may_be_missing_and_runs_with_a_page_are_linked(tmp_path):
    folder = comparison(tmp_path, sample=..., export=...)
    run = folder / "runs/SEL-lr0.01-seed0/report.html"
    run.parent.mkdir(parents=True)
    run.touch()
    page = Page(report(folder))
    assert page.titles == ["Result", "Curves", "All runs", "Where it comes from"]
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert links == ["runs/SEL-lr0.01-seed0/report.html"]


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        (
            [],
            ValueError,
            r"folder must be that of a run or of a comparison, got '.*', which has neither config\.toml nor",
        ),
        (["compare.toml"], FileNotFoundError, r"has no comparison\.json: finish the comparison with --resume"),
        (["comparison.json"], ValueError, r"comparison\.json' is damaged"),
        (["config.toml"], (ValueError, OSError), r"run\.json|data must be given"),
    ],
)
def test_other_folders_are_refused(tmp_path, files, kind, message):
    for name in files:
        (tmp_path / name).write_text("")
    with pytest.raises(kind, match=message) as found:
        report(tmp_path)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_missing_number_is_an_error(tmp_path, run):
    with pytest.raises(ValueError, match=r"comparison\.json' is damaged, or .*: it lacks 'corpus'"):
        report(comparison(tmp_path, corpus=...))
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({"model": facts["model"]}))
    with pytest.raises(ValueError, match="it lacks 'provenance'"):
        report(run)


def test_a_map_is_told_with_its_home_its_start_and_its_scales():
    config = sel.preset("frozen", beta=2.65165, l=sel.Scale(start=0.35355), e=sel.Scale("row", k=(30, 10)))
    line = module._map({"home": "module", "start": "mismatched", **config.to_dict()})
    assert line == (
        "curved in the modules; mismatch, beta 2.652, l 0.3535, e learned (row, k 30 to 10), mismatched start"
    )
