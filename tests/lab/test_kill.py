"""Kill -9 `train` and `prepare` at random moments, also while a file is half-written: they go on to the same bits."""

import dataclasses
import random
import signal
import time

import pytest

import parallel_runs
import processes
from corpora import TEXTS, prepare_slowly
from run_folders import TRAIN, tiny
from symexplin.lab.data.prepare import PrepareConfig
from symexplin.lab.model import ModelConfig
from symexplin.lab.settings import to_table

pytestmark = pytest.mark.slow
DICE = random.Random(0)


def finish(*job):
    process = processes.start(*job)
    process.join()
    assert process.exitcode == 0


def kill(job, when, wait):
    """Kill the process of a job a while after when() is true; return whether it was still there."""
    process = processes.start(*job)
    while not when() and process.is_alive():
        time.sleep(0.0005)
    time.sleep(DICE.uniform(0, wait))
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def assert_same(folder, expected, names):
    for name in names:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), (folder, name)
    assert not [*folder.rglob("*.tmp"), *folder.rglob(".unfinished")]


def kill_training(data, home, folder):
    """Return how many of three kills left a checkpoint half-written."""
    model, schedule = ModelConfig(width=32, depth=1, heads=2, context=16), dataclasses.replace(TRAIN, steps=40)
    table = to_table(tiny(data, home, model=model, train=schedule))
    whole, out, half = folder / "whole", folder / "killed", 0
    finish(parallel_runs.go_on, table, whole)
    for when, wait in (
        (lambda: True, 0.3),
        (lambda: any(out.glob("checkpoints/*.tmp")), 0),
        (lambda: any(out.glob("checkpoints/step-*9")), 0.05),
    ):
        kill((parallel_runs.go_on, table, out), when, wait)
        half += any(out.glob("checkpoints/*.tmp"))
    finish(parallel_runs.go_on, table, out)
    assert_same(out, whole, ("metrics.jsonl", "model.safetensors"))
    return half


def test_kills_of_training_change_no_bit(data, tmp_path):
    half = [kill_training(data, home, tmp_path / home) for home in ("optimizer", "module")]
    assert sum(half) > 0  # some kills came while a file was half-written


def test_kills_of_preparing_change_no_bit(tmp_path):
    (tmp_path / "text").write_bytes("\0".join(TEXTS * 3).encode())
    config, out, half = PrepareConfig((str(tmp_path / "text"),), vocab_size=400), tmp_path / "killed", 0
    finish(prepare_slowly, config, tmp_path / "whole")
    for name in (".lock", ".unfinished", "tokenizer.json", "train.npy", "valid.npy"):

        def begun(places=(out / name, out / ".unfinished" / name)):
            return any(place.exists() for place in places)

        if not kill((prepare_slowly, config, out), begun, 0.002):
            out.rename(tmp_path / f"finished-{name}")
        half += (out / ".unfinished").exists()
    assert half > 0
    finish(prepare_slowly, config, out)
    for ended in (out, *tmp_path.glob("finished-*")):
        assert_same(ended, tmp_path / "whole", ("dataset.json", "tokenizer.json", "train.npy", "valid.npy"))
