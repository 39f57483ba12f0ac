import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from symexplin.lab.checkpoint import newest
from symexplin.lab.compare.launch import Training, check_slurm, run_here, run_side_by_side
from symexplin.lab.config import ComputeConfig, LogConfig, RunConfig, TrainConfig
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig

STEPS = 20_000  # more than a test waits for


def task(data, folder, steps, lr=1e-3):
    config = RunConfig(
        data,
        ModelConfig(width=16, depth=1, heads=2, context=16),
        TrainConfig(steps=steps, batch_size=4, lr=lr, warmup_steps=1, eval_every=1, eval_batches=2),
        CurveConfig(home="none"),
        ComputeConfig(device="cpu", threads=1),
        LogConfig(tensorboard=False),
    )
    return Training(folder.name, config, folder)


def long_runs(data, out, names="ab"):
    return [task(data, out / "runs" / name, STEPS) for name in names]


def error_of(folder):
    return json.loads((folder / "summary.json").read_text())["error"]


def test_runs_end_and_one_that_is_not_finite_is_no_failure(data, tmp_path):
    tasks = [task(data, tmp_path / name, 2, lr) for name, lr in (("a", 1e-3), ("b", 1e30), ("c", 1e-3))]
    lines = []
    assert list(run_here(tasks, lines.append, progress=False)) == [0, 1, 2]
    assert {line.partition(": ")[0] for line in lines} == {"a", "b", "c"}
    assert lines[-1].startswith("c: step 2/2, loss ")
    assert "loss is" in error_of(tmp_path / "b")


@pytest.mark.slow
def test_a_failure_stops_the_others_saved(data, tmp_path):
    """Run b is not finite, which is no failure; c, which begins when b has ended, fails; d has not begun."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes.txt").write_text("mine")
    tasks = [task(data, tmp_path / name, STEPS, 1e30 if name == "b" else 1e-3) for name in "abcd"]
    lines = []
    with pytest.raises(ChildProcessError, match=r"^c: out must be a new folder.*notes\.txt.*c\.log"):
        list(run_side_by_side(tasks, tmp_path, 2, lines.append))
    assert "loss is" in error_of(tmp_path / "b")
    assert "loss is" in (tmp_path / "processes" / "b.log").read_text()
    assert newest(tmp_path / "a")
    assert not (tmp_path / "a" / "summary.json").exists()
    assert any(line.startswith(f"a: step 1/{STEPS}, loss ") for line in lines)
    assert not (tmp_path / "d").exists()


@pytest.mark.slow
def test_the_death_of_a_process_is_told_and_a_second_interrupt_ends_all_at_once(data, tmp_path, monkeypatch):
    started = []
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **kwargs: started.append(start(*args, **kwargs)) or started[-1]
    )
    with pytest.raises(ChildProcessError, match=r"ended by SIGKILL.*--resume"):
        list(run_side_by_side(long_runs(data, tmp_path, "a"), tmp_path, 2, lambda _: started[0].kill()))

    def interrupt(_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        list(run_side_by_side(long_runs(data, tmp_path, "b"), tmp_path, 2, interrupt))
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


SCRIPT = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from test_launch import long_runs, run_side_by_side

out = pathlib.Path(sys.argv[3])
list(run_side_by_side(long_runs(sys.argv[2], out), out, 2, lambda line: print(line, flush=True)))
"""


@pytest.mark.slow
def test_processes_end_with_a_killed_comparison(data, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), data, str(tmp_path)]
    path = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=path) as process:
        seen = set()
        for line in process.stdout:
            seen.add(line[:2])
            if seen == {"a:", "b:"}:
                process.kill()
    for name in ("a", "b"):
        with filelock.FileLock(tmp_path / "runs" / name / ".lock", timeout=5):
            assert newest(tmp_path / "runs" / name)  # saved
            assert not (tmp_path / "runs" / name / "summary.json").exists()


def test_a_machine_without_slurm_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"cluster must be 'none' where Slurm is not installed|needs submitit"):
        check_slurm()
