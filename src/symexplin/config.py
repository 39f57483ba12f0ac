"""The configuration of the map, validated and serializable."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from symexplin.checks import check_choice, check_finite, check_flag, check_positive, check_whole, naming

__all__ = [
    "BETA_AT_1024",
    "CLOSED_MODES",
    "CURVATURES",
    "DECAYED_ROLES",
    "MODES",
    "PATTERNS",
    "SCALE_ROLES",
    "SELConfig",
    "Scale",
    "Span",
    "auto_beta",
    "check_config",
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
PATTERNS = ("fixed", "global", "row", "column", "row_col_mult", "row_col_add", "lora")
SCALE_ROLES = ("e", "l", "m", "n", "s", "delta")
# Weight decay applies to scales that weight a pathway, not to scales that shape it (paper, section 4.4).
# Assumption, since the paper does not say: s decays, LoRA factors do not.
DECAYED_ROLES = frozenset({"e", "l", "s"})

CLOSED_MODES = ("exp_only", "sinh", "linear")  # their inverse has a closed form
_USUAL_START = {"n": 0.0, "delta": 0.0}  # the other scales start at 1

# The paper's beta at its smallest width (section 5.2). From there up, width^0.8 matches its 12-15 at 2048 and 17.5-20
# at 3072; below, the square root keeps kappa times Xavier's bound constant. Both exponents are our choice.
BETA_AT_1024 = 7.5
_WIDTH, _ABOVE, _BELOW = 1024, 0.8, 0.5
_PAPER_LR = 3e-4  # the learning rate that the paper's multipliers k go with (section 5.1)

Span = tuple[float, float]


def auto_beta(width: int) -> float:
    """Return the reference curvature of a model: ``7.5 (width/1024)^p``, p = 0.8 from 1024 up and 0.5 below.

    The curve matches the paper's 7.5, 12-15 and 17.5-20 at widths 1024, 2048 and 3072 (section 5.2). Below 1024 it
    keeps kappa times Xavier's bound at 0.41 for a square matrix.

    >>> [round(auto_beta(width), 2) for width in (64, 256, 1024, 2048, 3072)]
    [1.88, 3.75, 7.5, 13.06, 18.06]
    """
    check_positive("width", width)
    growth: float = (width / _WIDTH) ** (_ABOVE if width >= _WIDTH else _BELOW)
    return BETA_AT_1024 * growth


def _span(name: str, value: object) -> Span:
    """Return a multiplier as a (start, end) pair."""
    pair = value if isinstance(value, list | tuple) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be a number or a (start, end) pair, got {value!r}")
    return check_positive(name, pair[0]), check_positive(name, pair[1])


@dataclass(frozen=True)
class Scale:
    """The structure, initial value and learning rate of one scale (paper, sections 4.4 and 4.5).

    Args:
        pattern: "fixed" (a constant), "global" (one number), "row" (d_out values), "column" (d_in values),
            "row_col_mult" (their outer product), "row_col_add" (their sum) or "lora" (start + A B, B = 0).
        start: the initial value. Default (None): 0 for n and delta, 1 for the others, and beta/7.5 for l if beta is
            below 7.5 (:meth:`SELConfig.resolve`).
        k: the scale's learning rate in units of `base_lr`: a number, or (k0, k1) to anneal it as in section 4.5.
        base_lr: the learning rate that `k` multiplies. The paper uses k with 3e-4, and the product k * 3e-4 carries
            over to other learning rates of the weights, so this is the default. 1 makes `k` the learning rate itself.
            None multiplies the learning rate of the weights: k = 50 with 3e-3 is a rate of 0.15, at which the scales
            of our run were chaotic (results/log.md, 2026-11-21).
        rank: rank of "lora".

    Raises:
        ValueError: a value is out of range.

    >>> Scale("row_col_mult", k=(50, 8)).multiplier(lr=6e-4)
    (25.0, 4.0)
    """

    pattern: str = "fixed"
    start: float | None = None
    k: Span = (1.0, 1.0)
    base_lr: float | None = _PAPER_LR
    rank: int = 8

    def __repr__(self) -> str:
        """Return the call that makes an equal one.

        >>> Scale("row", k=(50, 8))
        Scale(pattern='row', k=(50.0, 8.0))
        """
        return _call(self)

    def __post_init__(self) -> None:
        """Check every field and turn single multipliers into pairs."""
        check_choice("pattern", self.pattern, PATTERNS)
        if self.start is not None:
            object.__setattr__(self, "start", check_finite("start", self.start))
        object.__setattr__(self, "rank", check_whole("rank", self.rank))
        object.__setattr__(self, "k", _span("k", self.k))
        if self.base_lr is not None:
            object.__setattr__(self, "base_lr", check_positive("base_lr", self.base_lr))

    @property
    def learned(self) -> bool:
        """Whether the scale has parameters."""
        return self.pattern != "fixed"

    @property
    def first(self) -> float:
        """The initial value, which :meth:`SELConfig.resolve` has filled in."""
        assert self.start is not None, "the configuration is not resolved"
        return self.start

    def multiplier(self, lr: float | None) -> Span:
        """Return (k0, k1) in units of the optimizer's peak learning rate `lr`."""
        if self.base_lr is None:
            return self.k
        if lr is None:
            raise ValueError("lr must be given when scales are learned at a rate of their own: k * base_lr / lr")
        check_positive("lr", lr)
        return self.k[0] * (self.base_lr / lr), self.k[1] * (self.base_lr / lr)


@dataclass(frozen=True)
class SELConfig:
    """The map of a model: mode, curvature, scales, and which parameters to curve.

    The default map is the paper's optimizer-side form (section 5.3): ``w_eff = sign(w) expm1(beta |w|)/beta`` with a
    beta chosen by the model's width. It is odd, has AdamW's slope of 1 at zero and needs no state of its own. It is
    also the mildest of the paper's curves: the paper's largest gains are those of learned mismatch maps, which
    :func:`symexplin.preset` provides.

    Args:
        beta: reference curvature of all matrices, or "auto" to choose it by the model's width (:meth:`resolve`).
        mode: "exp_only", "mismatch" (the paper's main form), "congruent", "oppose", "damped", "sinh" or "linear".
        curvature: "fixed" (kappa = beta m) or "absorbed" (kappa = exp(a), with a configured by `m`).
        normalize: divide by kappa instead of beta.
        e, l, m, n, s, delta: one :class:`Scale` each. A mode ignores the scales that it does not use. `delta` is
            off ("fixed") or "lora", and its learning rate is also divided by beta (paper, section 4.2).
        include, exclude: fnmatch patterns of fully qualified parameter names to curve or to leave plain. They
            override the rules of :func:`symexplin.routing`, and exclude overrides include.
        seed: seed of the private generator that initializes LoRA's A factors, from 0 to 2^32 - 1.

    Raises:
        ValueError: a value is out of range. The message names the argument, the value and the valid range.

    >>> config = SELConfig(beta=7.5, mode="congruent")
    >>> SELConfig.from_dict(config.to_dict()) == config
    True
    """

    beta: float | str = "auto"
    mode: str = "exp_only"
    curvature: str = "fixed"
    normalize: bool = False
    e: Scale = field(default=Scale())
    l: Scale = field(default=Scale())
    m: Scale = field(default=Scale())
    n: Scale = field(default=Scale())
    s: Scale = field(default=Scale())
    delta: Scale = field(default=Scale())
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    seed: int = 0

    def __repr__(self) -> str:
        """Return the call that makes an equal one.

        >>> SELConfig(beta=7.5, e=Scale("row"))
        SELConfig(beta=7.5, e=Scale(pattern='row'))
        """
        return _call(self)

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
            _check_scale(role, getattr(self, role))

    @property
    def roles(self) -> tuple[str, ...]:
        """The scales that the mode uses, in the order of :data:`SCALE_ROLES`."""
        used = ("m" if role == "kappa" else role for role in MODES[self.mode])
        return (*used, "s", "delta")

    @property
    def learned_roles(self) -> tuple[str, ...]:
        """The scales with parameters."""
        return tuple(role for role in self.roles if getattr(self, role).learned)

    @property
    def closed(self) -> bool:
        """Whether the raw weight is a fixed, closed-form function of the weight, so that it is never stored.

        >>> SELConfig().closed, SELConfig(e=Scale("row")).closed, SELConfig(mode="mismatch").closed
        (True, False, False)
        """
        return self.mode in CLOSED_MODES and not self.learned_roles

    def resolve(self, width: int) -> Self:
        """Return the configuration with the missing numbers filled in for a model of this `width`.

        beta="auto" becomes :func:`auto_beta`. Below beta 7.5, given or automatic, l starts at ``beta/7.5``, so that
        the linear pathway keeps 1/7.5 of the unit slope as at width 1024. With l = 1 its share would be 1/beta, and
        the mismatch map would have no inverse for beta <= 1.

        >>> config = SELConfig().resolve(256)
        >>> config.beta, config.l.start
        (3.75, 0.5)
        >>> SELConfig(l=Scale(start=1)).resolve(256).l.start
        1.0
        """
        beta = auto_beta(width) if isinstance(self.beta, str) else self.beta
        starts = {role: _USUAL_START.get(role, 1.0) for role in SCALE_ROLES}
        if self.mode != "linear":  # there l is the map itself
            starts["l"] = min(1.0, beta / BETA_AT_1024)
        missing = [role for role in SCALE_ROLES if getattr(self, role).start is None]
        filled = {role: dataclasses.replace(getattr(self, role), start=starts[role]) for role in missing}
        return dataclasses.replace(self, beta=beta, **filled)

    def multipliers(self, lr: float | None = None) -> dict[str, Span]:
        """Return (k0, k1) of every learned scale at the optimizer's peak learning rate `lr`."""
        return {role: getattr(self, role).multiplier(lr) for role in self.learned_roles}

    def __str__(self) -> str:
        """Return the map in words: its form, and the scales that are learned or have an unusual initial value.

        >>> print(SELConfig().resolve(256))
        exp_only, beta 3.75
        >>> print(SELConfig(beta=7.5, mode="congruent", e=Scale("row_col_mult", k=(50, 8)), l=Scale(start=2)))
        congruent, beta 7.5, l 2, e learned (row_col_mult, k 50 to 8)
        """
        beta = self.beta if isinstance(self.beta, str) else format(self.beta, ".4g")
        words = [self.mode] if self.mode == "linear" else [self.mode, f"beta {beta}"]
        words += ["absorbed curvature"] if self.curvature == "absorbed" else []
        words += ["normalized"] if self.normalize else []
        learned: dict[str, list[str]] = {}
        for role in self.roles:
            scale = getattr(self, role)
            first = "" if scale.start in (None, _USUAL_START.get(role, 1.0)) else f"{scale.start:.4g}"
            if scale.learned:
                how = ", ".join([scale.pattern, *([f"from {first}"] if first else []), _span_words(scale.k)])
                learned.setdefault(how, []).append(role)
            elif first:
                words.append(f"{role} {first}")
        words += [f"{' and '.join(roles)} learned ({how})" for how, roles in learned.items()]
        return ", ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as nested dicts, sequences, strings and numbers."""
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
        if not isinstance(values, Mapping):
            raise ValueError(f"values must be a dictionary, got {values!r}")
        names = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            check_choice("key", key, names)
        fields: dict[str, Any] = {key: _scale(key, v) if key in SCALE_ROLES else v for key, v in values.items()}
        return cls(**fields)


def _span_words(k: Span) -> str:
    """Return a multiplier in words.

    >>> _span_words((50.0, 8.0)), _span_words((1.0, 1.0))
    ('k 50 to 8', 'k 1')
    """
    return f"k {k[0]:g}" if k[0] == k[1] else f"k {k[0]:g} to {k[1]:g}"


def _call(instance: SELConfig | Scale) -> str:
    """Return a call with the fields that differ from their defaults."""
    values = [(f.name, getattr(instance, f.name), f.default) for f in dataclasses.fields(instance)]
    given = [f"{name}={value!r}" for name, value, default in values if value != default]
    return f"{type(instance).__name__}({', '.join(given)})"


def _check_scale(role: str, scale: object) -> None:
    if not isinstance(scale, Scale):
        raise ValueError(f"{role} must be a Scale, such as symexplin.Scale('row'), got {scale!r}")
    start = _USUAL_START.get(role, 1.0) if scale.start is None else scale.start
    if scale.pattern == "row_col_mult" and start == 0.0:
        raise ValueError(
            f"{role}.pattern 'row_col_mult' cannot start at 0: both factors would have gradient 0 forever; "
            "use 'column' or 'row_col_add'"
        )
    if role == "delta" and (scale.pattern not in ("fixed", "lora") or start != 0.0):
        raise ValueError(f"delta must be off ('fixed') or 'lora', starting at 0, got {scale}")
    if role == "m" and start <= 0.0:
        raise ValueError(f"m.start must be positive, got {start}")


def _scale(role: str, value: object) -> Scale:
    if isinstance(value, Scale):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{role} must be a table of Scale keys, got {value!r}")
    for key in value:
        check_choice(f"{role} key", key, [f.name for f in dataclasses.fields(Scale)])
    with naming(role):
        return Scale(**value)


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
