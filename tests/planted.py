"""Runs and comparisons whose final losses are planted."""

from symexplin.lab.compare.comparison import Comparison, Run

__all__ = ["compare", "run", "runs_of"]


def run(variant, lr, final, seed=0):
    """A run of 100 steps whose loss falls linearly from 5 to `final`; None: it broke down."""
    if final is None:
        return Run(variant, lr, seed, ((0, 5.0),), error="step 1: loss is nan")
    return Run(variant, lr, seed, ((0, 5.0), (100, final)), 10.0, 1234.5)


def runs_of(table, first_seed=0):
    """Runs of {(variant, lr): losses of the seeds}."""
    return [
        run(variant, lr, loss, seed)
        for (variant, lr), losses in table.items()
        for seed, loss in enumerate(losses, first_seed)
    ]


def compare(runs, baseline, confirm_seeds=()):
    return Comparison(tuple(runs), baseline, confirm_seeds)
