"""Switch a run from AdamW to SELAdamW and back, with the moments in the other's coordinates."""

from typing import Any

import torch
from torch import Tensor

from symexplin.optim.adamw import SELAdamW
from symexplin.optim.entry import Entry
from symexplin.optim.groups import name_of
from symexplin.optim.shard import local

__all__ = ["from_adamw", "to_adamw"]

# The power of f' that multiplies each moment in a change of coordinates.
_POWERS = {"exp_avg": 1, "exp_avg_sq": 2}
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")  # torch's keep them in the groups


@torch.inference_mode(False)
@torch.no_grad()
def from_adamw(optimizer: SELAdamW, adamw: torch.optim.Adam) -> None:
    """Start `optimizer` from the moments of `adamw` over the same parameters, at their present weights.

    For a weight w_eff = f(w) the chain rule gives ``g_raw = f'(w) g``. The moments of raw weights and biases are
    therefore ``m_raw = f'(w) m`` and ``v_raw = f'(w)^2 v``, elementwise. Those of plain parameters are copied. "step"
    continues from AdamW's. The scales are new: their moments, "scale_step" and annealing start at zero. No weight
    changes. Past gradients may have been clipped in effective space; the moments keep that.

    To switch from a checkpoint, build the model and AdamW as before and load both. Then build SELAdamW and call this.

    Args:
        optimizer: a :class:`symexplin.SELAdamW` that has neither stepped nor loaded a state.
        adamw: `torch.optim.AdamW` or `Adam`. Parameters without state in it start new.

    Raises:
        ValueError: an optimizer with state, another rule than SELAdamW's, AMSGrad or maximisation, or a parameter that
            `adamw` does not have.

    >>> import symexplin as sel
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    >>> adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> adamw.step()
    >>> optimizer = sel.SELAdamW(sel.param_groups(model, lr=1e-3, config=sel.preset("paper")), total_steps=100)
    >>> from_adamw(optimizer, adamw)
    >>> float(optimizer.state[model[0].weight]["step"])
    1.0
    """
    _check_rule(optimizer)
    if not isinstance(adamw, torch.optim.Adam):
        raise ValueError(f"adamw must be a torch.optim.AdamW or Adam, got {type(adamw).__name__}")
    if optimizer.state:
        raise ValueError("optimizer must not have stepped or loaded a state: it would be lost")
    for flag in ("amsgrad", "maximize"):
        if any(group[flag] for group in adamw.param_groups):
            raise ValueError(f"adamw must not use {flag}, which SELAdamW does not have")
    if any(group["weight_decay"] and not group["decoupled_weight_decay"] for group in adamw.param_groups):
        raise ValueError("adamw must have decoupled weight decay, as AdamW does: its moments contain the decay")
    known = {parameter for group in adamw.param_groups for parameter in group["params"]}
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            if parameter not in known:
                raise ValueError(f"adamw must be over the same parameters: it does not have {name_of(group, i)}")
    optimizer.create_state()
    for entry in optimizer.entries():
        if saved := adamw.state.get(entry.parameter):
            slope = entry.slope()
            for name, power in _POWERS.items():
                entry.own(name).copy_(local(saved[name]).to(entry.dtype) * slope**power)
            entry.state["step"].fill_(float(saved["step"]))


@torch.inference_mode(False)
@torch.no_grad()
def to_adamw(optimizer: SELAdamW, *schedulers: Any) -> torch.optim.AdamW:
    """Return a `torch.optim.AdamW` over the same parameters that continues from the state of `optimizer`.

    `schedulers` are those of `optimizer`, from `torch.optim.lr_scheduler` or transformers. From now on they set the
    learning rates of the new optimizer, where they are in their course.

    Each group keeps its learning rate, betas, eps and weight decay. Moments of raw weights and biases are divided by
    f' and f'^2 (:func:`from_adamw`); they are 0 where f' is 0. The model's weights are unchanged. The scales are lost.
    For half-precision parameters torch's AdamW has no master copy, and its moments have half precision.

    Raises:
        ValueError: another rule than SELAdamW's, or a scheduler of another optimizer.

    >>> import symexplin as sel
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    >>> adamw = to_adamw(sel.SELAdamW(sel.param_groups(model, lr=1e-3, config=sel.preset("paper")), total_steps=100))
    >>> [group["lr"] for group in adamw.param_groups]
    [0.001]
    """
    _check_rule(optimizer)
    optimizer.take_over_writes()
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        named = zip(group["param_names"], group["params"], strict=True) if "param_names" in group else group["params"]
        kept = {key: group[key] for key in (*_SETTINGS, *_OF_SCHEDULERS) if key in group}
        groups.append({"params": list(named), **kept})
    adamw = torch.optim.AdamW(groups)
    for entry in optimizer.entries():
        adamw.state[entry.parameter] = {"step": entry.state["step"].clone()} | {
            name: _ordinary(entry, name, power) for name, power in _POWERS.items()
        }
    for scheduler in schedulers:
        _hand_over(scheduler, optimizer, adamw)
    return adamw


def _hand_over(scheduler: Any, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """Let a scheduler, and those that it consists of, set the rates of another optimizer with the same groups."""
    if getattr(scheduler, "optimizer", None) is not old:
        raise ValueError(f"schedulers must be learning-rate schedulers of optimizer, got {type(scheduler).__name__}")
    scheduler.optimizer = new
    for part in getattr(scheduler, "_schedulers", ()):
        _hand_over(part, old, new)


def _ordinary(entry: Entry, name: str, power: int) -> Tensor:
    """Return a moment of the effective weight, with the dtype and placement of the parameter."""
    slope = entry.slope()
    moment = torch.where(slope == 0.0, 0.0, entry.own(name) / slope**power)
    return entry.shard.wrap(moment.to(entry.parameter.dtype), entry.shape)


def _check_rule(optimizer: object) -> None:
    if not isinstance(optimizer, SELAdamW) or set(optimizer.moment_names("raw", "oi")) != set(_POWERS):
        raise ValueError(f"optimizer must be a symexplin.SELAdamW, got {type(optimizer).__name__}")
