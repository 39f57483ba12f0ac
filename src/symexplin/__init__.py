"""symexplin: train any PyTorch model in curved weight space, with ordinary weights at every step.

    import symexplin as sel

    optimizer = sel.SELAdamW(model, lr=3e-4, weight_decay=0.01, max_grad_norm=1.0)

The model's parameters are ordinary effective weights at every step.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symexplin import functional
    from symexplin import kernels as kernels
    from symexplin.config import Scale, SELConfig
    from symexplin.init import init_
    from symexplin.modules import SELLinear, convert, fold
    from symexplin.optim import (
        Leaf,
        RawSpaceOptimizer,
        SELAdamW,
        anneal_scales,
        param_groups,
    )
    from symexplin.optim.stats import stats
    from symexplin.presets import preset
    from symexplin.routes import Route, Routing, routing

__version__ = "0.1.0"

__all__ = [
    "Leaf",
    "RawSpaceOptimizer",
    "Route",
    "Routing",
    "SELAdamW",
    "SELConfig",
    "SELLinear",
    "Scale",
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

# Where the names are. They are imported at first use, and the first two need no torch (`symexplin --help`).
_HOMES = ("config", "presets", "routes", "init", "modules", "optim")
_MODULES = ("functional", "kernels")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"symexplin.{name}")
    for home in _HOMES if name in __all__ else ():
        if hasattr(module := importlib.import_module(f"symexplin.{home}"), name):
            globals()[name] = getattr(module, name)
            return globals()[name]
    raise AttributeError(f"module 'symexplin' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
