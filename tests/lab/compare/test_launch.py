"""Runs in processes and as jobs of Slurm; what the commands do here is a few lines of Python."""

import os
import signal
import subprocess
import sys
import time

import pytest

from symexplin.lab.compare import launch
from symexplin.lab.compare.grid import ClusterConfig, GridConfig
from symexplin.lab.compare.launch import SlurmJob, Task, check_executor, run_as_jobs, run_side_by_side
from symexplin.lab.process import Stopped

ENDS = "import pathlib; print('train: step 1'); pathlib.Path('{}', 'done').touch()"
FAILS = "import sys; print('one\\ntwo\\nthree'); sys.exit('four')"
WAITS = "import time; print('train: begun', flush=True); time.sleep(60)"
SAVES = (
    "import pathlib, signal, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('{}', 'saved').touch(), exit(1)))\n"
    "print('train: begun', flush=True)\n"
    "time.sleep(60)"
)


def task(folder, code):
    folder.mkdir(exist_ok=True)
    return Task(folder.name, folder, "done", [sys.executable, "-c", code.replace("{}", str(folder))])


def tasks(out, **codes):
    return [task(out / name, code) for name, code in codes.items()]


def test_runs_end_side_by_side_and_a_failing_one_gives_its_last_lines(tmp_path):
    lines = []
    own_error = "import sys; sys.exit('symexplin: error: lr must be small')"
    work = tasks(tmp_path, a=ENDS, b=FAILS, c="pass", d=own_error, e=ENDS)
    reasons = dict(run_side_by_side(work, tmp_path, 2, lines.append))
    log = tmp_path / "processes"
    assert reasons == {
        0: None,
        1: f"two / three / four (see {log / 'b.log'})",
        2: f"ended without done: no output (see {log / 'c.log'})",
        3: f"lr must be small (see {log / 'd.log'})",
        4: None,
    }
    assert sorted(lines) == ["a: step 1", "e: step 1"]


def test_a_signal_reaches_every_process_of_the_runs_and_starts_no_other(tmp_path):
    def stop(_, heard=[]):  # noqa: B006 (both runs have begun)
        heard.append(1)
        if len(heard) == 2:
            signal.raise_signal(signal.SIGTERM)

    first, *others = tasks(tmp_path, a=SAVES, b=SAVES, c=ENDS)
    in_a_shell = first._replace(command=["sh", "-c", '"$@"; true', "sh", *first.command])
    with pytest.raises(Stopped, match="SIGTERM with all its runs; --resume"):
        list(run_side_by_side([in_a_shell, *others], tmp_path, 2, stop))
    deadline = time.monotonic() + 5
    while not (tmp_path / "a" / "saved").exists():  # its shell ends first
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (tmp_path / "b" / "saved").exists()
    assert not (tmp_path / "c" / "done").exists()


def test_the_death_of_a_process_is_told_and_a_second_interrupt_ends_all_at_once(tmp_path, monkeypatch):
    started, start = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[-1])
    ((_, reason),) = run_side_by_side(tasks(tmp_path, a=WAITS), tmp_path, 2, lambda _: started[0].kill())
    assert "ended by SIGKILL" in reason
    assert "--resume" in reason

    def interrupt(_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        list(run_side_by_side(tasks(tmp_path, b=WAITS), tmp_path, 2, interrupt))
    assert started[1].returncode == -signal.SIGKILL


def test_what_this_machine_cannot_execute_is_told(monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda: 2)
    check_executor(GridConfig(jobs=2))
    with pytest.raises(ValueError, match=r"jobs must be at most 2, the cores that this process may use, got 3"):
        check_executor(GridConfig(jobs=3))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"cluster must be 'none' where Slurm is not installed|needs submitit"):
        check_executor(GridConfig(cluster="slurm"))


def program(monkeypatch, folder, name, text):
    """Put a shell script first on the path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_jobs_are_submitted_as_an_array_and_a_refusal_is_told(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(launch, "_GLANCE", 0.05)
    for name in ("srun", "squeue"):
        program(monkeypatch, tmp_path / "bin", name, "")
    program(monkeypatch, tmp_path / "bin", "sbatch", f"cp $1 {tmp_path / 'script'}; echo Submitted batch job 7")
    cluster = ClusterConfig(partition="wide", cpus=3, walltime=20, memory=4, sbatch={"qos": "low"})
    reasons = dict(run_as_jobs(tasks(tmp_path, a=ENDS, b=ENDS), tmp_path, 2, cluster, lambda _: None))
    assert [reason.partition(" ended")[0] for reason in reasons.values()] == ["job 7_0", "job 7_1"]
    asked = {line.removeprefix("#SBATCH --") for line in (tmp_path / "script").read_text().splitlines()}
    assert {"partition=wide", "cpus-per-task=3", "time=20", "mem=4G", "qos=low", "requeue", "array=0-1%2"} <= asked
    program(monkeypatch, tmp_path / "bin", "sbatch", "echo sbatch: error: invalid partition >&2; exit 1")
    with pytest.raises(ValueError, match=r"\[cluster\] must suit the cluster, but .*invalid partition"):
        list(run_as_jobs(tasks(tmp_path, a=ENDS), tmp_path, 2, cluster, lambda _: None))


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


def test_jobs_are_followed_and_those_of_an_earlier_comparison_taken_up(tmp_path, queue):
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
            (tmp_path / "a" / "done").touch()
        if line == "b: job 7_1 runs on node2":
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped, match="SIGTERM while jobs continue: --resume waits for them, 'scancel 7' ends them"):
        list(run_as_jobs(work, tmp_path, 2, ClusterConfig(), go_on))
    assert lines[1:3] == ["a: job 7_0 runs on node1", "a: job 7_0 was requeued"]

    (tmp_path / "cluster" / "7_1_0_log.err").write_text("CUDA error: out of memory\n")
    file.write_text("7_1|RUNNING|0|node2|\n")
    again = run_as_jobs(
        work[1:], tmp_path, 2, ClusterConfig(), lambda line: file.write_text("") if "runs" in line else 0
    )
    ((index, reason),) = again
    assert index == 0
    assert reason.startswith("job 7_1 ended without its result: CUDA error: out of memory")
    assert submitted == [["a", "b"]]
    list(run_as_jobs(work[1:], tmp_path, 2, ClusterConfig(), lambda _: (tmp_path / "b" / "done").touch()))
    assert submitted == [["a", "b"], ["b"]]


def test_a_preempted_job_saves_its_run_and_executes_the_same_again(tmp_path):
    pytest.importorskip("submitit")
    run, again = task(tmp_path / "a", SAVES), []
    job = SlurmJob(run.command, tmp_path / "a" / "done")

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
    assert (tmp_path / "a" / "saved").exists()
    assert vars(again[0].function) == {"_command": run.command, "_result": tmp_path / "a" / "done"}
