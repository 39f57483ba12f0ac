import dataclasses
import itertools
import json
import signal

import pytest

from symexplin.experiments import estimate
from symexplin.experiments.reproduce import ReproduceConfig, plan_lines, reproduce
from symexplin.experiments.tables import load_table, read_table
from symexplin.lab.process import Stopped

SMALL = {
    "model": {"width": 16, "depth": 1, "heads": 2, "context": 8},
    "train": {"batch_size": 2, "eval_every": 2, "eval_batches": 2},
    "compare": {"seeds": [0]},
}

pytestmark = pytest.mark.usefixtures("undrawn")  # but for what a fixture of the module draws once


def tiny(data, **changes):
    return ReproduceConfig(**{"data": (data,), "lrs": (2e-3,), "jobs": 1, "steps": 4, "set": SMALL, **changes})


def losses(out):
    return {
        panel.name: [(run["variant"], run["lr"], run["seed"], run["evals"]) for run in panel.found["runs"]]
        for panel in read_table(out).panels
        if panel.found
    }


def written(out):
    """Return when each run ended."""
    return {path: path.stat().st_mtime_ns for path in out.glob("panels/*/runs/*/result.json")}


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A table whose text is not prepared."""
    out = tmp_path_factory.mktemp("tables") / "equivalence"
    return out, reproduce("optimizer_equivalence", out, tiny(text), results=out.parent / "results.csv")


def test_a_finished_table_is_not_trained_again_and_may_grow(finished, text):
    out, report = finished
    assert report == out / "report.html"
    assert json.loads((out / "data" / "dataset.json").read_text())["tokenizer"]["name"] == "byte"
    assert len((out.parent / "results.csv").read_text().splitlines()) == 3
    with pytest.raises(ValueError, match="add --resume"):
        reproduce("optimizer_equivalence", out, tiny(text))
    before, found = written(out), losses(out)
    reproduce("optimizer_equivalence", out, tiny(text), resume=True)
    assert (written(out), losses(out)) == (before, found)
    reproduce("optimizer_equivalence", out, tiny(text, lrs=(2e-3, 4e-3)), resume=True)
    assert before.items() < written(out).items()
    assert len(written(out)) == 4


def test_another_table_or_other_settings_are_refused(finished, text):
    out, _ = finished
    with pytest.raises(ValueError, match="name was 'optimizer_equivalence'"):
        reproduce("exp_only", out, tiny(text), resume=True)
    before = (out / "table.json").read_bytes()
    with pytest.raises(ValueError, match=r"train.steps was 4, is 6 now"):
        reproduce("optimizer_equivalence", out, tiny(text, steps=6), resume=True)
    assert (out / "table.json").read_bytes() == before


def test_a_stopped_table_goes_on_to_the_same_losses(data, tmp_path):
    config = tiny(data, set={**SMALL, "log": {"checkpoint_every": 1}})
    names = ("64x2", "64x4")  # of four panels
    config = dataclasses.replace(config, variants=("AdamW", "mismatch"), panels=names)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    reproduce("main_grid", whole, config)
    lines = []

    def echo(line):
        lines.append(line)
        if "step 2/4" in line and sum("step 2/4" in one for one in lines) == 3:
            signal.raise_signal(signal.SIGTERM)  # within the first run of the second panel

    with pytest.raises(Stopped):
        reproduce("main_grid", broken, config, echo=echo)
    assert list(losses(broken)) == ["64x2"]
    before = written(broken)
    reproduce("main_grid", broken, config, resume=True)
    assert before.items() <= written(broken).items()
    assert losses(broken) == losses(whole)
    assert [panel.name for panel in read_table(broken).panels if not panel.found] == ["128x2", "128x4"]


def test_a_mistake_leaves_no_folder(data, tmp_path):
    out = tmp_path / "new" / "out"
    for config, words in (
        (ReproduceConfig(scale="h200"), "data must be given at scale 'h200'"),
        (ReproduceConfig(panels=("12x1024",)), "panels must be one of '128x4'"),
        (tiny(data, set={"model": {"context": 10**6}}), "context"),
    ):
        with pytest.raises(ValueError, match=words):
            reproduce("exp_only", out, config)
    with pytest.raises(FileNotFoundError, match="no/such"):
        reproduce("exp_only", out, tiny("no/such"))
    (tmp_path / "results.csv").write_text("table,loss\n")
    with pytest.raises(ValueError, match="must have the columns"):
        reproduce("exp_only", out, tiny(data), results=tmp_path / "results.csv")
    assert not out.parent.exists()


def test_the_plan_counts_runs_and_tokens_and_says_every_claim_and_assumption():
    table = load_table("frozen", "mini")
    assert "64x2: AdamW" not in "\n".join(plan_lines(load_table("main_grid", "mini"), ["64x4"]))
    text = "\n".join(plan_lines(table))
    # Eight variants at four rates with three seeds.
    assert "up to 96 runs of 600 steps, 614,400 tokens each" in text
    assert "in all: up to 96 runs, 58,982,400 tokens" in text
    assert all(sentence in text for sentence in table.assumptions.values())
    assert all(claim.text in text for claim in table.claims)


@pytest.mark.parametrize(("jobs", "minutes"), [(1, 12), (2, 6)])
def test_the_estimate_is_of_all_steps_and_evaluations_of_all_runs(data, monkeypatch, jobs, minutes):
    clock = itertools.count(step=60.0)  # a minute between two looks at it
    table = tiny(data, jobs=jobs).table("optimizer_equivalence", "out")
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: next(clock))
    # Two runs of four steps; three evaluations of two batches, which cost a third of a step each.
    assert estimate.estimate([table.panels[0].config]) == [f"at most 2 runs, in all about {minutes} min (from 4 steps)"]
