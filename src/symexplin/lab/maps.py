"""Which map a run has: the default or one of the paper's presets, and what a configuration changes in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import symexplin as sel
from symexplin.checks import naming
from symexplin.lab.settings import Count, Pairs, Schema
from symexplin.presets import PRESETS

__all__ = ["CurveConfig", "map_in_words", "map_of", "named_map"]

Start = Literal["matched", "mismatched"]
if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(PRESETS)]


@dataclass(frozen=True)
class CurveConfig(Schema):
    """Where the map lives and which one it is.

    Args:
        home: "optimizer" (SELAdamW over a plain model), "module" (curved layers under AdamW, the paper's form) or
            "none" (AdamW on ordinary weights).
        preset: the map: "default" (scales fixed) or one of the paper's. beta follows the model's width, unless map says
            otherwise.
        start: "matched" (weights start as initialized) or "mismatched" (the paper's for mode "mismatch", by
            `symexplin.init_`). Default: "matched".
        start_exclude: patterns of parameters that the mismatched start leaves as initialized, such as "*.o.*".
        anneal_steps: optimizer steps that the multipliers take from k0 to k1 (T, section 4.5); if not given, an
            assumption: all steps of the schedule.
        map: keys of the map to change, such as beta = 5 or e.k = [50, 8].
    """

    home: Literal["optimizer", "module", "none"] = "optimizer"
    preset: Preset = "default"
    start: Start | None = None
    start_exclude: tuple[str, ...] = ()
    anneal_steps: Count | None = None
    map: Pairs = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field; home "none" would silently do without a map."""
        super().__post_init__()
        given = {"preset": self.preset != "default", "start": self.start is not None, "map": bool(self.map)}
        if self.start_exclude and self.starts_as != "mismatched":
            raise ValueError(f"start_exclude must be left out unless start is 'mismatched', got {self.start_exclude}")
        for name, is_given in given.items():
            if self.home == "none" and is_given:
                raise ValueError(f"{name} must be left out for home 'none', got {getattr(self, name)!r}")

    @property
    def starts_as(self) -> Start:
        """The start: as given, else as initialized."""
        return self.start or "matched"

    @property
    def start_in_words(self) -> str:
        """The start, and what it leaves out."""
        return self.starts_as + (f" (without {', '.join(self.start_exclude)})" if self.start_exclude else "")


def named_map(preset: str, changes: Mapping[str, Any]) -> sel.SELConfig:
    """Return a preset with `changes`; a mistake in them is told as one of the table `map`.

    >>> named_map("paper", {"beta": 5.0, "e": {"k": [10, 2]}}).e.k
    (10.0, 2.0)
    """
    with naming("map"):
        return sel.preset(preset, **changes)


def map_in_words(config: sel.SELConfig, start: str) -> str:
    """Return a map with its start; only that of mode "mismatch" may differ from the model's own weights.

    >>> map_in_words(named_map("frozen", {"beta": 5.0}), "mismatched")
    'mismatch, beta 5, mismatched start'
    """
    return f"{config}, {start} start" if config.mode == "mismatch" else str(config)


def map_of(curve: CurveConfig, width: int) -> sel.SELConfig | None:
    """Return the map of a run on a model of `width`, or None for ordinary weights.

    Raises:
        ValueError: a map that has no inverse.
    """
    from symexplin.transform import check_invertible  # torch, which the help of a command does without

    if curve.home == "none":
        return None
    config = named_map(curve.preset, curve.map)
    if curve.starts_as == "mismatched" and config.mode != "mismatch":
        raise ValueError(f"start must be 'matched' for mode {config.mode!r}, got 'mismatched', which is for 'mismatch'")
    return check_invertible(config.resolve(width))
