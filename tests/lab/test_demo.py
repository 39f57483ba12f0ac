import dataclasses
import html
import json
import signal

import filelock
import pytest
import torch

from corpora import in_memory
from symexplin.lab import demo as module
from symexplin.lab.compare.sweep import compare_runs
from symexplin.lab.data.batches import Corpus, eval_batches
from symexplin.lab.data.sources import find_sources
from symexplin.lab.demo import DemoConfig, run_demo
from symexplin.lab.evaluate import evaluate
from symexplin.lab.process import Stopped
from symexplin.lab.weights.files import load_model

FILES = {".symexplin-demo", ".lock", "compare.toml", "comparison.json", "report.html", "sample.txt", "data", "runs"}
RUNS = {"AdamW-lr0.001-seed0", "AdamW-lr0.01-seed0", "SEL-lr0.001-seed0", "SEL-lr0.01-seed0"}

pytestmark = pytest.mark.usefixtures("undrawn")  # but for what a fixture of the module draws once


def text(word):
    return b"\0".join(f"{word} {i} says {i * i} and {i % 5}".encode() for i in range(80))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(text("document"))
    return str(path)


def tiny(data, **changes):
    shape = {"width": 16, "depth": 1, "heads": 2, "context": 16}
    rest = {"steps": 6, "batch_size": 4, "evaluations": 3, "eval_batches": 2, "sample_length": 20}
    return DemoConfig(**{"data": data, "lrs": (1e-3, 1e-2), **shape, **rest, **changes})


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    lines = []
    return folder, run_demo(folder, tiny(data), echo=lines.append), lines


def stop_at(beginning):
    def echo(line):
        if line.startswith(beginning):
            signal.raise_signal(signal.SIGTERM)

    return echo


def losses(content):
    return [(run["arm"], run["lr"], run["evals"]) for run in content["runs"]]


def everything(folder):
    """Return all files with when they were written, but for the lock."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_writes_what_it_promises(finished):
    folder, content, _ = finished
    assert {path.name for path in folder.iterdir()} == FILES
    assert json.loads((folder / "comparison.json").read_text()) == json.loads(json.dumps(content))
    assert (folder / "sample.txt").read_bytes().decode() == content["sample"]["text"] + "\n"
    assert content["sample"]["text"] in html.unescape((folder / "report.html").read_bytes().decode())
    assert {path.name for path in (folder / "runs").iterdir()} == RUNS
    assert not list(folder.glob("runs/*/tensorboard"))


def test_ends_with_the_table_and_the_headline(finished):
    _, content, lines = finished
    everything = "\n".join(lines)
    assert "at the shared learning rate" in everything
    assert "each at its own best learning rate" in everything
    assert all(sentence in everything for sentence in content["headline"])
    assert content["export"]["file"] in lines[-1]


def test_it_trains_on_its_data_with_its_schedule(finished, data):
    folder, content, _ = finished
    (source,) = find_sources((data,), "text", "train", {})
    corpus, wanted = Corpus.load(folder / "data"), in_memory(list(source.documents))
    assert (bytes(corpus.train), bytes(corpus.valid)) == (bytes(wanted.train), bytes(wanted.valid))
    for run in content["runs"]:
        assert [step for step, _ in run["evals"]] == [0, 2, 4, 6]
    assert content["config"]["train"]["warmup_steps"] == round(0.1 * 6)


def test_the_export_is_the_best_curved_model(finished):
    folder, content, _ = finished
    model = load_model(folder / content["export"]["file"])
    assert all(type(m) is torch.nn.Linear for m in model.modules() if isinstance(m, torch.nn.Linear))
    best = min(run["final_loss"] for run in content["runs"] if run["arm"] == "SEL")
    assert evaluate(model, eval_batches(Corpus.load(folder / "data").valid, 16, 4, 2)) == best
    assert content["export"]["bit_equal"] is True
    assert content["sample"]["arm"] == "SEL"


def test_the_export_of_curved_layers_is_plain(data, tmp_path):
    content = run_demo(tmp_path, tiny(data, arms=("AdamW", "SEL-module"), lrs=(1e-3,)))
    assert content["export"] == {"file": "runs/SEL-module-lr0.001-seed0/model.safetensors", "bit_equal": True}


def test_an_export_that_differs_is_an_error(data, tmp_path, monkeypatch):
    def load_another(path):
        model = load_model(path)
        model.head.weight.data[0, 0] += 1e-6
        return model

    monkeypatch.setattr(module, "load_model", load_another)
    with pytest.raises(RuntimeError, match="other logits"):
        run_demo(tmp_path / "out", tiny(data, lrs=(1e-3,)))


def test_a_demo_repeats_exactly_and_replaces_an_earlier_one(finished, data, tmp_path):
    folder, first, _ = finished
    run_demo(tmp_path, tiny(data, lrs=(5e-3,)))
    second = run_demo(tmp_path, tiny(data))
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert {path.name for path in (tmp_path / "runs").iterdir()} == RUNS
    assert losses(second) == losses(first)
    assert second["sample"] == first["sample"]
    name = second["export"]["file"]
    assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_a_finished_one_starts_anew_with_the_text_of_now(tmp_path):
    source, config = tmp_path / "text", tiny(str(tmp_path / "text"), lrs=(1e-3,))
    source.write_bytes(text("before"))
    first = run_demo(tmp_path / "out", config)
    source.write_bytes(text("after"))
    second = run_demo(tmp_path / "out", config)
    assert first["corpus"]["train_tokens"] != second["corpus"]["train_tokens"]
    assert losses(second) == losses(run_demo(tmp_path / "fresh", config))


def test_an_interrupted_one_goes_on(finished, data, tmp_path):
    with pytest.raises(Stopped):
        run_demo(tmp_path, tiny(data), echo=stop_at("3/4 AdamW lr 0.01 seed 0: step 2"))
    kept = {
        path: when for path, when in everything(tmp_path).items() if "-lr0.001-" in str(path) or "data" in path.parts
    }
    assert kept
    content = run_demo(tmp_path, tiny(data))
    assert kept.items() <= everything(tmp_path).items()
    assert losses(content) == losses(finished[1])
    assert content["sample"] == finished[1]["sample"]


def test_one_interrupted_before_its_sample_trains_no_more(data, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "sample", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, tiny(data, lrs=(1e-3,)))
    monkeypatch.undo()
    before = {path: when for path, when in everything(tmp_path / "runs").items() if path.name != "config.toml"}
    assert "sample" in run_demo(tmp_path, tiny(data, lrs=(1e-3,)))
    assert before.items() <= everything(tmp_path / "runs").items()


def test_an_interrupted_one_of_another_kind_is_replaced(data, tmp_path):
    with pytest.raises(Stopped):
        run_demo(tmp_path, tiny(data, lrs=(5e-3,)), echo=stop_at("1/2 AdamW lr 0.005 seed 0: step 2"))
    content = run_demo(tmp_path, tiny(data, lrs=(1e-3,)))
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {run["folder"][5:] for run in content["runs"]}


@pytest.mark.parametrize("moment", ["prepare", "compare_runs"])
def test_one_interrupted_at_its_beginning_begins_again(data, tmp_path, monkeypatch, moment):
    def interrupt(*arguments, **_):
        if moment == "prepare":
            (arguments[1] / ".cache" / "generator").mkdir(parents=True)
            (arguments[1] / ".cache" / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, tiny(data, lrs=(1e-3,)))
    monkeypatch.undo()
    run_demo(tmp_path, tiny(data, lrs=(1e-3,)))
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_another_seed_gives_another_run(finished, data, tmp_path):
    other = run_demo(tmp_path, tiny(data, seed=1, lrs=(1e-3,)))
    assert other["runs"][0]["evals"] != finished[1]["runs"][0]["evals"]


def test_a_run_that_breaks_down_is_reported(data, tmp_path):
    content = run_demo(tmp_path, tiny(data, lrs=(1e-3, 1e30)))
    assert {(run["arm"], run["lr"]) for run in content["runs"] if run["error"]} == {("AdamW", 1e30), ("SEL", 1e30)}
    assert content["sample"]["lr"] == 1e-3


def test_a_folder_with_foreign_files_is_left_alone(finished, data):
    folder, *_ = finished
    path = folder / "notes.txt"
    path.write_text("mine")
    before = everything(folder)
    try:
        with pytest.raises(ValueError, match=r"out must be a new folder or one of an earlier demo.*notes\.txt"):
            run_demo(folder, tiny(data))
        assert everything(folder) == before
    finally:
        path.unlink()


def test_a_linked_folder_is_foreign(data, tmp_path):
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.mkdir()
    (mine / "metrics.jsonl").write_text("mine")
    out.mkdir()
    (out / "runs").symlink_to(mine)
    (out / ".symexplin-demo").write_text("")
    with pytest.raises(ValueError, match="earlier demo"):
        run_demo(out, tiny(data))
    assert (mine / "metrics.jsonl").read_text() == "mine"


@pytest.mark.parametrize("name", ["model.safetensors", "report.html", "data/train.npy"])
def test_somebodys_own_files_are_no_earlier_demo(data, tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(ValueError, match="out must be a new folder or that of"):
        run_demo(tmp_path, tiny(data))
    assert path.read_text() == "mine"
    assert not (tmp_path / ".symexplin-demo").exists()


def test_a_comparison_is_no_earlier_demo(finished, data, tmp_path):
    compare_runs(tiny(data, lrs=(1e-3,)).comparison(str(finished[0] / "data")), tmp_path)
    before = everything(tmp_path)
    with pytest.raises(ValueError, match="earlier demo"):
        run_demo(tmp_path, tiny(data))
    assert everything(tmp_path) == before


def test_a_file_is_no_folder(data, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="out must be a folder, got the file"):
        run_demo(tmp_path / "file", tiny(data))


def test_two_at_once_are_refused(finished, data):
    before = everything(finished[0])
    with filelock.FileLock(finished[0] / ".lock"), pytest.raises(ValueError, match="out must be free"):
        run_demo(finished[0], tiny(data))
    assert everything(finished[0]) == before


def test_nothing_is_removed_before_the_data_are_read(finished, data, tmp_path):
    folder, *_ = finished
    before = everything(folder)
    with pytest.raises(FileNotFoundError):
        run_demo(folder, tiny(str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="context must be below"):
        run_demo(folder, tiny(data, context=5000))
    assert before.items() <= everything(folder).items()
    run_demo(tmp_path / "other", tiny(data, lrs=(1e-3,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ("AdamW", "SLE")}, r"arms must be one of .*did you mean 'SEL'"),
        ({"arms": ("SEL",)}, "arms must be the baseline 'AdamW' and at least one other"),
        ({"arms": ("AdamW",)}, "at least one other"),
        ({"arms": ("AdamW", "SEL", "SEL")}, "each once"),
        ({"lrs": ()}, "lrs must hold at least one"),
        ({"lrs": (1e-3, -1.0)}, r"lrs must be a positive finite number, got -1\.0"),
        ({"lrs": (1e-3, 1e-3)}, r"lrs must hold.*each once"),
        ({"steps": 0}, "steps must be a whole number >= 1, got 0"),
        ({"evaluations": 0}, "evaluations must be a whole number >= 1, got 0"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"width": 100, "heads": 3}, "width must be a multiple of"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        DemoConfig(**changes)


def test_the_defaults_are_those_of_the_readme():
    """Six runs of 300 steps at width 128; its figures are of these settings."""
    config = DemoConfig().comparison("data")
    assert (config.compare.arms, config.compare.lrs) == (("AdamW", "SEL"), (1.5e-3, 3e-3, 6e-3))
    assert dataclasses.astuple(config.model) == (128, 4, 4, 256, 128, False, True, "xavier_uniform")
    assert (config.train.steps, config.train.warmup_steps, config.train.eval_every) == (300, 30, 25)
    assert (config.compute.device, config.compute.autocast, config.log.tensorboard) == ("cpu", "off", False)
