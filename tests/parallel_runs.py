"""Runs of the laboratory in several processes, for its tests: what each process does."""

import contextlib
import io
import os
import signal

import torch

from symexplin import cli
from symexplin.lab import run as lab_run
from symexplin.lab import train as lab_train
from symexplin.lab.config import RunConfig
from symexplin.lab.parallel import joined
from symexplin.lab.process import Stopped
from symexplin.lab.settings import from_table
from symexplin.lab.train import Trainer

__all__ = ["commands", "go_on", "runs"]


@contextlib.contextmanager
def _stopping(step, here):
    """Let a SIGTERM reach this process, if it is the one, within the update number `step`."""
    update = Trainer.update

    def stop(self):
        if here and self.step + 1 == step:
            signal.raise_signal(signal.SIGTERM)
        return update(self)

    Trainer.update = stop
    try:
        yield
    finally:
        Trainer.update = update


def go_on(table, out, stop=None):
    """Train in `out`, or go on there, until the update `stop`, in which a signal comes to the last process."""
    with joined("cpu") as ranks, _stopping(stop, ranks.rank == ranks.size - 1):
        try:
            return lab_run.train(from_table(RunConfig, table), out, resume=True)["loss"]
        except Stopped as stopped:
            return str(stopped)


def runs(tasks):
    """Go through (table, folder, stop) one after another; return what each came to."""
    return [go_on(*task) for task in tasks]


def _fail(*_):
    raise OSError(28, "No space left on device")


def _plant(self, before=Trainer.update):
    """The last process alone has a weight that is no number."""
    with joined("cpu") as ranks, torch.no_grad():
        if self.step == 2 and ranks.rank == ranks.size - 1:
            self.model.blocks[0].ffn.up.weight[0, 0] = float("nan")
    return before(self)


def _odd(config, ranks, before=lab_train.build):
    if ranks.rank == 1:
        raise ValueError("this process is odd")
    return before(config, ranks)


_PLANTED = {
    "a full disk": (lab_train, "save_model", _fail),
    "no number": (Trainer, "update", _plant),
    "one process": (lab_train, "build", _odd),
}


def commands(lines):
    """Run command lines as torchrun's processes would: return the (status, stdout, stderr) of each.

    A line may come with the name of something planted.
    """
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    found = []
    for line, planted in lines:
        place, name, value = _PLANTED.get(planted, (cli, "main", cli.main))
        before = getattr(place, name)
        setattr(place, name, value)
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = cli.main(line.split())
        setattr(place, name, before)
        found.append((status, output.getvalue(), errors.getvalue()))
    return found
