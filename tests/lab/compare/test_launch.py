"""Runs in processes and as jobs of Slurm; what the commands do here is a few lines of Python."""

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
from symexplin.lab.compare.grid import ClusterConfig, GridConfig
from symexplin.lab.compare.launch import EXAMPLE, SlurmJob, Task, check_executor, execute, has_ended
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


def run(tasks, out, jobs, echo=lambda _: None, cluster="none"):
    """Return {name of a run: why it failed}."""
    ended = execute(deque(tasks), out, GridConfig(jobs=jobs, cluster=cluster), echo)
    return {task.label: reason for task, reason in ended}


def interrupt(_):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def end(task):
    """End a run as its job would."""
    task.result.touch()
    task.file(".json").write_text("{}")


def tasks(out, **codes):
    return [task(out / "runs" / name, code) for name, code in codes.items()]


def test_runs_end_side_by_side_and_a_failing_one_gives_its_last_lines(tmp_path):
    lines = []
    own_error = "import sys; sys.exit('symexplin: error: lr must be small')"
    work = tasks(tmp_path, a=ENDS, b=FAILS, c="pass", d=own_error)
    log = tmp_path / "processes"
    assert run(work, tmp_path, 2, lines.append) == {
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
        run([in_a_shell, *others], tmp_path, 2, stop)
    deadline = time.monotonic() + 5
    while not (first.folder / "saved").exists():  # its shell ends first
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [(task.folder / "saved").exists() for task in others] == [True, False]
    assert not others[1].result.exists()


def ended(work):
    return [has_ended(task.folder) for task in work]


def test_a_result_does_not_count_unless_its_process_ended_with_status_0_or_it_is_an_error(tmp_path):
    """A program may write its result at each evaluation."""
    early = "import pathlib, sys; pathlib.Path('{}', 'result.json').touch(); print('train: begun', flush=True); "
    diverged = early.replace("touch()", 'write_text(\'{"error": "nan"}\')')
    work = tasks(tmp_path, a=early, b=early + "sys.exit('three')", c=diverged + "sys.exit('three')")
    log = work[1].file(".log")
    said = f"its command failed with status 1 after it wrote result.json: train: begun / three (see {log})"
    assert run(work, tmp_path, 2) == {"a": None, "b": said, "c": None}
    assert ended(work) == [True, False, True]

    saves = f"import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); {early}import time; time.sleep(60)"
    work = tasks(tmp_path, a=saves, b=saves, d=saves)  # a has ended well before
    with pytest.raises(Stopped):
        run(work[:1], tmp_path, 2, lambda _: signal.raise_signal(signal.SIGTERM))
    started, start = [], subprocess.Popen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[-1])
        run(work[1:2], tmp_path, 2, lambda _: started[0].kill())
    with pytest.raises(KeyboardInterrupt):
        run(work[2:3], tmp_path, 1, interrupt)
    assert ended(work) == [False, False, False]
    assert run([task(work[0].folder, "pass")], tmp_path, 1)["a"].startswith("it ended without ")  # a's is removed


def test_the_death_of_a_process_is_told_and_a_second_interrupt_ends_all_at_once(tmp_path, monkeypatch):
    started, start = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[-1])
    (reason,) = run(tasks(tmp_path, a=WAITS), tmp_path, 2, lambda _: started[0].kill()).values()
    assert reason == "SIGKILL killed its process, perhaps for lack of memory (try fewer --jobs)"

    with pytest.raises(KeyboardInterrupt):
        run(tasks(tmp_path, b=WAITS), tmp_path, 2, interrupt)
    assert started[1].returncode == -signal.SIGKILL


def test_runs_beside_one_that_ends_the_comparison_save_themselves(tmp_path):
    begun = deque(tasks(tmp_path, a=SAVES, b="import time; time.sleep(2); exit('no')"))
    with contextlib.closing(execute(begun, tmp_path, GridConfig(jobs=2), lambda _: None)) as ended:
        assert "status 1: no" in next(ended)[1]
    assert (tmp_path / "runs" / "a" / "saved").exists()


def test_a_run_that_goes_on_after_sigterm_is_killed_and_one_with_a_timeout_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_PATIENCE", 0.5)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS
    with pytest.raises(Stopped):
        run(tasks(tmp_path, a=deaf), tmp_path, 1, lambda _: signal.raise_signal(signal.SIGTERM))
    ended = execute(deque(tasks(tmp_path, b=SAVES)), tmp_path, GridConfig(timeout=0.02), lambda _: None)
    assert [reason for _, reason in ended] == ["it took longer than --timeout 0.02 minutes, and was stopped"]
    assert (tmp_path / "runs" / "b" / "saved").exists()


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path):
    number = signal.SIGRTMIN + 5
    (reason,) = run(tasks(tmp_path, a=f"import os; os.kill(os.getpid(), {number})"), tmp_path, 1).values()
    assert reason.startswith(f"signal {number} killed its process")


def test_what_this_machine_cannot_execute_is_told(monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda: 2)
    check_executor(GridConfig(jobs=2))
    with pytest.raises(ValueError, match=r"jobs must be at most 2, the cores available to this process, got 3"):
        check_executor(GridConfig(jobs=3))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"cluster must be 'none' on a machine without Slurm|needs submitit"):
        check_executor(GridConfig(cluster="slurm"))


def program(monkeypatch, folder, name, text):
    """Put a shell script first on the path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_each_run_has_gpus_of_its_own(tmp_path, monkeypatch):
    """Of three GPUs one is in two parts; a run on two of the four takes the place of two."""
    monkeypatch.setattr(launch, "cores", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    listed = "GPU 0: NVIDIA H100 (UUID: GPU-0a)\nGPU 1: NVIDIA H100 (UUID: GPU-1b)"
    program(monkeypatch, tmp_path / "bin", "nvidia-smi", f"test $1 = -L && echo '{listed}'")
    assert launch.gpus_here() == ["GPU-0a", "GPU-1b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert launch.gpus_here() == ["3", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    parts = f"{listed}\n  MIG 1g.10gb Device 0: (UUID: MIG-2c)\n  MIG 1g.10gb Device 1: (UUID: MIG-3d)"
    program(monkeypatch, tmp_path / "bin", "nvidia-smi", f"echo '{parts}'")
    tells = "import os, pathlib, time; time.sleep(0.5); p = pathlib.Path('{}', 'result.json')\n"
    tells += "p.write_text(os.environ.get('CUDA_VISIBLE_DEVICES', 'none'))"
    asked = {"a": {}, "b": {}, "both": {"gpus": 2}, "plain": {}}
    work = [
        task(tmp_path / "runs" / name, tells, **wishes)._replace(on_gpu=name != "plain")
        for name, wishes in asked.items()
    ]
    run(work, tmp_path, 2)
    assert [task.result.read_text() for task in work] == ["MIG-2c", "MIG-3d", "MIG-2c,MIG-3d", "none"]
    run([task(tmp_path / "runs" / "alone", tells)._replace(on_gpu=True)], tmp_path, 1)
    assert (tmp_path / "runs" / "alone" / "result.json").read_text() == "none"  # it may use them all


def test_jobs_are_submitted_as_an_array_for_each_wish_and_a_refusal_is_told(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(launch, "_GLANCE", 0.05)
    for name in ("srun", "squeue"):
        program(monkeypatch, tmp_path / "bin", name, "")
    submit = f"n=$(ls {tmp_path}/script* 2>/dev/null | wc -l); cp $1 {tmp_path}/script$n; echo Submitted batch job 7$n"
    program(monkeypatch, tmp_path / "bin", "sbatch", submit)
    wishes = {"partition": "wide", "cpus": 3, "walltime": 20, "memory": 4, "sbatch": {"qos": "low"}}
    work = [task(tmp_path / "runs" / name, ENDS, **wishes, gpus=gpus) for name, gpus in (("a", 1), ("b", 8), ("c", 1))]
    reasons = run(work, tmp_path, None, cluster="slurm")
    assert {name: reason.partition(" ended")[0] for name, reason in reasons.items()} == {
        **{"a": "job 70_0", "c": "job 70_1"},
        "b": "job 71",
    }

    def asked(number):
        text = (tmp_path / f"script{number}").read_text()
        return {line.removeprefix("#SBATCH --") for line in text.splitlines()}

    everywhere = {"partition=wide", "cpus-per-task=3", "time=20", "mem=4G", "qos=low", "requeue"}
    assert everywhere | {"array=0-1%2", "gpus-per-node=1"} <= asked(0)
    assert everywhere | {"gpus-per-node=8"} <= asked(1)
    run(tasks(tmp_path, d=ENDS, e=ENDS, f=ENDS), tmp_path, 2, cluster="slurm")
    assert "array=0-2%2" in asked(2)
    program(monkeypatch, tmp_path / "bin", "sbatch", "echo sbatch: error: invalid partition >&2; exit 1")
    with pytest.raises(ValueError, match=r"\[cluster\] must suit this cluster, but .*invalid partition"):
        run(tasks(tmp_path, g=ENDS), tmp_path, 2, cluster="slurm")


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """A squeue that prints the file which is returned, and jobs that are numbered from 7_0 on, and never begin."""
    file, submitted = tmp_path / "queue", []
    unknown = "{ echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }"
    program(monkeypatch, tmp_path / "bin", "squeue", f"test -s {file} && cat {file} || {unknown}")
    file.write_text("")
    monkeypatch.setattr(launch, "_GLANCE", 0.05)
    monkeypatch.setattr(launch, "_TICK", 0.01)

    def submit(new, *_):
        submitted.append([task.folder.name for task in new])
        return [f"{6 + len(submitted)}_{index}" for index in range(len(new))]

    monkeypatch.setattr(launch, "_submit", submit)
    return file, submitted


def test_jobs_are_followed_and_those_of_an_earlier_comparison_taken_up(tmp_path, queue, monkeypatch):
    file, submitted = queue
    work, lines = tasks(tmp_path, a=ENDS, b=ENDS), []

    def go_on(line):
        lines.append(line)
        steps = {
            "a: job 7_0 runs on node1": "7_0|PENDING|1||\n7_1|RUNNING|0|node2|\n",
            "a: job 7_0 was requeued": "7_1|RUNNING|0|node2|\n",
        }
        if line.endswith("logs in " + str(tmp_path / "cluster")):
            file.write_text("7_0|RUNNING|0|node1|\n7_1|PENDING|0||\n")
        elif line in steps:
            file.write_text(steps[line])
        if "requeued" in line:
            end(work[0])
        if line == "b: job 7_1 runs on node2":
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped, match="SIGTERM while jobs continue: --resume waits for them, 'scancel 7' ends them"):
        run(work, tmp_path, 2, go_on, cluster="slurm")
    assert lines[1:3] == ["a: job 7_0 runs on node1", "a: job 7_0 was requeued"]

    (tmp_path / "cluster" / "7_1_0_log.err").write_text("CUDA error: out of memory\n")
    file.write_text("7_1|RUNNING|0|node2|\n")
    again = run(work[1:], tmp_path, 2, lambda line: file.write_text("") if "runs" in line else 0, cluster="slurm")
    assert again["b"].startswith("job 7_1 ended without its result: CUDA error: out of memory")
    assert submitted == [["a", "b"]]
    run(work[1:], tmp_path, 2, lambda _: end(work[1]), cluster="slurm")
    assert submitted == [["a", "b"], ["b"]]

    # A comparison that stops at its first run cancels the others; runs that it adds are submitted meanwhile.
    cancelled = tmp_path / "cancelled"
    program(monkeypatch, tmp_path / "bin", "scancel", f"echo $* > {cancelled}")
    waiting = deque(tasks(tmp_path, c=ENDS, d=ENDS))
    with contextlib.closing(execute(waiting, tmp_path, GridConfig(cluster="slurm"), lambda _: None)) as ended:
        end(waiting[0])
        assert next(ended)[0].label == "c"
        waiting.extend(tasks(tmp_path, e=ENDS))
        end(waiting[0])
        while next(ended)[0].label != "e":
            pass
    assert submitted[2:] == [["c", "d"], ["e"]]
    assert cancelled.read_text() == "9_1\n"


def test_a_preempted_job_saves_its_run_and_executes_the_same_again(tmp_path):
    pytest.importorskip("submitit")
    run, again = task(tmp_path / "runs" / "a", SAVES), []
    job = SlurmJob(run)

    def preempt(*_):
        os.kill(job._number, signal.SIGUSR2)  # Slurm sends submitit's signal to the run, too
        again.append(job.checkpoint())

    before = signal.signal(signal.SIGALRM, preempt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1)
        with pytest.raises(SystemExit):
            job()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (run.folder / "saved").read_text() == "300"
    assert again[0].function is job


@pytest.mark.parametrize(("text", "status"), [("{}", 0), ("{}", 3), ('{"error": "nan"}', 3)])
def test_a_job_has_ended_with_status_0_or_with_an_error_as_its_result(tmp_path, text, status):
    """A program may write its result at each evaluation; an earlier job of the run may have ended well."""
    early = f"import pathlib; pathlib.Path('{{}}', 'result.json').write_text('TEXT'); exit({status})"
    run = task(tmp_path / "runs" / "a", early)
    run.command[-1] = run.command[-1].replace("TEXT", text)
    run.file(".job").write_text("7_0")
    run.file(".json").write_text("{}")
    with contextlib.suppress(SystemExit):
        SlurmJob(run)()
    assert run.result.exists()
    assert has_ended(run.folder) == ("error" in text or status == 0)
