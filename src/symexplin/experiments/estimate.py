"""How long the runs of a table take on this machine, from a few steps of one of them."""

import time
from collections.abc import Sequence

import torch

from symexplin.experiments.tables import PASSES
from symexplin.lab.compare.grid import CompareConfig
from symexplin.lab.config import RunConfig, resolve
from symexplin.lab.data.batches import Corpus
from symexplin.lab.provenance import cores
from symexplin.lab.train import NonFiniteError, Trainer

__all__ = ["estimate"]

_TIMED_STEPS = 4  # the first one is slow, the fastest one counts


def estimate(configs: Sequence[CompareConfig]) -> list[str]:
    """Return a line that says how long the runs of all comparisons take; none where a few steps tell nothing."""
    first = configs[0]
    if first.compute.compile or first.compare.cluster != "none":
        return []
    corpus = Corpus.load(first.data, verify=False)
    corpus.check_context(first.model.context)
    run = resolve(first.example(first.compare.variants[-1]), corpus.vocab_size)  # the first variant has no map
    before, times = torch.get_num_threads(), []
    torch.set_num_threads(run.compute.threads or max(1, cores() // first.compare.jobs))
    try:
        trainer = Trainer(run, corpus)
        for _ in range(_TIMED_STEPS):
            began = time.perf_counter()
            trainer.update()
            times.append(time.perf_counter() - began)
    except NonFiniteError:  # the run itself reports it
        return []
    finally:
        torch.set_num_threads(before)
    runs = sum(config.compare.most_runs for config in configs)
    cost = sum(_cost(config.example(config.compare.variants[-1])) * config.compare.most_runs for config in configs)
    minutes = min(times) * _passes(run) / _cost(run) * cost / first.compare.jobs / 60
    return [f"at most {runs} runs, in all about {max(1, round(minutes)):,} min (from {_TIMED_STEPS} steps)"]


def _passes(run: RunConfig) -> float:
    """Return how many training steps take the time of a run, its evaluations included."""
    evaluations = 1 + run.train.steps // run.train.eval_every
    return run.train.steps + evaluations * run.train.eval_batches / PASSES


def _cost(run: RunConfig) -> float:
    """Return a number proportional to the time of a run: weights of the blocks times the tokens of all passes."""
    return float(run.model.depth * run.model.width**2 * _passes(run) * run.train.batch_size * run.model.context)
