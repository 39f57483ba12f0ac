import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from symexplin.lab.checkpoint import newest
from symexplin.lab.compare.pool import Task, train_all
from symexplin.lab.config import ComputeConfig, LogConfig, RunConfig, TrainConfig
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig

STEPS = 2000  # more than a test waits for


def task(data, folder, steps, lr=1e-3):
    config = RunConfig(
        data,
        ModelConfig(width=16, depth=1, heads=2, context=16),
        TrainConfig(steps=steps, batch_size=4, lr=lr, warmup_steps=1, eval_every=1, eval_batches=2),
        CurveConfig(home="none"),
        ComputeConfig(device="cpu", threads=1),
        LogConfig(tensorboard=False),
    )
    return Task(folder.name, config, folder)


def steps_of(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_after_the_other(data, tmp_path):
    """A run that breaks down ends, like the others."""
    tasks = [task(data, tmp_path / "a", 2), task(data, tmp_path / "b", 2, lr=1e30), task(data, tmp_path / "c", 2)]
    lines = []
    assert list(train_all(tasks, 1, lines.append, progress=False)) == [0, 1, 2]
    assert [line for line in lines if line.startswith("c: ")] == lines[-3:]
    assert {line[:2] for line in lines} == {"a:", "b:", "c:"}
    assert "error" in json.loads((tmp_path / "b" / "summary.json").read_text())
    assert steps_of(tmp_path / "c")[-1] == 2


@pytest.mark.slow
def test_side_by_side(data, tmp_path):
    tasks = [task(data, tmp_path / name, 2, lr) for name, lr in (("a", 1e-3), ("b", 1e30), ("c", 1e-3))]
    lines = []
    assert sorted(train_all(tasks, 2, lines.append, progress=False)) == [0, 1, 2]
    assert {line[:2] for line in lines} == {"a:", "b:", "c:"}
    assert "error" in json.loads((tmp_path / "b" / "summary.json").read_text())
    assert steps_of(tmp_path / "c")[-1] == 2
    assert not multiprocessing.active_children()


SCRIPT = """
import pathlib, signal, sys
sys.path.insert(0, sys.argv[1])
from symexplin.lab.stop import Stopped
from test_pool import STEPS, task, train_all

if __name__ == "__main__":
    tasks = [task(sys.argv[2], pathlib.Path(name), STEPS) for name in ("a", "b")]
    try:
        list(train_all(tasks, 2, lambda _: signal.raise_signal(signal.SIGTERM), progress=False))
    except Stopped as stopped:
        print(stopped)
"""


@pytest.mark.slow
def test_a_signal_leaves_nothing_behind(data, tmp_path):
    """Workers that were killed would leave semaphores, of which the tracker of resources complains at the end."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", str(Path(__file__).parent), data]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}  # of corpora.py
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True, env=path)
    assert "SIGTERM with all runs saved" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_one_failure_stops_the_others_saved(data, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    tasks = [task(data, tmp_path / "a", STEPS), task(data, tmp_path / "b", STEPS), task(data, tmp_path / "c", STEPS)]
    with pytest.raises(ValueError, match=r"out must be a new folder.*notes\.txt"):
        list(train_all(tasks, 2, lambda _: None, progress=False))
    assert not (tmp_path / "c").exists()  # it had not begun
    assert (tmp_path / "a").exists() == bool(newest(tmp_path / "a"))
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_the_death_of_a_worker_is_told(data, tmp_path):
    def kill(_):
        for process in multiprocessing.active_children():
            process.kill()

    tasks = [task(data, tmp_path / "a", STEPS), task(data, tmp_path / "b", STEPS)]
    with pytest.raises(ChildProcessError, match=r"a worker process ended unexpectedly.*--resume"):
        list(train_all(tasks, 2, kill, progress=False))
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_second_interrupt_ends_all_at_once(data, tmp_path):
    def interrupt(_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    tasks = [task(data, tmp_path / "a", STEPS), task(data, tmp_path / "b", STEPS)]
    with pytest.raises(KeyboardInterrupt):
        list(train_all(tasks, 2, interrupt, progress=False))
    assert not multiprocessing.active_children()
