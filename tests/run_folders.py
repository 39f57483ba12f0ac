"""Folders of small runs, for the tests of what reads them."""

import dataclasses

import pytest

from symexplin.lab.config import ComputeConfig, LogConfig, RunConfig, TrainConfig
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig
from symexplin.lab.run import train
from symexplin.lab.train import Trainer

__all__ = ["CURVES", "MODEL", "TRAIN", "break_off", "tiny", "trained"]

MODEL = ModelConfig(width=16, depth=2, heads=2, context=16)
TRAIN = TrainConfig(steps=10, batch_size=4, warmup_steps=2, lr=1e-2, eval_every=4, eval_batches=2)
# A run in each home of the map, and without one.
CURVES = {
    "none": CurveConfig(home="none"),
    "optimizer": CurveConfig(preset="paper"),
    "module": CurveConfig(home="module", preset="paper"),
}


def tiny(data, curve="none", **changes):
    """Return the configuration of a run of one block with a map of CURVES."""
    config = RunConfig(
        data,
        ModelConfig(width=16, depth=1, heads=2, context=8),
        TRAIN,
        CURVES[curve],
        ComputeConfig(device="cpu", threads=1, autocast="off"),
        LogConfig(checkpoint_every=3, tensorboard=False),
    )
    return dataclasses.replace(config, **changes)


def trained(data, out, curve=None, model=MODEL):
    """Train a small run and return its folder."""
    schedule = dataclasses.replace(TRAIN, steps=6, eval_every=2)
    log = LogConfig(checkpoint_every=4, tensorboard=False)
    train(tiny(data, sel=curve or CurveConfig(), model=model, train=schedule, log=log), out)
    return out


def break_off(config, folder, monkeypatch, step):
    """Train until the update of that number, which fails."""
    update = Trainer.update

    def fail(self):
        if self.step + 1 == step:
            raise RuntimeError("killed")
        return update(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", fail)
        with pytest.raises(RuntimeError, match="killed"):
            train(config, folder)
