"""Parameter groups, the raw-space optimizer with its update rules, and scale annealing."""

from symexplin.optim.adamw import SELAdamW
from symexplin.optim.batch import Target
from symexplin.optim.groups import param_groups
from symexplin.optim.migrate import from_adamw, to_adamw
from symexplin.optim.muon import SELMuon
from symexplin.optim.rates import suggest_lr
from symexplin.optim.raw_space import RawSpaceOptimizer
from symexplin.optim.schedule import ScaleAnnealing, anneal_scales
from symexplin.optim.stats import stats

__all__ = [
    "RawSpaceOptimizer",
    "SELAdamW",
    "SELMuon",
    "ScaleAnnealing",
    "Target",
    "anneal_scales",
    "from_adamw",
    "param_groups",
    "stats",
    "suggest_lr",
    "to_adamw",
]
