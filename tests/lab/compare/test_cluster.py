"""A comparison on a Slurm of its own (clusters.py)."""

import dataclasses
import subprocess
import time

import pytest

from clusters import MISSING, slurm
from sweeps import bits, numbers, tiny
from symexplin.lab.compare import launch
from symexplin.lab.compare.grid import ClusterConfig
from symexplin.lab.compare.runs import compare_runs
from symexplin.lab.config import LogConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: {' '.join(MISSING)} not found"),
    pytest.mark.usefixtures("undrawn", "cluster"),
]


@pytest.fixture
def cluster(tmp_path_factory, monkeypatch):
    with slurm(tmp_path_factory.mktemp("slurm")) as environment:
        for name in ("PATH", "SLURM_CONF"):
            monkeypatch.setenv(name, environment[name])
        monkeypatch.setattr(launch, "_GLANCE", 0.5)
        yield


def test_a_preempted_run_is_requeued_and_the_table_is_that_of_one_machine(data, tmp_path):
    there, lines, preempted = tmp_path / "there", [], []
    metrics = there / "runs" / "SEL-lr0.001-seed0" / "metrics.jsonl"
    config = tiny(data, steps=300, lrs=(1e-3, 1e-2), seeds=(0,), jobs=2, cluster="slurm")
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, eval_every=100),
        log=LogConfig(checkpoint_every=200, tensorboard=False),
        cluster=ClusterConfig(cpus=1, walltime=20),
    )

    def echo(line):
        lines.append(line)
        begun = line.startswith("2/4 SEL lr 0.001 seed 0: job ") and "runs on" in line
        if begun and not preempted:
            preempted.append(line.split("job ")[1].split()[0])
            while not metrics.exists() or metrics.stat().st_size < 1000:
                time.sleep(0.01)
            # Slurm delivers the signal at once, and yet scancel tries again after some seconds.
            with subprocess.Popen(["scancel", "--signal=USR2", *preempted]) as process:
                time.sleep(1)
                process.kill()

    content = compare_runs(config, there, echo=echo)
    assert sum(line.startswith("2/4 ") and "was requeued" in line for line in lines) == 1
    assert all(any(line.startswith(f"{i}/4 ") and "runs on" in line for line in lines) for i in (1, 2, 3, 4))
    grid = dataclasses.replace(config.compare, jobs=1, cluster="none")
    here = compare_runs(dataclasses.replace(config, compare=grid), tmp_path / "here")
    assert numbers(content) == numbers(here)
    assert bits(there) == bits(tmp_path / "here")
