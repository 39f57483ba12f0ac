"""Parameter groups, the raw-space optimizer with its update rules, and scale annealing."""

from symexplin.optim.adamw import SELAdamW
from symexplin.optim.annealing import anneal_scales
from symexplin.optim.entry import Leaf
from symexplin.optim.groups import param_groups
from symexplin.optim.optimizer import RawSpaceOptimizer
from symexplin.optim.stats import stats

__all__ = [
    "RawSpaceOptimizer",
    "SELAdamW",
    "Leaf",
    "anneal_scales",
    "param_groups",
    "stats",
]
