"""Maps by name: the default, and those of the paper's experiments."""

from collections.abc import Mapping
from typing import Any

from symexplin.checks import check_choice
from symexplin.config import SCALE_ROLES, Scale, SELConfig

__all__ = ["IDENTITY", "PRESETS", "preset"]

IDENTITY = SELConfig(mode="linear", beta=1.0)  # the map whose raw weights are the weights

# The paper's learned scales, with its multipliers for the learning rate 3e-4 (section 5.1).
_LEARNED = {
    "e": Scale("row_col_mult", k=(50.0, 8.0)),
    "l": Scale("row_col_mult", k=(50.0, 8.0)),
    "m": Scale("row_col_mult", k=(0.01, 0.5)),
}
_FROZEN: dict[str, Any] = {"mode": "mismatch"}
_PAPER: dict[str, Any] = {**_FROZEN, **_LEARNED}
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": _PAPER,
    # Assumptions, not in the paper: the multiplier of n and the rank of delta.
    "paper+offset": {**_PAPER, "n": Scale("column"), "delta": Scale("lora", k=(0.5, 0.5))},
    "fixed_curvature": {**_PAPER, "m": Scale()},
    "absorbed": {**_PAPER, "curvature": "absorbed", "normalize": True},
    "frozen": _FROZEN,
    "congruent": {**_PAPER, "mode": "congruent"},
    "exp_only": {**_PAPER, "mode": "exp_only"},
    "structured_linear": {"mode": "linear", "l": _LEARNED["l"]},
    # Not the paper's: structured_linear with one number a matrix.
    "one_number": {"mode": "linear", "l": Scale("global", k=_LEARNED["l"].k)},
}


def preset(name: str, /, **overrides: Any) -> SELConfig:
    """Return a map by its name, with `overrides` of :class:`SELConfig` fields.

    "default" is `SELConfig()`. All but it and "one_number" are the paper's. beta follows the model's width unless
    overridden: 7.5 at width 1024, as in the paper.

    - "paper": mismatch with learned row x column scales e, l and m
    - "paper+offset": the same with a learned offset n and a LoRA residual delta
    - "fixed_curvature": without a learned m
    - "absorbed": with an absorbed curvature, normalized
    - "frozen": mismatch with all scales fixed at one
    - "congruent", "exp_only": learned scales in another mode
    - "structured_linear": a learned row x column l without a curve
    - "one_number": one learned scale l per matrix, without a curve

    The paper starts the first five of them mismatched. An optimizer always keeps the weights that it finds, so call
    ``sel.init_(model, config)`` before training to reproduce that start.

    A scale given as a table changes only the keys that it names; a :class:`Scale` replaces the preset's.

    Raises:
        ValueError: an unknown preset or field. The message names the nearest valid one.

    >>> config = preset("paper", beta=15, e={"k": (10, 2)})
    >>> config.beta, config.e.pattern, config.e.k
    (15.0, 'row_col_mult', (10.0, 2.0))
    """
    check_choice("preset", name, PRESETS)
    fields = SELConfig.from_dict(PRESETS[name]).to_dict()
    for key, value in overrides.items():
        merged = key in SCALE_ROLES and isinstance(value, Mapping)
        fields[key] = {**fields[key], **value} if merged else value
    return SELConfig.from_dict(fields)
