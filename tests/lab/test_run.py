import dataclasses
import gc
import json
import math
import os
import resource
import shutil
import signal
import weakref

import pytest

from corpora import TEXTS, prepared
from run_folders import CURVES, TRAIN, break_off, tiny
from symexplin.lab.checkpoint import newest
from symexplin.lab.config import LogConfig, RunConfig
from symexplin.lab.data.batches import Corpus, eval_batches
from symexplin.lab.evaluate import evaluate
from symexplin.lab.files import read_json_lines
from symexplin.lab.model import ModelConfig
from symexplin.lab.process import Stopped
from symexplin.lab.run import train
from symexplin.lab.settings import from_table, load_toml
from symexplin.lab.train import NonFiniteError, Trainer
from symexplin.lab.weights import load_model

FILES = {"config.toml", "run.json", "metrics.jsonl", "timing.jsonl", "result.json", "model.safetensors"}
FILES |= {"tokenizer.json", "checkpoints", ".lock"}


def bits(folder, *names):
    """What must be the same after a resumed run, by file."""
    names = names or ("metrics.jsonl", "model.safetensors", "config.toml")
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The uninterrupted run of each kind."""
    folders = {}
    for curve in CURVES:
        folders[curve] = tmp_path_factory.mktemp("whole") / curve
        train(tiny(data, curve), folders[curve])
    return folders


@pytest.mark.parametrize("curve", CURVES)
def test_a_run_leaves_what_it_promises(whole, data, curve):
    folder = whole[curve]
    assert {path.name for path in folder.iterdir()} == FILES
    records = read_json_lines(folder / "metrics.jsonl")
    assert [(r["step"], r["tokens"]) for r in records if "loss" in r] == [(step, 32 * step) for step in range(1, 11)]
    evals = [(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r]
    assert [step for step, _ in evals] == [0, 4, 8, 10]
    assert evals[-1][1] < evals[0][1]
    assert ("stats" in records[-1]) == (curve != "none")
    assert [r["step"] for r in read_json_lines(folder / "timing.jsonl")] == [0, 4, 8, 10]
    assert json.loads((folder / "result.json").read_text())["loss"] == evals[-1][1]
    assert [path.name for path in newest(folder)] == ["step-00000010", "step-00000009"]
    model = load_model(folder / "model.safetensors")
    held_out = eval_batches(Corpus.load(data).valid, 8, 4, 2)
    assert evaluate(model, held_out) == pytest.approx(evals[-1][1], rel=0 if curve != "module" else 1e-6)


def test_the_saved_configuration_runs_the_same(whole, tmp_path):
    config, lines = from_table(RunConfig, load_toml(whole["optimizer"] / "config.toml")), []
    train(config, tmp_path / "again", echo=lines.append)
    assert bits(tmp_path / "again") == bits(whole["optimizer"])
    assert "step 10/10, loss " in lines[-2]
    assert lines[-1].endswith(f" nats per token; plain weights: {tmp_path / 'again' / 'model.safetensors'}")


def test_the_memory_of_a_model_is_free_when_its_run_has_ended(data, tmp_path, monkeypatch):
    models = []

    def watch(trainer, *given, before=Trainer.__init__):
        before(trainer, *given)
        models.append(weakref.ref(trainer.model))

    monkeypatch.setattr(Trainer, "__init__", watch)
    gc.disable()  # it would find a cycle some time later
    try:
        train(tiny(data, "optimizer"), tmp_path / "run")
        assert [model() for model in models] == [None]
    finally:
        gc.enable()


def test_a_finished_run_is_not_trained_again_and_not_overwritten(data, whole, tmp_path, monkeypatch):
    folder, lines = shutil.copytree(whole["none"], tmp_path / "run"), []
    with pytest.raises(ValueError, match="add --resume"):
        train(tiny(data), folder)
    summary = json.loads((folder / "result.json").read_text())
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", None)
        assert train(tiny(data), folder, resume=True, echo=lines.append) == summary
        assert "has finished already" in lines[-1]
        for lost in ("result.json", "model.safetensors"):  # a kill between the two
            (folder / lost).unlink()
            assert train(tiny(data), folder, resume=True)["loss"] == summary["loss"]
    assert bits(folder) == bits(whole["none"])


def test_another_configuration_is_refused_with_all_differences(data, whole, tmp_path):
    before = bits(whole["optimizer"])
    other = tiny(data, train=dataclasses.replace(TRAIN, steps=12, lr=2e-2))
    with pytest.raises(ValueError, match="out must be a new folder for another configuration") as error:
        train(other, whole["optimizer"], resume=True)
    for words in ("train.steps was 10, is 12 now", "train.lr was 0.01, is 0.02 now", "sel.home was 'optimizer'"):
        assert words in str(error.value)
    with pytest.raises(ValueError, match="with a run whose data had other tokens"):
        train(tiny(prepared(tmp_path, [*TEXTS, "one more"]), "optimizer"), whole["optimizer"], resume=True)
    assert bits(whole["optimizer"]) == before


def test_paths_logging_and_machine_may_change_and_the_rounding_is_told(data, whole, tmp_path, monkeypatch):
    folder, moved, lines = tmp_path / "run", tmp_path / "moved", []
    shutil.copytree(data, moved)
    break_off(tiny(data), folder, monkeypatch, step=8)
    log = LogConfig(checkpoint_every=1, keep=1, tensorboard=False)
    train(tiny(str(moved), log=log), folder, resume=True)
    results = ("metrics.jsonl", "model.safetensors")
    assert bits(folder, *results) == bits(whole["none"], *results)
    assert len(newest(folder)) == 1
    (folder / "result.json").unlink()
    recompute = dataclasses.replace(tiny(data).compute, recompute=True)
    train(tiny(data, compute=recompute), folder, resume=True, echo=lines.append)
    assert "compute.recompute was False, is True now: rounding will differ" in lines


def test_nothing_is_written_before_the_data_are_read_and_the_model_fits(data, tmp_path):
    shapes = [{"context": 9000}, {"width": 10**11, "context": 8}]
    broken = [tiny(data, model=ModelConfig(**{"width": 16, "depth": 1, "heads": 2, **shape})) for shape in shapes]
    for config in (tiny(str(tmp_path / "nowhere")), *broken):
        with pytest.raises((ValueError, OSError, RuntimeError)):
            train(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_signal_saves_and_stops(data, whole, tmp_path, monkeypatch):
    folder, update = tmp_path / "run", Trainer.update

    def update_and_signal(self):
        record = update(self)
        if self.step == 5:
            signal.raise_signal(signal.SIGTERM)
        return record

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", update_and_signal)
        with pytest.raises(Stopped, match=r"after step 5, saved in .*step-00000005; --resume continues") as stopped:
            train(tiny(data), folder)
    assert stopped.value.signal == signal.SIGTERM
    train(tiny(data), folder, resume=True)
    assert bits(folder) == bits(whole["none"])


def test_a_failure_after_a_signal_is_the_signal(data, tmp_path, monkeypatch):
    """Ctrl-C reaches a compiler that torch has started, too, and its death must not look like an error."""

    def update(_):
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("the compiler died")

    monkeypatch.setattr(Trainer, "update", update)
    with pytest.raises(Stopped, match="during step 1; --resume continues at step 0"):
        train(tiny(data), tmp_path / "run")


def test_a_planted_nan_ends_the_run_and_names_step_and_checkpoint(data, whole, tmp_path, monkeypatch):
    folder, update = tmp_path / "run", Trainer.update

    def plant(self):
        if self.step == 7:
            self.model.blocks[0].ffn.up.weight.data[0, 0] = math.nan
        return update(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", plant)
        words = r"step 8: loss is nan.*; all layers have a non-finite gradient; --resume continues from .*step-00000006"
        with pytest.raises(NonFiniteError, match=words):
            train(tiny(data), folder)
    *_, last = read_json_lines(folder / "metrics.jsonl")
    assert last["step"] == 8
    assert "loss is nan" in last["error"]
    assert json.loads((folder / "result.json").read_text())["step"] == 8
    assert not (folder / "model.safetensors").exists()
    train(tiny(data), folder, resume=True)  # if it was the machine and not the settings
    assert bits(folder) == bits(whole["none"])


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
@pytest.mark.parametrize("size", [500, 20_000, 60_000])
def test_a_full_disk_is_told_with_the_file_and_the_run_resumes(data, whole, tmp_path, size):
    """The metrics, the checkpoint or the final weights do not fit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        with pytest.raises(OSError, match="arge") as error:
            train(tiny(data), tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert str(tmp_path / "run") in f"{error.value.filename} {error.value}"
    assert not list(tmp_path.rglob("*.tmp"))
    train(tiny(data), tmp_path / "run", resume=True)
    assert bits(tmp_path / "run") == bits(whole["none"])
