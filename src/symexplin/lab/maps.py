"""Which map a run has: the default or one of the paper's presets, and what a configuration changes in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import symexplin as sel
from symexplin.config import START_RULES
from symexplin.presets import PRESETS
from symexplin.validation import check_choice, check_whole, naming

__all__ = ["HOMES", "CurveConfig", "map_of", "named_map"]

HOMES = ("optimizer", "module", "none")


@dataclass(frozen=True)
class CurveConfig:
    """Where the map lives and which one it is.

    Args:
        home: "optimizer" (SELAdamW over a plain model), "module" (curved layers under AdamW, the paper's form) or
            "none" (AdamW on ordinary weights).
        preset: the map: "default" (beta by the model's width, scales fixed) or one of the paper's.
        start: "matched" (effective weights start as drawn) or "mismatched" (the paper's, for mode "mismatch"); if not
            given, that of the preset.
        anneal_steps: optimizer steps that the multipliers take from k0 to k1 (T, section 4.5); if not given, an
            assumption: all steps of the run.
        map: keys of the map to change, such as beta = 5 or e.k = [50, 8].
    """

    home: str = field(default="optimizer", metadata={"choices": HOMES})
    preset: str = field(default="default", metadata={"choices": tuple(PRESETS)})
    start: str | None = field(default=None, metadata={"choices": START_RULES})
    anneal_steps: int | None = None
    map: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field but the map, which needs the model's width."""
        check_choice("home", self.home, HOMES)
        check_choice("preset", self.preset, PRESETS)
        if self.start is not None:
            check_choice("start", self.start, START_RULES)
        if self.anneal_steps is not None:
            check_whole("anneal_steps", self.anneal_steps)


def named_map(preset: str, changes: Mapping[str, Any]) -> sel.SELConfig:
    """Return a preset with `changes`; a mistake in them is told as one of the table `map`.

    >>> named_map("paper", {"beta": 5.0, "e": {"k": [10, 2]}}).e.k
    (10.0, 2.0)
    """
    with naming("map"):
        return sel.preset(preset, **changes)


def map_of(curve: CurveConfig, width: int) -> sel.SELConfig | None:
    """Return the map of a run on a model of `width`, or None for ordinary weights."""
    if curve.home == "none":
        return None
    start = {} if curve.start is None else {"start": curve.start}
    return named_map(curve.preset, {**start, **curve.map}).resolve(width).check_inverse()
