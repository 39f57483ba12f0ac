"""Attempts to gain on AdamW that the library does not offer: curvature that changes, moments in effective space.

They are for measurements alone. A run with `beta_end` or `beta_deviations` cannot be resumed.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import symexplin as sel
from symexplin.config import SELConfig
from symexplin.coordinates import Coordinates
from symexplin.lab.config import TrainConfig
from symexplin.optim.batch import Batch, ReadableBatch, Target
from symexplin.optim.groups import is_curved
from symexplin.optim.parameter import ParameterView

__all__ = ["ChangingCurvature", "EffectiveMoments", "per_matrix"]

_CHANGES = 20  # times that the curvature changes in a run


def per_matrix(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups with one curved parameter each, so that each may have a beta of its own."""
    found: list[dict[str, Any]] = []
    for group in groups:
        if not is_curved(group):
            found.append(group)
            continue
        for i in range(len(group["params"])):
            own = {key: [group[key][i]] for key in ("params", "out_dim", "position", "shape")}
            found.append({**group, **own})
    return found


class ChangingCurvature:
    """Change beta twenty times in a run; effective weights, and the moments of their gradients, stay what they are."""

    def __init__(self, optimizer: sel.SELAdamW, train: TrainConfig) -> None:
        self._optimizer, self._train = optimizer, train
        self._first = [float(SELConfig.from_json(g["config"]).beta) for g in optimizer.param_groups if is_curved(g)]

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Change the curvature before the update after `step` others."""
        if step == 0 or step % max(1, self._train.steps // _CHANGES):
            return
        for view in list(self._optimizer.entries()):
            if view.curved:
                self._change(view, step / self._train.steps)
        self._optimizer._forget()

    def _change(self, view: ParameterView, progress: float) -> None:
        old = view.coordinates()
        slope, weight = _slope(old), old.effective(torch.float32)
        config = SELConfig.from_json(view.group["config"])
        view.group["config"] = config.__class__(
            **{**vars(config), "beta": self._beta(view, weight, progress)}
        ).to_json()
        new = ParameterView(view.group, view.index, view.state)
        new.own("raw").copy_(new.coordinates().matched(weight))
        ratio = _slope(new.coordinates()) / slope
        new.moment("raw", "exp_avg").mul_(ratio)
        new.moment("raw", "exp_avg_sq").mul_(ratio.square())

    def _beta(self, view: ParameterView, weight: Tensor, progress: float) -> float:
        if self._train.beta_deviations is not None:
            return float(1.0 / (self._train.beta_deviations * weight.std().clamp(min=1e-4)))
        curved = [group for group in self._optimizer.param_groups if is_curved(group)]
        first = next(beta for group, beta in zip(curved, self._first, strict=True) if group is view.group)
        assert self._train.beta_end is not None
        return float(first * (self._train.beta_end / first) ** progress)


def _slope(coordinates: Coordinates) -> Tensor:
    return coordinates.pullback(torch.ones_like(coordinates.raw)).raw


class EffectiveMoments(sel.SELAdamW):
    """SELAdamW, fixed scales, with the first moment ("first") or both ("mirror") of gradients in effective space.

    first: m averages g, v averages (f' g)^2, and the raw step is lr f' m / sqrt(v). mirror: m averages g, v averages
    g^2, and the raw step is lr m / sqrt(v), as of mirror descent with the raw weight as the dual variable.
    """

    mirror = False

    def batches_(self, active: Sequence[ParameterView]) -> Iterable[Batch]:
        """Return readable batches."""
        return [_Batch([view], self.moments_) for view in active]

    def rule_(self, target: Target, group: dict[str, Any]) -> None:
        """Apply AdamW in place."""
        slope = getattr(target, "slope", None)
        if slope is None:
            super().rule_(target, group)
            return
        if self.mirror:
            slope = torch.ones_like(slope)
        (beta1, beta2), step = group["betas"], float(target.step)
        exp_avg, exp_avg_sq = target.moment("exp_avg"), target.moment("exp_avg_sq")
        target.decay_()
        raw = target.grad * slope
        exp_avg.lerp_(target.grad, 1.0 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(raw, raw, value=1.0 - beta2)
        denominator = (exp_avg_sq.sqrt() / (1.0 - beta2**step) ** 0.5).add_(group["eps"])
        target.value.sub_(exp_avg * slope / denominator * (target.lr / (1.0 - beta1**step)))


class _Batch(ReadableBatch):
    """One parameter, with the gradient of its effective weight."""

    def pull(self) -> None:
        super().pull()
        for target in self._targets:
            if target.kind == "raw":
                assert self._coordinates is not None
                target.slope = _slope(self._coordinates)  # type: ignore[attr-defined]
                target.grad = self.views[0].gradient().to(target.grad.dtype)
