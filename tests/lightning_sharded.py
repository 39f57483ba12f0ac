"""Run as a script: train the Lightning example in two processes, whole and resumed, and compare; argument: a folder."""

import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from test_lightning import load_example

example = load_example()


class Sharded(example.Regressor):
    """The example's module, with its layers split where the strategy has a mesh."""

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for layer in (self.net[0], self.net[1], self.net[3], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def clip_gradients(self, *_args, **_kwargs):
        raise AssertionError("the Trainer clips effective gradients")


class Stop(example.L.Callback):
    """Ends a run after its second epoch, which it must be able to go on from."""

    def on_train_epoch_end(self, trainer, _module):
        trainer.should_stop = trainer.current_epoch == 1


def compare(folder, name):
    """Train by DDP ("ddp") or FSDP2, with checkpoints that are "full" or in "shards"."""

    def fit(part, *callbacks):
        split = ModelParallelStrategy(2, 1, save_distributed_checkpoint=name == "shards")  # data, tensor parallel
        strategy = DDPStrategy() if name == "ddp" else split
        return example.fit(Path(folder) / name / part, 4, *callbacks, strategy=strategy, devices=2)

    whole = fit("whole")
    fit("parts", Stop())
    resumed = fit("parts")
    assert resumed.trainer.gradient_clip_val == resumed.trainer.optimizers[0].param_groups[0]["max_grad_norm"] == 1.0
    (optimizer,), (other,) = resumed.trainer.optimizers, whole.trainer.optimizers
    for p, q in zip(resumed.parameters(), whole.parameters(), strict=True):
        mine, theirs = ({"weight": p.detach(), **optimizer.state[p]}, {"weight": q.detach(), **other.state[q]})
        for key, value in mine.items():
            if name != "ddp" and key in ("weight", "raw", "e_row", "exp_avg"):
                assert isinstance(value, torch.distributed.tensor.DTensor)
            parts = (getattr(v, "to_local", v.clone)() for v in (value, theirs[key]))
            assert torch.equal(*parts), key
    assert optimizer.param_groups[0]["steps"] == optimizer.param_groups[0]["total_steps"] == 12
    sys.stdout.write(f"equal: {name} in {resumed.trainer.global_rank}\n")


if __name__ == "__main__":
    example.Regressor = Sharded
    for case in ("ddp", "full", "shards"):
        compare(sys.argv[1], case)
