"""The arms of a comparison: one model and seed, different ways to train it."""

import dataclasses
from typing import NamedTuple

import torch

import symexplin as sel
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.train import TrainConfig
from symexplin.validation import check_choice

__all__ = ["ARMS", "BASELINE", "Arm", "build_arm", "map_of"]

# Each arm's preset of the map; None is AdamW on ordinary weights.
ARMS: dict[str, str | None] = {
    "AdamW": None,
    "SEL": "paper",
    "SEL-frozen": "frozen",
    "SEL-congruent": "congruent",
    "SEL-exp-only": "exp_only",
}
BASELINE = "AdamW"

# The learning rate that the paper's multipliers of the scales go with (section 4.1).
_PAPER_LR = 3e-4


class Arm(NamedTuple):
    """What :func:`symexplin.lab.train.train` needs; `clip` is False where the optimizer clips by itself."""

    model: Transformer
    optimizer: torch.optim.Optimizer
    clip: bool


def map_of(arm: str) -> sel.SELConfig | None:
    """Return the map of an arm, None for the baseline.

    Its scales learn at the paper's k * 3e-4 whatever the learning rate of the weights: the product is what carries
    over, and a sweep over learning rates then moves the weights' alone.

    Raises:
        ValueError: an unknown arm.

    >>> map_of("SEL").e.peak_lr
    (0.015, 0.0024)
    """
    preset = ARMS[check_choice("arm", arm, ARMS)]
    if preset is None:
        return None
    config = sel.preset(preset)
    scales = {role: getattr(config, role) for role in config.learned_roles}
    rates = {role: (scale.k[0] * _PAPER_LR, scale.k[1] * _PAPER_LR) for role, scale in scales.items()}
    changed = {role: dataclasses.replace(scale, peak_lr=rates[role]) for role, scale in scales.items()}
    return dataclasses.replace(config, **changed)


def build_arm(arm: str, model_config: ModelConfig, config: TrainConfig, seed: int) -> Arm:
    """Return a fresh model with its optimizer; every arm's weights come from the same draw.

    Raises:
        ValueError: an unknown arm.

    >>> shape = ModelConfig(width=16, depth=1, heads=2, context=8)
    >>> type(build_arm("SEL", shape, TrainConfig(steps=10, warmup_steps=1), seed=0).optimizer).__name__
    'SELAdamW'
    """
    model = Transformer(model_config, torch.Generator().manual_seed(seed))
    curved = map_of(arm)
    if curved is None:
        adamw = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        return Arm(model, adamw, clip=True)
    sel.init_(model, curved, xavier=False)
    groups = sel.param_groups(model, lr=config.lr, weight_decay=config.weight_decay, config=curved)
    optimizer = sel.SELAdamW(
        groups, lr=config.lr, betas=config.betas, total_steps=config.steps, max_grad_norm=config.max_grad_norm
    )
    return Arm(model, optimizer, clip=False)
