"""Runs in processes; what their commands do here is a few lines of Python."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque

import pytest

from symexplin.lab.compare import launch
from symexplin.lab.compare.grid import ClusterConfig
from symexplin.lab.compare.launch import EXAMPLE, Task, execute, has_ended
from symexplin.lab.process import Stopped

ENDS = "import pathlib; print('train: step 1'); pathlib.Path('{}', 'result.json').touch()"
FAILS = "import sys; print('one\\ntwo\\nthree'); sys.exit('four')"
WAITS = "import time; print('train: begun', flush=True); time.sleep(60)"
SAVES = (
    "import os, pathlib, signal, time\n"
    "patience = os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT']\n"
    "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('{}', 'saved').write_text(patience), exit(1)))\n"
    "print('train: begun', flush=True)\n"
    "time.sleep(60)"
)


def task(folder, code, **wishes):
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", code.replace("{}", str(folder))]
    return Task(folder.name, folder, command, ClusterConfig(**wishes), cwd=str(folder))


def run(tasks, jobs, echo=lambda _: None):
    """Return {name of a run: why it failed}."""
    return {task.label: reason for task, reason in execute(deque(tasks), jobs, None, echo)}


def interrupt(_):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def tasks(out, **codes):
    return [task(out / "runs" / name, code) for name, code in codes.items()]


def test_runs_end_side_by_side_and_a_failing_one_gives_its_last_lines(tmp_path):
    lines = []
    own_error = "import sys; sys.exit('symexplin: error: lr must be small')"
    work = tasks(tmp_path, a=ENDS, b=FAILS, c="pass", d=own_error)
    log = tmp_path / "processes"
    assert run(work, 2, lines.append) == {
        "a": None,
        "b": f"its command failed with status 1: two / three / four (see {log / 'b.log'})",
        "c": f"it ended without {str(work[2].result)!r}, such as {EXAMPLE}: no output (see {log / 'c.log'})",
        "d": f"its command failed with status 1: lr must be small (see {log / 'd.log'})",
    }
    assert lines == ["a: step 1"]
    assert 0 < json.loads((log / "a.json").read_text())["seconds"] < 60


def test_a_signal_reaches_every_process_of_the_runs_and_starts_no_other(tmp_path):
    def stop(_, heard=[]):  # noqa: B006 (both runs have begun)
        heard.append(1)
        if len(heard) == 2:
            signal.raise_signal(signal.SIGTERM)

    first, *others = tasks(tmp_path, a=SAVES, b=SAVES, c=ENDS)
    in_a_shell = first._replace(command=["sh", "-c", '"$@"; true', "sh", *first.command])
    with pytest.raises(Stopped, match="SIGTERM with all its runs; --resume"):
        run([in_a_shell, *others], 2, stop)
    deadline = time.monotonic() + 5
    while not (first.folder / "saved").exists():  # its shell ends first
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [(task.folder / "saved").exists() for task in others] == [True, False]
    assert not others[1].result.exists()


def ended(work):
    return [has_ended(task.folder) for task in work]


def test_a_result_of_a_command_does_not_count_unless_its_process_ended_with_status_0(tmp_path):
    """A program may write its result at each evaluation; a run of the laboratory writes it last."""
    early = "import pathlib, sys; pathlib.Path('{}', 'result.json').touch(); print('train: begun', flush=True); "
    fails = early.replace("touch()", 'write_text(\'{"error": "nan"}\')') + "sys.exit('three')"
    work = tasks(tmp_path, a=early, b=fails, c=fails)
    work[2] = work[2]._replace(cwd=None)
    log = work[1].file(".log")
    said = f"its command failed with status 1: train: begun / three (see {log})"
    assert run(work, 2) == {"a": None, "b": said, "c": None}
    assert ended(work) == [True, False, True]

    saves = f"import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); {early}import time; time.sleep(60)"
    work = tasks(tmp_path, a=saves, b=saves, d=saves)  # a has ended well before
    with pytest.raises(Stopped):
        run(work[:1], 2, lambda _: signal.raise_signal(signal.SIGTERM))
    started, start = [], subprocess.Popen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[-1])
        run(work[1:2], 2, lambda _: started[0].kill())
    with pytest.raises(KeyboardInterrupt):
        run(work[2:3], 1, interrupt)
    assert ended(work) == [False, False, False]
    assert run([task(work[0].folder, "pass")], 1)["a"].startswith("it ended without ")  # a's is removed


def test_the_death_of_a_process_is_told_and_a_second_interrupt_ends_all_at_once(tmp_path, monkeypatch):
    started, start = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[-1])
    (reason,) = run(tasks(tmp_path, a=WAITS), 2, lambda _: started[0].kill()).values()
    assert reason == "signal 9 killed its process, perhaps for lack of memory (try fewer --jobs)"

    with pytest.raises(KeyboardInterrupt):
        run(tasks(tmp_path, b=WAITS), 2, interrupt)
    assert started[1].returncode == -signal.SIGKILL


def test_runs_beside_one_that_ends_the_comparison_save_themselves(tmp_path):
    begun = deque(tasks(tmp_path, a=SAVES, b="import time; time.sleep(2); exit('no')"))
    with contextlib.closing(execute(begun, 2, None, lambda _: None)) as ended:
        assert "status 1: no" in next(ended)[1]
    assert (tmp_path / "runs" / "a" / "saved").exists()


def test_a_run_that_goes_on_after_sigterm_is_killed_and_one_with_a_timeout_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_PATIENCE", 0.5)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS
    with pytest.raises(Stopped):
        run(tasks(tmp_path, a=deaf), 1, lambda _: signal.raise_signal(signal.SIGTERM))
    ended = execute(deque(tasks(tmp_path, b=SAVES)), 1, 0.02, lambda _: None)
    assert [reason for _, reason in ended] == ["it took longer than --timeout 0.02 minutes, and was stopped"]
    assert (tmp_path / "runs" / "b" / "saved").exists()


def program(monkeypatch, folder, name, text):
    """Put a shell script first on the path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_each_run_has_gpus_of_its_own(tmp_path, monkeypatch):
    """A run on two of them takes the place of two."""
    monkeypatch.setattr(launch, "cores", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program(monkeypatch, tmp_path / "bin", "nvidia-smi", "test $1 = --query-gpu=uuid && echo GPU-0a && echo GPU-1b")
    assert launch.gpus_here() == ["GPU-0a", "GPU-1b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert launch.gpus_here() == ["3", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    tells = "import os, pathlib, time; time.sleep(0.5); p = pathlib.Path('{}', 'result.json')\n"
    tells += "p.write_text(os.environ.get('CUDA_VISIBLE_DEVICES', 'none'))"
    work = [task(tmp_path / "runs" / name, tells, gpus=gpus) for name, gpus in {"a": 1, "b": 1, "both": 2}.items()]
    run(work, 2)
    assert [task.result.read_text() for task in work] == ["GPU-0a", "GPU-1b", "GPU-0a,GPU-1b"]
    run([task(tmp_path / "runs" / "alone", tells)], 1)
    assert (tmp_path / "runs" / "alone" / "result.json").read_text() == "none"  # it may use them all
