import html
import json
import signal

import pytest
import torch

from symexplin.lab.data.batches import Corpus, eval_batches
from symexplin.lab.demo import DemoConfig, run_demo
from symexplin.lab.evaluate import evaluate
from symexplin.lab.process import Stopped
from symexplin.lab.weights import load_model

FILES = {".symexplin-demo", ".lock", "compare.toml", "comparison.json", "report.html", "sample.txt", "data", "runs"}
VARIANTS = ("AdamW", "SEL", "SEL-paper")
LRS = (1e-3, 1e30)  # at the second one every variant breaks down
RUNS = {f"{variant}-lr{lr:g}-seed0" for variant in VARIANTS for lr in LRS}

pytestmark = pytest.mark.usefixtures("undrawn")  # but for what a fixture of the module draws once


def tiny(text, **changes):
    shape = {"width": 16, "depth": 1, "heads": 2, "context": 16}
    rest = {"steps": 6, "batch_size": 4, "variants": VARIANTS}
    return DemoConfig(**{"data": text, "lrs": LRS, **shape, **rest, **changes})


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    lines = []
    return folder, run_demo(folder, tiny(text), echo=lines.append), lines


def losses(content):
    return [(run["variant"], run["lr"], run["evals"]) for run in content["runs"]]


def everything(folder):
    """Return all files with when they were written, but for the lock."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_it_compares_on_its_data_and_writes_what_it_promises(finished, data):
    folder, content, lines = finished
    assert {path.name for path in folder.iterdir()} == FILES
    assert json.loads((folder / "comparison.json").read_text()) == json.loads(json.dumps(content))
    assert {path.name for path in (folder / "runs").iterdir()} == RUNS
    assert all(sentence in "\n".join(lines) for sentence in content["headline"])
    assert Corpus.load(folder / "data").fingerprint == Corpus.load(data).fingerprint
    for run in content["runs"]:
        assert ([step for step, _ in run["evals"]] == [0, 1, 2, 3, 4, 5, 6]) == (run["lr"] == 1e-3)
        assert bool(run["error"]) == (run["lr"] == 1e30)


def test_the_sample_is_of_the_best_curved_model_whose_weights_are_plain(finished):
    folder, content, lines = finished
    model = load_model(lines[-1].removeprefix("plain weights: "))
    assert all(type(m) is torch.nn.Linear for m in model.modules() if isinstance(m, torch.nn.Linear))
    curved = [run for run in content["runs"] if run["variant"] != "AdamW" and not run["error"]]
    best = min(curved, key=lambda run: run["final_loss"])
    assert evaluate(model, eval_batches(Corpus.load(folder / "data").valid, 16, 4, 8)) == best["final_loss"]
    assert content["sample"]["variant"] == best["variant"]
    assert (folder / "sample.txt").read_bytes().decode() == content["sample"]["text"] + "\n"
    assert content["sample"]["text"] in html.unescape((folder / "report.html").read_bytes().decode())


def test_a_demo_that_was_interrupted_repeats_exactly(finished, text, tmp_path):
    def stop(line):
        if line.startswith("3/6 SEL-paper lr 0.001 seed 0: step 2"):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped):
        run_demo(tmp_path, tiny(text), echo=stop)
    ended = {path.parent for path in tmp_path.glob("runs/*/result.json")}
    kept = {path: when for path, when in everything(tmp_path).items() if {*ended, tmp_path / "data"} & {*path.parents}}
    assert len(ended) == 2
    content = run_demo(tmp_path, tiny(text))
    assert kept.items() <= everything(tmp_path).items()
    assert losses(content) == losses(finished[1])
    assert content["sample"] == finished[1]["sample"]


def test_a_finished_one_is_told_again_and_other_settings_are_refused(finished, text):
    folder, content, _ = finished
    before = {path: when for path, when in everything(folder).items() if path.parent.parent.name == "runs"}
    assert run_demo(folder, tiny(text)) == content
    with pytest.raises(ValueError, match=r"another configuration.*train\.steps was 6, is 7 now"):
        run_demo(folder, tiny(text, steps=7))
    with pytest.raises(ValueError, match=r"out must be new for another configuration.*sources"):
        run_demo(folder, tiny("stdlib"))
    assert before.items() <= everything(folder).items()


def test_one_interrupted_in_its_preparation_begins_again(text, tmp_path, monkeypatch):
    def interrupt(_, out, **__):
        (out / ".unfinished").mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("symexplin.lab.data.prepare.prepare", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_demo(tmp_path, tiny(text))
    assert "sample" in run_demo(tmp_path, tiny(text, lrs=(1e-3,)))
