"""Which map a run has: the paper's presets and the lab's own, and what a configuration changes in them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import symexplin as sel
from symexplin.config import PRESETS, SCALE_ROLES, START_RULES
from symexplin.validation import check_choice, check_positive, check_whole, naming

__all__ = ["HOMES", "LAB_PRESETS", "CurveConfig", "describe_map", "map_of", "named_map"]

HOMES = ("optimizer", "module", "none")
LAB_PRESETS = ("carried", "default", *PRESETS)


@dataclass(frozen=True)
class CurveConfig:
    """Where the map lives and which one it is.

    Args:
        home: "optimizer" (SELAdamW over a plain model), "module" (curved layers under AdamW, the paper's form) or
            "none" (AdamW on ordinary weights).
        preset: the map: one of the paper's, "default" (beta by matrix) or "carried" (the paper's geometry at width 1024
            carried to this width, scales fixed).
        start: "matched" (effective weights start as drawn) or "mismatched" (the paper's, for mode "mismatch").
        multiplier_lr: the learning rate of the multipliers k, 3e-4 in the paper: a scale learns at k * multiplier_lr
            whatever lr is.
        anneal_steps: optimizer steps that the multipliers take from k0 to k1 (T, section 4.5); if not given, an
            assumption: all steps of the run.
        map: keys of the map to change, such as beta = 5 or e.k = [50, 8].
    """

    home: str = field(default="optimizer", metadata={"choices": HOMES})
    preset: str = field(default="carried", metadata={"choices": LAB_PRESETS})
    start: str = field(default="matched", metadata={"choices": START_RULES})
    multiplier_lr: float = 3e-4
    anneal_steps: int | None = None
    map: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field but the map, which needs the model's width."""
        check_choice("home", self.home, HOMES)
        check_choice("preset", self.preset, LAB_PRESETS)
        check_choice("start", self.start, START_RULES)
        check_positive("multiplier_lr", self.multiplier_lr)
        if self.anneal_steps is not None:
            check_whole("anneal_steps", self.anneal_steps)


def named_map(preset: str, changes: Mapping[str, Any], width: int | None = None) -> sel.SELConfig:
    """Return a preset of the paper's or the lab's, with `changes`: keys of the map, tables of scales merged.

    >>> config = named_map("paper", {"beta": 5.0, "e": {"k": [10, 2]}})
    >>> config.beta, config.e.pattern, config.e.k
    (5.0, 'row_col_mult', (10.0, 2.0))
    """
    check_choice("preset", preset, LAB_PRESETS)
    if preset == "carried":
        if width is None:
            raise ValueError("preset 'carried' goes with a model's width: name another, such as 'paper'")
        with naming("map"):  # l goes with beta
            base = sel.carried(width, **{key: changes[key] for key in ("beta",) if key in changes})
    else:
        base = sel.SELConfig() if preset == "default" else sel.preset(preset)
    table = base.to_dict()
    for key, value in changes.items():
        scale = key in SCALE_ROLES and isinstance(value, Mapping)
        table[key] = {**table[key], **value} if scale else value
    with naming("map"):
        return sel.SELConfig.from_dict(table)


def map_of(curve: CurveConfig, width: int) -> sel.SELConfig | None:
    """Return the map of a run on a model of `width`, or None for ordinary weights.

    Every learned scale gets its own learning rate ``k * multiplier_lr``: this product carries over between learning
    rates of the weights.
    """
    if curve.home == "none":
        return None
    config = named_map(curve.preset, curve.map, width)
    own = {}
    for role in config.learned_roles:
        scale = getattr(config, role)
        if scale.peak_lr is None:
            rates = (scale.k[0] * curve.multiplier_lr, scale.k[1] * curve.multiplier_lr)
            own[role] = dataclasses.replace(scale, peak_lr=rates)
    return dataclasses.replace(config, **own)


def describe_map(config: sel.SELConfig, rates: bool = True) -> str:
    """Return a map in words: its form, and the scales that are learned or do not start at their usual value.

    `rates` adds the learning rates of the scales.
    """
    beta = config.beta if isinstance(config.beta, str) else f"{config.beta:g}"
    words = [f"mode {config.mode}", f"beta {beta}", f"curvature {config.curvature}"]
    for role in config.roles:
        scale = getattr(config, role)
        usual = scale.start == (0.0 if role in ("n", "delta") else 1.0)
        if not scale.learned:
            words += [] if usual else [f"{role} fixed at {scale.start:.4g}"]
            continue
        text = f"{role} {scale.pattern}{'' if usual else f' from {scale.start:.4g}'}"
        if rates and scale.peak_lr is not None:
            text += " with peak learning rate {:g} to {:g}".format(*scale.peak_lr)
        elif rates:
            text += " with k {:g} to {:g}".format(*scale.k)
        words.append(text)
    return "; ".join(words)
