"""A script for two processes: a run of the recipe for Lightning under FSDP2 resumes to the bit; argument: a folder."""

import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from test_recipes import LIGHTNING, recipe, resume
from training import PAPER, network

names = recipe(LIGHTNING.partition("trainer = ")[0])


class Sharded(names["Module"]):
    """The recipe's module, with its layers split over the strategy's mesh."""

    def configure_model(self):
        for layer in (self.model[0], self.model[3], self.model):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def settings():
    return {"strategy": ModelParallelStrategy(2, 1), "devices": 2}  # data, tensor parallel


def state(trainer):
    """Return this process's part of the weights and of the optimizer's state."""
    (optimizer,) = trainer.optimizers
    states = [{"weight": p.detach(), **optimizer.state[p]} for p in trainer.model.parameters()]
    tensors = [state[key] for state in states for key in sorted(state)]
    return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]


if __name__ == "__main__":
    runs = resume(names, lambda: Sharded(network(), config=PAPER), Path(sys.argv[1]), settings)
    assert all(map(torch.equal, *map(state, runs)))
    sys.stdout.write("equal\n")
