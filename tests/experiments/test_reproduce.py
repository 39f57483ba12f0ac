import dataclasses
import json
import re

import pytest

from executors import executed, in_process  # noqa: F401 (a fixture)
from symexplin.experiments.reproduce import ReproduceConfig, plan_lines, reproduce
from symexplin.experiments.tables import load_table, read_table
from symexplin.lab.compare import sweep
from symexplin.lab.data.batches import Corpus
from symexplin.lab.pace import Pace

SMALL = {
    "model": {"width": 16, "depth": 1, "heads": 2, "context": 8},
    "train": {"batch_size": 2, "eval_every": 2, "eval_batches": 2},
    "compare": {"seeds": [0]},
}

pytestmark = pytest.mark.usefixtures("undrawn", "in_process")  # but for what a fixture of the module draws once


def tiny(data, **changes):
    return ReproduceConfig(**{"data": (data,), "lrs": (2e-3,), "jobs": 1, "steps": 4, "set": SMALL, **changes})


def losses(out):
    panels = {panel.name: panel.comparison for panel in read_table(out).panels if panel.comparison}
    return {
        name: [(run.variant, run.lr, run.seed, run.curve) for run in comparison.runs]
        for name, comparison in panels.items()
    }


def written(out):
    """Return when each run ended."""
    return {path: path.stat().st_mtime_ns for path in out.glob("panels/*/runs/*/result.json")}


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A table whose text is not prepared."""
    out = tmp_path_factory.mktemp("tables") / "equivalence"
    with executed():
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
    # Another table or other settings are refused.
    with pytest.raises(ValueError, match="name was 'optimizer_equivalence'"):
        reproduce("exp_only", out, tiny(text), resume=True)
    with pytest.raises(ValueError, match=r"train.steps was 4, is 6 now"):
        reproduce("optimizer_equivalence", out, tiny(text, steps=6), resume=True)


def test_a_stopped_table_goes_on_to_the_same_losses_whatever_lies_beside_it(data, tmp_path, monkeypatch):
    names = ("64x2", "64x4")  # of four panels
    config = dataclasses.replace(tiny(data), variants=("AdamW", "mismatch"), panels=names)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    lines = []
    reproduce("main_grid", whole, config, echo=lines.append)
    assert not [line for line in lines if "128x2:" in line or "mismatch+offset" in line]  # claims on what did not run

    def three_runs(*arguments, execute=sweep.execute):
        ended = execute(*arguments)
        yield from (next(ended) for _ in range(3))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "execute", three_runs)
        with pytest.raises(KeyboardInterrupt):
            reproduce("main_grid", broken, config)
    assert list(losses(broken)) == ["64x2"]
    before, expected = written(broken), losses(whole)
    for result in written(whole):
        result.write_text("{")
    reproduce("main_grid", broken, config, resume=True)
    assert before.items() <= written(broken).items()
    assert losses(broken) == expected
    assert [panel.name for panel in read_table(broken).panels if not panel.comparison] == ["128x2", "128x4"]


def test_all_panels_are_written_at_once_with_what_each_asks_for(data, tmp_path, monkeypatch):
    """At the paper's scale: a GPU for a run, eight for those at width 3072, and no limit; no model is built."""
    monkeypatch.setattr("symexplin.lab.model.Transformer.__init__", None)
    small = {"model": {"context": 8}, "compare": {"cluster": "slurm"}}
    config = ReproduceConfig("paper", (data,), variants=("AdamW", "mismatch"), set=small)
    assert reproduce("main_grid", tmp_path, config) is None
    places = sorted((tmp_path / "cluster").iterdir(), key=lambda place: "3072x" in (place / "runs.txt").read_text())
    for place, gpus, widths in zip(places, (1, 8), ((1024, 2048), (3072,)), strict=True):
        panels, commands = zip(
            *(line.split("\t") for line in (place / "runs.txt").read_text().splitlines()), strict=True
        )
        expected = [f"{width}x{depth}" for width in widths for depth in (12, 24, 36)]
        assert list(dict.fromkeys(panel.split("/")[2] for panel in panels)) == expected
        assert all(("torch.distributed.run" in command) == (gpus > 1) for command in commands)
        script = (place / "array.sh").read_text()
        assert f"--gpus-per-node={gpus}\n" in script
        assert f"--array=1-{len(panels)}\n" in script


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


def test_the_plan_counts_runs_and_tokens_and_hours_and_says_every_claim_and_assumption(monkeypatch):
    asked = []

    def measured(_, vocab_size):
        asked.append(vocab_size)
        return Pace(10.0, 0.1) if len(asked) <= 2 else None  # of the first table, and of the first size of the second

    monkeypatch.setattr("symexplin.experiments.reproduce.measure", measured)
    table = load_table("frozen", "mini")
    text = "\n".join(plan_lines(table))
    # Eight variants at four rates with three seeds.
    assert "up to 96 runs of 600 steps, 614,400 tokens each" in text
    # 48 times 10 s, 600 steps and 11 evaluations on 32 batches of a third of a step each.
    assert "in all: up to 96 runs, 58,982,400 tokens; about 1.1 h on this machine with 2 jobs at a time\n" in text
    assert all(sentence in text for sentence in table.assumptions.values())
    assert all(claim.text in text for claim in table.claims)
    text = "\n".join(plan_lines(load_table("main_grid", "mini")))
    assert len(re.findall(r"(?m)^64x2: AdamW.*; about 0.9 h$", text)) == 1
    assert len(re.findall("(?m); hours not measured here$", text)) == 4  # of the other sizes, and so of all
    assert "64x2: AdamW" not in "\n".join(plan_lines(load_table("main_grid", "mini"), ["64x4"]))
    "".join(plan_lines(load_table("frozen", "paper")))
    assert {*asked[:-1]} == {256}
    assert asked[-1] == 50_257


def test_the_plan_of_prepared_data_has_their_vocabulary(data, monkeypatch):
    asked = []
    monkeypatch.setattr("symexplin.experiments.reproduce.measure", lambda *given: asked.append(given))
    "".join(plan_lines(tiny(data).table("optimizer_equivalence", "out")))
    assert asked[0][1] == Corpus.load(data).vocab_size
