"""The arms of a comparison: one model and seed, different ways to train it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

import symexplin as sel
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.train import TrainConfig
from symexplin.validation import check_choice

__all__ = ["ARMS", "BASELINE", "Arm", "build_arm", "carried"]

BASELINE = "AdamW"

# The learning rate that the paper's multipliers of the scales go with (section 4.1), and its smallest width.
_PAPER_LR, _PAPER_WIDTH = 3e-4, 1024
# Learning rates of learned scales in runs of some hundred steps: the paper's 0.015 to 0.0024 are for 100,000.
_SHORT_RUN = (0.003, 0.001)


class _Map(NamedTuple):
    """A curved arm's map for a width, and its start."""

    config: Callable[[int], sel.SELConfig]
    start: str


def carried(width: int, peak_lr: tuple[float, float] | None = None) -> sel.SELConfig:
    """Return the paper's geometry at width 1024 for another width: the same curve over Xavier's range.

    Xavier's bound grows as 1/sqrt(width), so ``beta = 7.5 sqrt(width/1024)`` keeps kappa |w| at the start, and
    ``l = beta/7.5`` keeps the linear pathway at 1/7.5 of the unit slope, which 1/beta alone would blow up.

    Args:
        width: of the model.
        peak_lr: learning rates of e and l; None: they are fixed. m is fixed, which the paper found best.

    >>> config = carried(256)
    >>> config.beta, config.l.start
    (3.75, 0.5)
    """
    paper = sel.preset("fixed_curvature")
    beta = float(paper.beta) * (width / _PAPER_WIDTH) ** 0.5
    scale = sel.Scale() if peak_lr is None else sel.Scale("row_col_mult", peak_lr=peak_lr)
    linear = dataclasses.replace(scale, start=beta / float(paper.beta))
    return dataclasses.replace(paper, beta=beta, e=scale, l=linear)


def _paper(preset: str) -> Callable[[int], sel.SELConfig]:
    """Return a preset of the paper with its scales at k * 3e-4 at every learning rate of the weights.

    The product is what carries over, and a sweep over learning rates then moves the weights' alone.
    """

    def build(_: int) -> sel.SELConfig:
        config = sel.preset(preset)
        scales = {role: getattr(config, role) for role in config.learned_roles}
        rates = {role: (scale.k[0] * _PAPER_LR, scale.k[1] * _PAPER_LR) for role, scale in scales.items()}
        changed = {role: dataclasses.replace(scale, peak_lr=rates[role]) for role, scale in scales.items()}
        return dataclasses.replace(config, **changed)

    return build


# "SEL" is the best of those tried on other seeds than the demo's (docs/log.md); None is AdamW on ordinary weights.
ARMS: dict[str, _Map | None] = {
    BASELINE: None,
    "SEL": _Map(carried, "matched"),
    "SEL-learned": _Map(functools.partial(carried, peak_lr=_SHORT_RUN), "matched"),
    "SEL-paper": _Map(_paper("paper"), "mismatched"),
    "SEL-fixed-curvature": _Map(_paper("fixed_curvature"), "mismatched"),
    "SEL-frozen": _Map(_paper("frozen"), "mismatched"),
    "SEL-congruent": _Map(_paper("congruent"), "matched"),
    "SEL-exp-only": _Map(_paper("exp_only"), "matched"),
}


class Arm(NamedTuple):
    """What :func:`symexplin.lab.train.train` needs; `clip` is False where the optimizer clips by itself."""

    model: Transformer
    optimizer: torch.optim.Optimizer
    clip: bool


def build_arm(arm: str, model_config: ModelConfig, config: TrainConfig, seed: int) -> Arm:
    """Return a fresh model with its optimizer; every arm's weights come from the same draw.

    Raises:
        ValueError: an unknown arm.

    >>> shape = ModelConfig(width=16, depth=1, heads=2, context=8)
    >>> type(build_arm("SEL", shape, TrainConfig(steps=10, warmup_steps=1), seed=0).optimizer).__name__
    'SELAdamW'
    """
    model = Transformer(model_config, torch.Generator().manual_seed(seed))
    curved = ARMS[check_choice("arm", arm, ARMS)]
    if curved is None:
        adamw = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        return Arm(model, adamw, clip=True)
    map_config = curved.config(model_config.width)
    if curved.start == "mismatched":
        sel.init_(model, map_config, xavier=False)
    groups = sel.param_groups(model, lr=config.lr, weight_decay=config.weight_decay, config=map_config)
    optimizer = sel.SELAdamW(
        groups, lr=config.lr, betas=config.betas, total_steps=config.steps, max_grad_norm=config.max_grad_norm
    )
    return Arm(model, optimizer, clip=False)
