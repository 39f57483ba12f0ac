"""How long the runs of a table take on this machine, from a few steps of each model."""

import time
from collections.abc import Sequence

import torch

from symexplin.lab.compare.grid import CompareConfig
from symexplin.lab.compare.launch import threads_each
from symexplin.lab.config import resolve
from symexplin.lab.data.batches import Corpus
from symexplin.lab.train import NonFiniteError, Trainer

__all__ = ["estimate"]

_TIMED_STEPS = 4  # the first one is slow, the fastest one counts
# Training a batch costs a forward and a backward pass, evaluating it the forward pass alone, about a third.
_PASSES = 3


def estimate(configs: Sequence[CompareConfig]) -> list[str]:
    """Return a line that says how long the runs of all comparisons take; none where a few steps tell nothing."""
    if not configs or any(config.compute.compile or config.compare.on_cluster for config in configs):
        return []
    before = torch.get_num_threads()
    try:
        minutes = sum(_minutes(config) for config in configs)
    except NonFiniteError:  # the run itself reports it
        return []
    finally:
        torch.set_num_threads(before)
    runs = sum(config.compare.most_runs for config in configs)
    return [f"at most {runs} runs, in all about {max(1, round(minutes)):,} min (from {_TIMED_STEPS} steps)"]


def _minutes(config: CompareConfig) -> float:
    """Return how long the runs of a comparison take, from a few steps of its last variant: the first has no map."""
    corpus = Corpus.load(config.data, verify=False)
    corpus.check_context(config.model.context)
    run = resolve(config.example(config.compare.variants[-1]), corpus.vocab_size)
    torch.set_num_threads(run.compute.threads or threads_each(config.compare.jobs))
    trainer, times = Trainer(run, corpus), []
    for _ in range(_TIMED_STEPS):
        began = time.perf_counter()
        trainer.update()
        times.append(time.perf_counter() - began)
    evaluations = 1 + run.train.steps // run.train.eval_every
    steps = run.train.steps + evaluations * run.train.eval_batches / _PASSES
    return min(times) * steps * config.compare.most_runs / config.compare.jobs / 60
