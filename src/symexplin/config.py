"""The validated configuration of the map, and the paper's presets."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from symexplin.validation import check_choice, check_finite, check_flag, check_positive, check_whole

__all__ = [
    "CURVATURES",
    "DECAYED_ROLES",
    "MODES",
    "PATTERNS",
    "PRESETS",
    "SCALE_ROLES",
    "START_RULES",
    "SELConfig",
    "Scale",
    "carried",
    "check_config",
    "preset",
]

# The scales that each mode uses; others are never created. All modes use `s` and `delta`.
MODES: dict[str, tuple[str, ...]] = {
    "mismatch": ("e", "l", "kappa", "n"),
    "congruent": ("e", "l", "kappa", "n"),
    "exp_only": ("e", "kappa", "n"),
    "oppose": ("e", "l", "kappa", "n"),
    "damped": ("n",),
    "sinh": ("kappa",),
    "linear": ("l",),
}
CURVATURES = ("fixed", "absorbed")
START_RULES = ("matched", "mismatched")
PATTERNS = ("fixed", "global", "row", "column", "row_col_mult", "row_col_add", "lora")
SCALE_ROLES = ("e", "l", "m", "n", "s", "delta")
# Weight decay applies to scales that weight a pathway, not to scales that shape it (paper, section 4.4).
# Assumption, since the paper does not say: s decays, LoRA factors do not.
DECAYED_ROLES = frozenset({"e", "l", "s"})

Span = tuple[float, float]


def _span(name: str, value: object) -> Span:
    """Return a multiplier or learning rate as a (start, end) pair."""
    pair = value if isinstance(value, list | tuple) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be a number or a (start, end) pair, got {value!r}")
    return check_positive(name, pair[0]), check_positive(name, pair[1])


@dataclass(frozen=True)
class Scale:
    """The structure, start value and learning rate of one scale (paper, sections 4.4 and 4.5).

    Args:
        pattern: "fixed" (one constant), "global", "row" (d_out values), "column" (d_in), "row_col_mult" (their
            outer product), "row_col_add" (their sum), "lora" (start + A B, B = 0).
        start: the scale's first value.
        k: multiplier of the optimizer's learning rate, a number or (k0, k1), annealed as in section 4.5.
        peak_lr: replaces `k`: the scale's learning rate at the optimizer's peak learning rate, a number or
            (start, end). The product k * lr carries over to other learning rates; k alone does not.
        rank: rank of "lora".

    >>> Scale("row_col_mult", k=(50, 8)).k
    (50.0, 8.0)
    """

    pattern: str = "fixed"
    start: float = 1.0
    k: Span = (1.0, 1.0)
    peak_lr: Span | None = None
    rank: int = 8

    def __post_init__(self) -> None:
        """Check every field and turn single multipliers into pairs."""
        check_choice("pattern", self.pattern, PATTERNS)
        object.__setattr__(self, "start", check_finite("start", self.start))
        object.__setattr__(self, "rank", check_whole("rank", self.rank))
        object.__setattr__(self, "k", _span("k", self.k))
        if self.peak_lr is not None:
            object.__setattr__(self, "peak_lr", _span("peak_lr", self.peak_lr))

    @property
    def learned(self) -> bool:
        """Whether the scale has parameters."""
        return self.pattern != "fixed"

    def multiplier(self, lr: float | None) -> Span:
        """Return (k0, k1): `k`, or `peak_lr` divided by the optimizer's peak learning rate `lr`."""
        if self.peak_lr is None:
            return self.k
        if lr is None:
            raise ValueError("lr must be given when a scale sets peak_lr: k = peak_lr / lr")
        check_positive("lr", lr)
        return self.peak_lr[0] / lr, self.peak_lr[1] / lr


# The paper's multipliers, for its learning rate 3e-4 (section 5.1).
_E = Scale("row_col_mult", k=(50.0, 8.0))
_L = Scale("row_col_mult", k=(50.0, 8.0))
_M = Scale("row_col_mult", k=(0.01, 0.5))


@dataclass(frozen=True)
class SELConfig:
    """The map of a model: mode, curvature, scales and the choice of curved parameters.

    Args:
        beta: reference curvature of every matrix, or "auto" for :func:`symexplin.functional.auto_beta`.
        mode: "mismatch", "congruent", "exp_only", "oppose", "damped", "sinh" or "linear".
        curvature: "fixed" (kappa = beta m) or "absorbed" (kappa = exp(a), with a configured by `m`).
        normalize: divide by kappa instead of beta.
        e, l, m, n, s, delta: one :class:`Scale` each. A mode ignores the scales that it does not use. `delta` is
            off ("fixed") or "lora". Its learning rate is also divided by beta (paper, section 4.2).
        include, exclude: fnmatch patterns of fully qualified parameter names to curve or to leave plain. They
            override the rules of :func:`symexplin.routing`, and exclude overrides include.
        seed: seed of the private generator that draws LoRA's A factors, from 0 to 2^32 - 1.

    Raises:
        ValueError: a value is out of range. The message names the argument, the value and the valid range.

    >>> config = SELConfig(beta=7.5, mode="congruent")
    >>> SELConfig.from_dict(config.to_dict()) == config
    True
    """

    beta: float | str = "auto"
    mode: str = "mismatch"
    curvature: str = "fixed"
    normalize: bool = False
    e: Scale = _E
    l: Scale = _L
    m: Scale = _M
    n: Scale = field(default=Scale(start=0.0))
    s: Scale = field(default=Scale())
    delta: Scale = field(default=Scale(start=0.0))
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        if self.beta != "auto":
            if isinstance(self.beta, str):
                raise ValueError(f"beta must be a positive number or 'auto', got {self.beta!r}")
            object.__setattr__(self, "beta", check_positive("beta", self.beta))
        check_choice("mode", self.mode, MODES)
        check_choice("curvature", self.curvature, CURVATURES)
        check_flag("normalize", self.normalize)
        object.__setattr__(self, "seed", check_whole("seed", self.seed, minimum=0, maximum=2**32 - 1))
        for name in ("include", "exclude"):
            patterns = getattr(self, name)
            if not isinstance(patterns, list | tuple) or not all(isinstance(p, str) for p in patterns):
                raise ValueError(f"{name} must be a sequence of name patterns, got {patterns!r}")
            object.__setattr__(self, name, tuple(patterns))
        for role in SCALE_ROLES:
            self._check_scale(role, getattr(self, role))

    def _check_scale(self, role: str, scale: object) -> None:
        if not isinstance(scale, Scale):
            raise ValueError(f"{role} must be a Scale, got {scale!r}")
        if scale.pattern == "row_col_mult" and scale.start == 0.0:
            raise ValueError(
                f"{role}.pattern 'row_col_mult' cannot start at 0: both factors would have gradient 0 for ever; "
                "use 'column' or 'row_col_add'"
            )
        if role == "delta" and (scale.pattern not in ("fixed", "lora") or scale.start != 0.0):
            raise ValueError(f"delta must be off ('fixed') or 'lora', starting at 0, got {scale}")
        if role == "m" and scale.start <= 0.0:
            raise ValueError(f"m.start must be positive, got {scale.start}")

    @property
    def roles(self) -> tuple[str, ...]:
        """The scales that the mode uses, in the order of :data:`SCALE_ROLES`."""
        used = ("m" if role == "kappa" else role for role in MODES[self.mode])
        return (*used, "s", "delta")

    @property
    def learned_roles(self) -> tuple[str, ...]:
        """The scales with parameters."""
        return tuple(role for role in self.roles if getattr(self, role).learned)

    def beta_of(self, d_out: int, d_in: int) -> float:
        """Return the reference curvature of a matrix: the given one, or the automatic one for its shape."""
        from symexplin.functional import auto_beta  # this module needs no torch

        return auto_beta(d_out, d_in) if isinstance(self.beta, str) else self.beta

    def multipliers(self, lr: float | None = None) -> dict[str, Span]:
        """Return (k0, k1) of every learned scale at the optimizer's peak learning rate `lr`."""
        return {role: getattr(self, role).multiplier(lr) for role in self.learned_roles}

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as nested plain dicts, lists, strings and numbers."""
        plain = dataclasses.asdict(self)
        return {key: list(v) if isinstance(v, tuple) else v for key, v in plain.items()}

    def to_json(self) -> str:
        """Return :meth:`to_dict` as one line of JSON, the form stored in an optimizer's groups."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the configuration that :meth:`to_json` wrote."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration that :meth:`to_dict` wrote; missing keys take their defaults."""
        names = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            check_choice("key", key, names)
        fields: dict[str, Any] = {key: _scale(key, v) if key in SCALE_ROLES else v for key, v in values.items()}
        return cls(**fields)


def _scale(role: str, value: object) -> Scale:
    if isinstance(value, Scale):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{role} must be a table of Scale keys, got {value!r}")
    for key in value:
        check_choice(f"{role} key", key, [f.name for f in dataclasses.fields(Scale)])
    return Scale(**value)


_OFF = Scale()
_PAPER: dict[str, Any] = {"beta": 7.5}
_PAPER_WIDTH = 1024  # the paper's smallest width, trained with beta 7.5
PRESETS: dict[str, dict[str, Any]] = {
    "paper": _PAPER,
    # Assumptions, not in the paper: the multiplier of n and the rank of delta.
    "paper+offset": {
        **_PAPER,
        "n": Scale("column", start=0.0),
        "delta": Scale("lora", start=0.0, k=(0.5, 0.5)),
    },
    "fixed_curvature": {**_PAPER, "m": _OFF},
    "absorbed": {**_PAPER, "curvature": "absorbed", "normalize": True},
    "frozen": {**_PAPER, "e": _OFF, "l": _OFF, "m": _OFF},
    "congruent": {**_PAPER, "mode": "congruent"},
    "exp_only": {**_PAPER, "mode": "exp_only"},
    "structured_linear": {**_PAPER, "mode": "linear"},
}


def preset(name: str, **overrides: Any) -> SELConfig:
    """Return one of the paper's configurations, with `overrides` of :class:`SELConfig` fields.

    "paper" (width 1024: beta 7.5, mismatch, learned row x column e, l, m), "paper+offset", "fixed_curvature",
    "absorbed" (normalized), "frozen" (all scales one), "congruent", "exp_only", "structured_linear".

    Raises:
        ValueError: an unknown preset or field. The message names the nearest valid one.

    >>> preset("paper", beta=15).beta
    15.0
    """
    check_choice("preset", name, PRESETS)
    return SELConfig.from_dict({**PRESETS[name], **overrides})


def carried(width: int, **overrides: Any) -> SELConfig:
    """Return the paper's configuration for width 1024, rescaled to another width.

    Xavier's bound is proportional to 1/sqrt(width), so ``beta = 7.5 sqrt(width/1024)`` keeps kappa |w| at the start.
    ``l = beta/7.5`` keeps the linear pathway at 1/7.5 of the unit slope; with l = 1 its share would be 1/beta. All
    scales are fixed. Width 1024 gives ``preset("frozen")``. This is the laboratory's default, chosen by the
    measurements at small widths in docs/log.md.

    Args:
        width: inputs of the model's layers.
        overrides: fields of :class:`SELConfig`. `beta` must be a number. l starts at beta/7.5, also if it is given as
            a mapping without "start". An l given as a :class:`Scale` is used unchanged.

    Raises:
        ValueError: width is not a positive integer, beta is not a positive number, or a field is unknown.

    >>> config = carried(256)
    >>> config.beta, config.l.start
    (3.75, 0.5)
    >>> carried(256, l={"pattern": "row"}).l.start
    0.5
    """
    beta = _PAPER["beta"] * (check_whole("width", width) / _PAPER_WIDTH) ** 0.5
    beta = check_positive("beta", overrides.pop("beta", beta))
    linear = overrides.pop("l", {})
    if isinstance(linear, Mapping):
        linear = {"start": beta / _PAPER["beta"], **linear}
    return SELConfig.from_dict({**PRESETS["frozen"], "beta": beta, "l": linear, **overrides})


def check_config(config: object) -> SELConfig:
    """Return `config`, or the default for None; raise ValueError for another type, such as a preset's name.

    >>> check_config("paper")
    Traceback (most recent call last):
    ValueError: config must be a SELConfig, such as symexplin.preset('paper'), got 'paper'
    """
    if config is None:
        return SELConfig()
    if not isinstance(config, SELConfig):
        raise ValueError(f"config must be a SELConfig, such as symexplin.preset('paper'), got {config!r}")
    return config
