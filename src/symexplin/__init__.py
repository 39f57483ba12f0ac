"""symexplin: train any PyTorch model in curved weight space and own ordinary weights at every step.

    import symexplin as sel

    groups = sel.param_groups(model, lr=3e-4, weight_decay=0.01, config=sel.preset("paper"))
    optimizer = sel.SELAdamW(groups, total_steps=steps, max_grad_norm=1.0)

The model's parameters stay ordinary effective weights throughout.
"""

from symexplin import functional
from symexplin.config import Scale, SELConfig, preset
from symexplin.conversion import convert, fold
from symexplin.linear import SELLinear
from symexplin.optim import (
    RawSpaceOptimizer,
    ScaleAnnealing,
    SELAdamW,
    Target,
    anneal_scales,
    param_groups,
    stats,
)
from symexplin.routing import Route, Routing, routing
from symexplin.starts import init_

__version__ = "0.1.0"

__all__ = [
    "RawSpaceOptimizer",
    "Route",
    "Routing",
    "SELAdamW",
    "SELConfig",
    "SELLinear",
    "Scale",
    "ScaleAnnealing",
    "Target",
    "anneal_scales",
    "convert",
    "fold",
    "functional",
    "init_",
    "param_groups",
    "preset",
    "routing",
    "stats",
]
