"""Run as a script in two processes: runs of the recipe for Lightning resume to the bit; argument: a folder."""

import functools
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from test_recipes import LIGHTNING, recipe, resume
from training import PAPER, network

names = recipe(LIGHTNING.partition("trainer = ")[0])


class Sharded(names["Module"]):
    """The recipe's module, with its layers split where the strategy has a mesh."""

    def configure_model(self):
        for layer in (self.model[0], self.model[3], self.model) if self.device_mesh else ():
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def settings(name):
    """Return the settings of DDP ("ddp") or of FSDP2 with checkpoints that are "full" or in "shards"."""
    split = ModelParallelStrategy(2, 1, save_distributed_checkpoint=name == "shards")  # data, tensor parallel
    return {"strategy": DDPStrategy() if name == "ddp" else split, "devices": 2}


def state(trainer):
    """Return this process's part of the weights and of the optimizer's state."""
    (optimizer,) = trainer.optimizers
    states = [{"weight": p.detach(), **optimizer.state[p]} for p in trainer.model.parameters()]
    tensors = [state[key] for state in states for key in sorted(state)]
    return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]


if __name__ == "__main__":
    for name in ("ddp", "full", "shards"):
        runs = resume(
            names, lambda: Sharded(network(), config=PAPER), Path(sys.argv[1], name), functools.partial(settings, name)
        )
        assert all(map(torch.equal, *map(state, runs))), name
        sys.stdout.write(f"{name}\n")
