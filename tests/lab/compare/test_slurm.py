"""Comparisons on a real Slurm, which .ci/slurm installs."""

import subprocess
import sys
import time

import pytest

from corpora import prepared
from slurm import NEEDS_SLURM, slurm, wait_for  # noqa: F401 (a fixture)
from symexplin.lab.compare.cluster import queued
from symexplin.lab.compare.grid import RUNS
from symexplin.lab.compare.kinds import configured, kind_of
from symexplin.lab.compare.sweep import compare
from symexplin.lab.compare.words import verdict

pytestmark = [NEEDS_SLURM, pytest.mark.slow, pytest.mark.usefixtures("slurm")]

# Counts to {steps} with a tick of 0.2 s, and continues from what it saved after SIGTERM if it can.
PROGRAM = """
import json, pathlib, signal, sys, time
variant, lr, seed, out, steps = sys.argv[1:]
state, told, begun = pathlib.Path(out, "state"), [], 0
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
if variant != "forgets" and state.exists():
    begun = int(state.read_text())
print("begun", flush=True)
for step in range(begun, int(steps)):
    time.sleep(0.2)
    if told:
        state.write_text(str(step + 1))
        sys.exit("stopped")
loss = 2.0 + float(lr) + float(seed) / 1000 - (variant == "good") * (0.1 + float(seed) / 1000)
pathlib.Path(out, "result.json").write_text(json.dumps({"loss": loss, "curve": [[begun, 3.0], [int(steps), loss]]}))
"""


class Comparison:
    """A comparison of PROGRAM's runs on the cluster."""

    def __init__(self, place, variants, steps, **settings):
        (place / "train.py").write_text(PROGRAM)
        self.out, self.lines = place / "out", []
        words = f"{sys.executable} train.py {{variant}} {{lr}} {{seed}} {{out}} {steps}"
        self.table = {
            "command": words,
            "cwd": str(place),
            "compare": {"variants": variants, "lrs": [0.1], "cluster": "slurm", **settings.pop("compare", {})},
            "cluster": {"walltime": 10, "cpus": 1, **settings},
        }
        self.go(resume=False)

    def go(self, resume=True, **changes):
        """Submit what is missing, and return the lines that are told, and the comparison if it has ended."""
        lines = []
        config = configured(self.out, self.table, changes, resume=resume)
        found = compare(kind_of(config), self.out, resume=resume, submit=config.compare.on_cluster, echo=lines.append)
        return lines, found

    def wait(self):
        """Wait until no job is left; requeued ones, which would begin two minutes later, begin in seconds.

        At once would be too soon for Slurm, which then ends the job.
        """

        hurried = [0.0]

        def none_left():
            waiting = [text for text in queued(self.out).values() if "BeginTime" in text]
            if waiting and time.monotonic() > hurried[0] + 8:
                hurried[0] = time.monotonic()
                for line in said("squeue", "--me", "--noheader", "--array", "--states=PD", "--format=%A").split():
                    said("scontrol", "update", f"JobId={line}", "StartTime=now+3")
            return not queued(self.out)

        wait_for(none_left, 90)

    def finished(self):
        """Return the comparison, whose runs a busy machine may take to the end of their time."""
        for _ in range(3):
            self.wait()
            _, found = self.go()
            if found is not None:
                return found
        raise AssertionError("it does not end")

    def logs(self):
        return "".join(path.read_text() for path in self.out.glob("processes/*.log"))

    def curve(self, found, variant):
        (run,) = found.at(variant, 0.1).values()
        return run.curve


def said(*words):
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def test_both_stages_are_submitted_and_collected_and_nothing_runs_twice(tmp_path):
    grid = {"lrs": [0.1, 0.2], "confirm_seeds": [1, 2, 3]}
    comparison = Comparison(tmp_path, ["base", "good"], 5, compare=grid)
    lines, found = comparison.go()  # beside running jobs
    assert found is None
    assert not any("submitted" in line for line in lines)
    with pytest.raises(ValueError, match="cluster must be 'slurm' while"):
        comparison.go(compare={"cluster": "none"})
    comparison.wait()
    lines, found = comparison.go()
    assert "6 runs submitted as job" in lines[-1]
    assert found is None
    comparison.wait()
    lines, found = comparison.go()
    assert "good ends at" in verdict(found)[0]
    assert "better" in verdict(found)[0]
    assert found.best[1].seconds > 0


def test_at_its_time_limit_a_run_that_resumes_goes_on_and_another_has_failed(tmp_path):
    """With a minute in all the signal comes at once."""
    comparison = Comparison(tmp_path, ["base", "good"], 300, walltime=1, requeue=True, compare={"jobs": 2})
    assert comparison.curve(comparison.finished(), "base")[0][0] > 0  # it went on from there
    forgets = tmp_path / "forgets"
    forgets.mkdir()
    comparison = Comparison(forgets, ["base", "good"], 300, walltime=1)
    comparison.wait()
    lines, found = comparison.go()
    assert found is None
    assert any(line.startswith("failed: ") and "stopped" in line for line in lines)
    said("scancel", "--me")


def test_a_preempted_run_saves_itself_and_goes_on_and_a_cancelled_one_takes_no_other_with_it(tmp_path):
    comparison = Comparison(tmp_path, ["base", "good"], 60, requeue=True)
    wait_for(lambda: comparison.logs().count("begun") == 2)
    said("sbatch", "--partition=high", "--ntasks=2", "--output=/dev/null", "--wrap=sleep 2")
    wait_for(lambda: "stopped" in comparison.logs())
    found = comparison.finished()
    assert max(comparison.curve(found, variant)[0][0] for variant in ("base", "good")) > 0

    other = tmp_path / "other"
    other.mkdir()
    comparison = Comparison(other, ["base", "good"], 15)
    wait_for(lambda: comparison.logs().count("begun") == 2)
    array = said("squeue", "--me", "--noheader", "--array", "--format=%F").split()[0]
    said("scancel", f"{array}_2")
    comparison.wait()
    assert [run.name for run in (comparison.out / RUNS).iterdir() if (run / "result.json").exists()] == [
        "base-lr0.1-seed0"
    ]
    lines, _ = comparison.go()
    assert "1 run submitted as job" in lines[-1]
    comparison.finished()


def test_runs_of_the_laboratory_end_with_the_bytes_of_runs_that_were_not_stopped(tmp_path):
    data = prepared(tmp_path / "data")
    settings = {
        "data": str(data),
        "model": {"width": 16, "depth": 1, "heads": 2, "context": 16},
        "train": {"steps": 1000, "eval_every": 500, "batch_size": 2, "eval_batches": 1},
        "compute": {"device": "cpu", "threads": 1},
        "log": {"tensorboard": False},
        "compare": {"variants": ["AdamW", "default"], "lrs": [0.01], "seeds": [0]},
    }
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    compare(kind_of(configured(whole, settings, resume=False)), whole)
    there = {"compare": {"cluster": "slurm"}, "cluster": {"cpus": 1, "walltime": 10}}
    kind = kind_of(configured(stopped, settings, there, resume=False))
    compare(kind, stopped, submit=True)
    wait_for(lambda: len(list(stopped.glob(f"{RUNS}/*/metrics.jsonl"))) == 2)
    said("scancel", "--me", "--signal=TERM")
    Comparison.wait(type("", (), {"out": stopped}))
    assert compare(kind, stopped, resume=True, submit=True) is not None
    for run in (whole / RUNS).iterdir():
        assert (stopped / RUNS / run.name / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert "stopped by SIGTERM" in "".join(path.read_text() for path in stopped.glob("processes/*.log"))
