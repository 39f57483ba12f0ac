"""Runs as jobs of Slurm, with programs of a few lines in the place of Slurm's; test_slurm.py has the real ones."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from symexplin.lab.compare.cluster import hand_over, queued
from symexplin.lab.compare.grid import ClusterConfig
from symexplin.lab.compare.kinds import configured, kind_of
from symexplin.lab.compare.launch import Task, has_ended
from symexplin.lab.compare.sweep import compare

ENDS = "import pathlib; pathlib.Path('{}', 'result.json').write_text('{{\"loss\": 1}}')"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Put a shell script first on the path."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")

    def write(name, text):
        (place / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / name).chmod(0o755)

    write("squeue", "true")
    return write


def task(out, name, code=ENDS, resumes=False, **wishes):
    folder = out / "runs" / name
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", code.format(folder)]
    return Task(name, folder, command, ClusterConfig(**wishes), cwd=str(folder), resumes=resumes)


def written(tasks, out, jobs=None, at_a_time=None, submit=False):
    """Return the lines that are told."""
    lines = []
    hand_over(tasks, jobs or {}, out, at_a_time, submit, lines.append)
    return lines


def script_of(line):
    """Return the script that a line names."""
    return Path(re.search(r"/\S*array\.sh", line)[0])


def options(script):
    return {line.removeprefix("#SBATCH --") for line in script.read_text().splitlines() if line.startswith("#SBATCH")}


def executed(script, index):
    """Execute a task of an array as Slurm does, and return its status."""
    here = {**os.environ, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(index)}
    return subprocess.run(["bash", str(script)], env=here, check=False).returncode


def test_a_script_for_each_wish_asks_slurm_for_it(tmp_path):
    wishes = {"cpus": 3, "walltime": 20, "sbatch": {"partition": "wide", "comment": "two words", "exclusive": True}}
    tasks = [
        task(tmp_path, "a", gpus=1, **wishes),
        task(tmp_path, "b", gpus=8, **wishes),
        task(tmp_path, "c", gpus=1, **wishes),
    ]
    lines = written(tasks, tmp_path, at_a_time=2)
    first, second = map(script_of, lines)
    assert lines == [
        f"{count} to submit: sbatch {script}; then --resume collects what has ended"
        for count, script in (("2 runs", first), ("1 run", second))
    ]
    everywhere = {"partition=wide", 'comment="two words"', "cpus-per-task=3", "time=20", "exclusive", "signal=TERM@60"}
    assert everywhere | {"array=1-2%2", "gpus-per-node=1", "no-requeue"} <= options(first)
    assert everywhere | {"array=1-1%2", "gpus-per-node=8"} <= options(second)
    edited = first.read_text().replace("time=20", "time=30")
    first.write_text(edited)
    assert written(tasks, tmp_path, at_a_time=2) == lines
    assert first.read_text() == edited
    again = [task(tmp_path, "a", resumes=True), task(tmp_path, "b", resumes=True, requeue=False)]
    first, second = map(script_of, written(again, tmp_path))
    assert {"requeue", "time=240", "array=1-1"} <= options(first)
    assert "no-requeue" in options(second)


def test_a_task_counts_as_a_process_here_would(tmp_path, program):
    """A command has ended with its result and status 0, a run of the laboratory with its result; no old one counts."""
    dies, line_break = "os.kill(os.getpid(), 15)", "x = 'a b'\n" + ENDS
    codes = {
        "ends": line_break,
        "fails": ENDS + "; exit('three')",
        "nothing": "pass",
        "saves": "import os, signal; signal.signal(15, lambda *_: exit(0)); os.kill(os.getppid(), 15); " + dies,
    }
    out = tmp_path / "with space"
    tasks = [task(out, name, code, resumes=True) for name, code in codes.items()]
    for each in tasks:
        each.result.write_text("{}")
    written(tasks, out)
    (script,) = out.glob("cluster/*/array.sh")
    program("srun", 'shift; exec "$@"')
    program("scontrol", f'echo "$@" >> "{tmp_path}/requeued"')
    statuses = [executed(script, index) for index in range(1, 6)]
    assert statuses == [0, 1, 0, 143, 0]  # the last one is of an array that somebody has made longer
    assert [has_ended(each.folder) for each in tasks] == [True, False, False, False]
    assert (tmp_path / "requeued").read_text() == "requeue 7_4\n"
    assert json.loads(tasks[0].file(".json").read_text())["seconds"] >= 0
    assert tasks[1].file(".log").read_text() == "three\n"

    tasks[0].result.write_text("kept")
    assert executed(script, 1) == 0  # submitted twice
    assert tasks[0].result.read_text() == "kept"
    tasks[0].result.unlink()
    written(tasks, out)
    assert [executed(script, 1), has_ended(tasks[0].folder)] == [0, True]  # it ran again

    diverges = task(tmp_path / "own", "diverges", codes["fails"])._replace(cwd=None)
    assert executed(script_of(written([diverges], tmp_path / "own")[0]), 1) == 1
    assert has_ended(diverges.folder)


def test_what_is_queued_is_told_and_not_written_again(tmp_path, program):
    tasks = [task(tmp_path, name) for name in "abc"]
    script = script_of(written(tasks, tmp_path)[0])
    entries = [f"1|PENDING|Resources||{script}|", f"2|RUNNING|None|node1|{script}|"]
    others = [f"4|RUNNING|None|node1|{script}|", "1|RUNNING|None|node1|/a|b", "c/array.sh|"]
    lines = "\\n".join([*entries, f"3|FAILED|None|node1|{script}|", *others])
    program("squeue", f"echo '{lines}'")
    jobs = queued(tmp_path)
    assert jobs == {tasks[0].folder: "waits (Resources)", tasks[1].folder: "running on node1"}
    tasks[2].file(".log").write_text("CUDA error: out of memory\n")
    program("sbatch", f"cp $2 {tmp_path}/submitted; echo '71;name'")
    lines = written(tasks, tmp_path, jobs, submit=True)
    second = script_of(lines[-1])
    assert lines == [
        "1 run: waits (Resources)",
        "1 run: running on node1",
        f"failed: c: CUDA error: out of memory (see {tasks[2].file('.log')})",
        f"1 run submitted as job 71 ({second}); --resume collects what has ended",
    ]
    assert (tmp_path / "submitted").read_text() == second.read_text()
    program("sbatch", "echo sbatch: error: invalid partition >&2; exit 1")
    with pytest.raises(ValueError, match=r"\[cluster\] must suit this cluster, but .*invalid partition"):
        written(tasks, tmp_path, jobs, submit=True)


def test_a_comparison_on_a_cluster_says_what_it_lacks(tmp_path, program, monkeypatch):
    out = tmp_path / "out"
    grid = {"variants": ["a", "b"], "lrs": [0.1], "cluster": "slurm"}
    table = {"command": "true {variant} {out}", "cwd": str(tmp_path), "compare": grid}
    here = {"compare": {"cluster": "none"}}

    def run(*changes, resume=True, **options):
        return compare(kind_of(configured(out, table, *changes, resume=resume)), out, resume=resume, **options)

    with pytest.raises(ValueError, match="submit is for cluster 'slurm', got cluster 'none'"):
        run(here, resume=False, submit=True)
    assert run(resume=False) is None
    with pytest.raises(ValueError, match="add --resume"):
        run(resume=False)
    (script,) = out.glob("cluster/*/array.sh")
    program("squeue", f"echo '2|PENDING|Priority||{script}|'")
    with pytest.raises(ValueError, match="cluster must be 'slurm' while 1 jobs of this comparison wait or run"):
        run(here)
    program("squeue", "echo 'unable to contact the controller' >&2; exit 1")
    with pytest.raises(ValueError, match=r"Slurm does not report .*\(unable to contact the controller\)"):
        run()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"Slurm does not report .* remove '.*/cluster' if no job is left"):
        run()
