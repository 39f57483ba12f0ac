import dataclasses

import pytest

from symexplin.lab.compare.grid import CompareConfig, GridConfig
from symexplin.lab.config import ComputeConfig, ModelConfig, TrainConfig
from symexplin.lab.pace import Pace, measure
from symexplin.lab.provenance import cores

SMALL = CompareConfig(
    "",
    model=ModelConfig(width=16, depth=1, heads=2, context=16),
    train=TrainConfig(100, 2, eval_every=30, eval_batches=6),
    compute=ComputeConfig(device="cpu", threads=1, autocast="off"),
    compare=GridConfig(lrs=(1e-3, 1e30), seeds=(0,), confirm_seeds=(1,), jobs=1),
)
LARGE = dataclasses.replace(SMALL, model=ModelConfig(width=128, depth=4, context=128), train=TrainConfig(batch_size=16))
PAPER = dataclasses.replace(SMALL, model=ModelConfig(width=3072, depth=36, heads=24, context=1024))


def test_it_is_measured_by_training():
    small, large = measure(SMALL), measure(LARGE)
    assert 0 < small.step < large.step
    assert small.start > 0


def test_how_long_a_comparison_takes():
    # Two variants at two rates, then the baseline at one and the other at two: seven runs. Each has 100 steps and five
    # evaluations, of six batches.
    assert Pace(3.0, 0.5).seconds(SMALL) == pytest.approx(7 * (3 + 0.5 * (100 + 5 * 6 / 3)))
    two = dataclasses.replace(SMALL, compare=dataclasses.replace(SMALL.compare, jobs=2))
    assert Pace(3.0, 0.5).seconds(two) == pytest.approx(4 * (3 + 0.5 * (100 + 5 * 6 / 3)))


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(SMALL, compare=dataclasses.replace(SMALL.compare, cluster="slurm")),
        dataclasses.replace(SMALL, compare=dataclasses.replace(SMALL.compare, jobs=cores() + 1)),
        dataclasses.replace(SMALL, cluster=dataclasses.replace(SMALL.cluster, gpus=8)),
        PAPER,
    ],
    ids=["cluster", "jobs", "gpus", "large"],
)
def test_what_this_machine_would_not_train_so_is_not_tried(config, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("subprocess.Popen", None)
    assert measure(config) is None


def test_a_run_that_fails_is_not_measured():
    nowhere = dataclasses.replace(SMALL, compute=dataclasses.replace(SMALL.compute, device="cuda:99"))
    assert measure(nowhere) is None
