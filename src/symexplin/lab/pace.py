"""How long comparisons take on this machine: some steps are timed, with as many runs at a time as they have.

`python -m symexplin.lab.pace` is one of these runs. What needs torch is imported there alone.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from statistics import fmean, median
from typing import Any, NamedTuple

from symexplin.lab.compare.grid import Cell, CompareConfig
from symexplin.lab.compare.launch import gpus_here, threads_each
from symexplin.lab.config import ModelConfig, RunConfig
from symexplin.lab.provenance import cores
from symexplin.lab.settings import from_table, to_table

__all__ = ["Pace", "measure"]

_STEPS = 5  # of each of two variants
_LR = 1e-6  # so small that no variant diverges
_TOKENS = 2**16
# Floating-point operations of a step that may take ten seconds, on a slow CPU and on a slow GPU: larger ones are not
# tried.
_MOST_WORK = {"cpu": 2e11, "cuda": 1e14}


class Pace(NamedTuple):
    """Seconds until a run has begun to train, and seconds per step."""

    start: float
    step: float

    def seconds(self, config: CompareConfig) -> float:
        """Return how long the runs of a comparison take.

        A batch of an evaluation counts as a third of a step: the backward pass takes twice as long as the forward pass.
        """
        train, grid = config.train, config.compare
        evaluations = 1 + math.ceil(train.steps / train.eval_every)
        steps = train.steps + evaluations * train.eval_batches / 3
        return math.ceil(grid.most_runs / (grid.jobs or 1)) * (self.start + steps * self.step)


def measure(config: CompareConfig, vocab_size: int = ModelConfig.vocab_size) -> Pace | None:
    """Return the pace of the runs of a comparison; None: it cannot be measured here in some seconds.

    The baseline and the last variant are trained for a few steps on random tokens, in as many processes at a time as
    the comparison has runs. Runs on a cluster or on several GPUs each are not measured, nor more at a time than there
    are cores, nor a model too large for this machine.
    """
    jobs, gpus = config.compare.jobs or 1, gpus_here()
    if jobs > cores() or not _fits(config, vocab_size, bool(gpus)):
        return None
    command = [sys.executable, "-m", __name__, json.dumps([vocab_size, _runs(config, jobs)])]
    began, processes = time.time(), []
    for number in range(jobs):
        place = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}
        pipe, away = subprocess.PIPE, subprocess.DEVNULL
        processes.append(subprocess.Popen(command, stdout=pipe, stderr=away, text=True, env=os.environ | place))
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        return None
    ready, steps = zip(*map(json.loads, said), strict=True)
    return Pace(fmean(ready) - began, fmean(steps))


def _fits(config: CompareConfig, vocab_size: int, has_gpu: bool) -> bool:
    """Whether a few steps of a run take some seconds here; each token and weight of a matrix need six operations."""
    model, tokens = config.model, config.train.batch_size * config.model.context
    weights = model.depth * model.width * (4 * model.width + 3 * model.hidden) + vocab_size * model.width
    most = _MOST_WORK["cuda" if has_gpu and config.compute.device != "cpu" else "cpu"]
    return not config.compare.on_cluster and (config.cluster.gpus or 1) == 1 and 6 * tokens * weights <= most


def _runs(config: CompareConfig, jobs: int) -> list[dict[str, Any]]:
    tables = [to_table(config.run(Cell(name, _LR, 0))) for name in (config.compare.base, config.compare.variants[-1])]
    for table in tables if jobs > 1 else ():
        table["compute"].setdefault("threads", threads_each(jobs))
    return tables


def _train(vocab_size: int, tables: list[dict[str, Any]]) -> None:
    """Print when the first run had begun to train, and the usual seconds of a step."""
    import numpy as np
    import torch

    from symexplin.lab.config import resolve
    from symexplin.lab.data.batches import Corpus
    from symexplin.lab.data.tokenizer import Tokenizer
    from symexplin.lab.train import Trainer

    ready, paces = [], []
    for table in tables:
        config = resolve(from_table(RunConfig, table), vocab_size)
        torch.set_num_threads(config.compute.threads or 1)
        tokens = np.random.default_rng(0).integers(vocab_size, size=_TOKENS + config.model.context, dtype=np.uint32)
        trainer = Trainer(config, Corpus(tokens, tokens, Tokenizer.from_name("byte"), 1, 1, ""))
        trainer.update()  # the first step of a process takes longer
        ready.append(time.time())
        ends = [time.perf_counter()]
        for _ in range(_STEPS):
            trainer.update()
            ends.append(time.perf_counter())
        paces.append(median(end - begin for begin, end in itertools.pairwise(ends)))
    print(json.dumps([ready[0], fmean(paces)]))  # noqa: T201


if __name__ == "__main__":
    _train(*json.loads(sys.argv[1]))
