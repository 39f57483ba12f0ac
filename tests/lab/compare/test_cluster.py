"""Comparisons on a Slurm of their own (clusters.py)."""

import dataclasses
import signal
import subprocess
import time

import pytest

from clusters import MISSING, slurm
from sweeps import bits, numbers, tiny
from symexplin.lab.compare import launch
from symexplin.lab.compare.grid import ClusterConfig
from symexplin.lab.compare.runs import compare_runs
from symexplin.lab.config import LogConfig
from symexplin.lab.process import Stopped

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: {' '.join(MISSING)} not found"),
    pytest.mark.usefixtures("undrawn", "cluster"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.fixture
def cluster(environment, monkeypatch):
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setattr(launch, "_GLANCE", 0.5)


def few_runs(data, steps, lrs=(1e-3,)):
    config = tiny(data, steps=steps, lrs=lrs, seeds=(0,), jobs=2, cluster="slurm")
    train = dataclasses.replace(config.train, eval_every=100)
    log = LogConfig(checkpoint_every=200, tensorboard=False)
    return dataclasses.replace(config, train=train, log=log, cluster=ClusterConfig(cpus=1, walltime=20))


class Echo(list):
    """The lines of a comparison; `act` is called with the number of its second job when that trains."""

    def __init__(self, out, act):
        self.run, self.act = out / "runs" / "SEL-lr0.001-seed0", act

    def __call__(self, line):
        self.append(line)
        if (
            self.act
            and line.startswith(("2/2 SEL lr 0.001 seed 0: job ", "2/4 SEL lr 0.001 seed 0: job "))
            and "runs on" in line
        ):
            act, self.act = self.act, None
            metrics = self.run / "metrics.jsonl"
            while not metrics.exists() or metrics.stat().st_size < 1000:
                time.sleep(0.01)
            act(line.split("job ")[1].split()[0])


def preempt(job):
    # Slurm delivers the signal at once, and yet scancel tries again after some seconds.
    with subprocess.Popen(["scancel", "--signal=USR2", job]) as process:
        time.sleep(1)
        process.kill()


def test_a_preempted_run_is_requeued_and_the_table_is_that_of_one_machine(data, tmp_path):
    config = few_runs(data, steps=300, lrs=(1e-3, 1e-2))
    echo = Echo(tmp_path / "there", preempt)
    there = compare_runs(config, tmp_path / "there", echo=echo)
    assert sum(line.startswith("2/4 ") and "was requeued" in line for line in echo) == 1
    assert all(any(line.startswith(f"{i}/4 ") and "runs on" in line for line in echo) for i in (1, 2, 3, 4))
    grid = dataclasses.replace(config.compare, jobs=1, cluster="none")
    here = compare_runs(dataclasses.replace(config, compare=grid), tmp_path / "here")
    assert numbers(there) == numbers(here)
    assert bits(tmp_path / "there") == bits(tmp_path / "here")


def test_a_cancelled_job_is_told_and_those_of_a_stopped_comparison_are_taken_up(data, tmp_path):
    config = few_runs(data, steps=300)
    stop = Echo(tmp_path, lambda _: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped, match=r"SIGTERM while jobs .*: --resume .*'scancel \d+' ends them"):
        compare_runs(config, tmp_path, echo=stop)
    cancel = Echo(tmp_path, lambda job: subprocess.run(["scancel", job], check=True))
    with pytest.raises(
        ChildProcessError, match=r"^2/2 SEL lr 0.001 seed 0: job \S+ ended without its result: .*_log\.err"
    ) as error:
        compare_runs(config, tmp_path, resume=True, echo=cancel)
    assert "--resume submits it again" in str(error.value)
    assert any(line.startswith("0 jobs submitted, 2 found") for line in cancel)


def test_what_slurm_refuses_is_told(data, tmp_path):
    config = dataclasses.replace(few_runs(data, steps=2), cluster=ClusterConfig(partition="wide", cpus=1))
    with pytest.raises(ValueError, match=r"\[cluster\] must suit the cluster, but .*[Pp]artition"):
        compare_runs(config, tmp_path)
