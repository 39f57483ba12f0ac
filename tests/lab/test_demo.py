import dataclasses
import html

import pytest
import torch

from executors import executed, in_process  # noqa: F401 (a fixture)
from symexplin.lab.compare.comparison import Comparison
from symexplin.lab.compare.words import verdict
from symexplin.lab.data.batches import Corpus, eval_batches
from symexplin.lab.demo import DemoConfig, run_demo
from symexplin.lab.evaluate import evaluate
from symexplin.lab.pace import Pace
from symexplin.lab.provenance import cores
from symexplin.lab.weights import load_model

FILES = {
    ".symexplin-demo",
    ".lock",
    "compare.toml",
    "comparison.json",
    "report.html",
    "sample.txt",
    "data",
    "runs",
    "processes",
}
VARIANTS = ("AdamW", "default", "paper")
LRS = (1e-3, 1e30)  # at the second one every variant breaks down
RUNS = {f"{variant}-lr{lr:g}-seed0" for variant in VARIANTS for lr in LRS}

pytestmark = pytest.mark.usefixtures("undrawn", "in_process")  # but for what a fixture of the module draws once


def tiny(text, **changes):
    shape = {"width": 16, "depth": 1, "heads": 2, "context": 16}
    rest = {"steps": 6, "batch_size": 4, "variants": VARIANTS, "judges": 0}
    return DemoConfig(**{"data": text, "lrs": LRS, **shape, **rest, **changes})


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    lines = []
    with executed():
        return folder, run_demo(folder, tiny(text), echo=lines.append), lines


def losses(comparison):
    return [(run.variant, run.lr, run.curve) for run in comparison.runs]


def everything(folder):
    """Return all files with when they were written, but for the lock."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_it_compares_on_its_data_and_writes_what_it_promises(finished, data):
    folder, comparison, lines = finished
    assert {path.name for path in folder.iterdir()} == FILES | {"processes"}
    assert Comparison.load(folder).runs == comparison.runs
    assert {path.name for path in (folder / "runs").iterdir()} == RUNS
    assert all(sentence in "\n".join(lines) for sentence in verdict(comparison))
    assert Corpus.load(folder / "data").fingerprint == Corpus.load(data).fingerprint
    for run in comparison.runs:
        assert ([step for step, _ in run.curve] == [0, 1, 2, 3, 4, 5, 6]) == (run.lr == 1e-3)
        assert bool(run.error) == (run.lr == 1e30)
    page = (folder / "report.html").read_text()
    assert page.count("<p>", 0, page.index("<svg")) == len(verdict(comparison)) == 2
    assert "paper&#39;s method" in page
    assert DemoConfig().comparison("").compare.jobs == min(2, cores())


def test_the_sample_is_of_the_best_curved_model_whose_weights_are_plain(finished):
    folder, comparison, lines = finished
    model = load_model(lines[-1].removeprefix("plain weights: "))
    assert all(type(m) is torch.nn.Linear for m in model.modules() if isinstance(m, torch.nn.Linear))
    best = min((run for run in comparison.runs if run.variant != "AdamW" and not run.error), key=lambda run: run.loss)
    assert evaluate(model, eval_batches(Corpus.load(folder / "data").valid, 16, 4, 8)) == best.loss
    sample = comparison.facts["sample"]
    assert sample["variant"] == best.variant
    assert (folder / "sample.txt").read_bytes().decode() == sample["text"] + "\n"
    assert sample["text"] in html.unescape((folder / "report.html").read_bytes().decode())


def test_a_demo_that_was_interrupted_repeats_exactly(finished, text, tmp_path):
    def stop(line):
        if line.startswith("3/6 paper lr 0.001 seed 0: step 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, tiny(text), echo=stop)
    ended = {path.parent for path in tmp_path.glob("runs/*/result.json")}
    kept = {path: when for path, when in everything(tmp_path).items() if {*ended, tmp_path / "data"} & {*path.parents}}
    assert 2 <= len(ended) <= 3
    comparison = run_demo(tmp_path, tiny(text))
    assert kept.items() <= everything(tmp_path).items()
    assert losses(comparison) == losses(finished[1])
    assert comparison.facts["sample"] == finished[1].facts["sample"]


def test_a_finished_one_is_told_again_and_other_settings_are_refused(finished, text):
    folder, comparison, _ = finished
    before = {path: when for path, when in everything(folder).items() if path.parent.parent.name == "runs"}
    assert run_demo(folder, tiny(text)).runs == comparison.runs
    with pytest.raises(ValueError, match=r"another configuration.*train\.steps was 6, is 7 now"):
        run_demo(folder, tiny(text, steps=7))
    with pytest.raises(ValueError, match=r"out must be a new folder for another configuration.*sources"):
        run_demo(folder, tiny("stdlib"))
    assert before.items() <= everything(folder).items()


def test_its_size_is_that_of_this_machine_and_stays_the_same_after_an_interruption(text, tmp_path, monkeypatch):
    config = tiny(text, steps=None, lrs=(1e-3,), variants=("AdamW", "default"))
    # Two runs of 84 steps and 13 evaluations on 8 batches, of a third of a step each: 214 s; 96 steps would take 235 s.
    step = 0.9 * config.comparison("").compare.jobs
    monkeypatch.setattr("symexplin.lab.demo.measure", lambda configs: [Pace(0.0, step) for _ in configs])
    lines = []

    def stop(line):
        lines.append(line)
        if line.startswith("2/2 default lr 0.001 seed 0: step 7/84"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path / "chosen", config, echo=stop)
    assert any(line.startswith("2 runs of 84 steps take about 4 min here") for line in lines)
    monkeypatch.setattr("symexplin.lab.demo.measure", None)
    again = run_demo(tmp_path / "chosen", config)
    given = run_demo(tmp_path / "given", dataclasses.replace(config, steps=84))
    assert losses(again) == losses(given)


@pytest.mark.parametrize(("pace", "steps"), [(Pace(1.0, 1e-3), 120), (Pace(1.0, 100.0), 60), (None, 60)])
def test_its_size_has_bounds(pace, steps, text, tmp_path, monkeypatch):
    monkeypatch.setattr("symexplin.lab.demo.measure", lambda _: [pace])
    demo = run_demo(tmp_path, tiny(text, steps=None, lrs=(1e-3,), variants=("AdamW", "default")))
    assert all(run.curve[-1][0] == steps for run in demo.runs)


def test_fresh_seeds_judge(text, tmp_path):
    comparison = run_demo(tmp_path, tiny(text, lrs=(1e-3, 2e-3), judges=DemoConfig.judges))
    assert comparison.counted_seeds == (1, 2, 3)
    assert "99% interval" in verdict(comparison)[0]


def test_one_interrupted_in_its_preparation_begins_again(text, tmp_path, monkeypatch):
    def interrupt(_, out, **__):
        (out / ".unfinished").mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("symexplin.lab.data.prepare.prepare", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_demo(tmp_path, tiny(text))
    assert "sample" in run_demo(tmp_path, tiny(text, lrs=(1e-3,))).facts
