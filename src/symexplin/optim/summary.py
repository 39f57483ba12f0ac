"""What `print(optimizer)` shows: the map, the groups with their rates, the settings of the run."""

from collections.abc import Mapping, Sequence
from typing import Any

from symexplin.config import SELConfig
from symexplin.optim.groups import ALIGNED, Group, is_curved

__all__ = ["map_lines", "summary"]

# Keys of groups that lines of their own show, or that repeat what the map says.
_SHOWN = {*ALIGNED, "config", "lr", "param_names", "params", "role", "steps", "weight_decay", "width"}
_USUAL = {"decay_towards": "zero", "moment_bits": 32}  # not shown


def summary(name: str, groups: Sequence[Group]) -> str:
    """Return the lines for an optimizer of this class `name`.

    >>> import torch, symexplin as sel
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    >>> print(sel.SELAdamW(model, lr=1e-3, config=sel.preset("fixed_curvature"), total_steps=100))
    SELAdamW(
      map: mismatch, beta 7.5, e and l learned (row_col_mult), mismatched start; width 64
      curved: 2 tensors, 4,160 numbers, lr 0.001 (e 0.015 to 0.0024, l 0.015 to 0.0024), weight_decay 0.01
      plain: 2 tensors, 128 numbers, lr 0.001, weight_decay 0.01
      betas (0.9, 0.999), eps 1e-08, total_steps 100, max_grad_norm None; 0 steps taken
    )
    """
    settings = {key: groups[0][key] for key in groups[0] if key not in _SHOWN and not key.startswith("k_")}
    settings = {key: value for key, value in settings.items() if _USUAL.get(key, ()) != value}
    steps = max(group["steps"] for group in groups)
    last = ", ".join(f"{key} {value}" for key, value in settings.items())
    lines = [*map_lines(groups), *map(_line, groups), f"{last}; {steps} steps taken"]
    return "\n".join([f"{name}(", *(f"  {line}" for line in lines), ")"])


def map_lines(groups: Sequence[Group]) -> list[str]:
    """Return a line for each map of the groups: its form, its scales, its start and the model's width."""
    return list(dict.fromkeys(_map(group) for group in groups if is_curved(group)))


def _map(group: Group) -> str:
    words = f"map: {SELConfig.from_json(group['config']).describe()}"
    return f"{words}; width {group['width']}" if "width" in group else words  # older states lack it


def _line(group: Mapping[str, Any]) -> str:
    """Return the line of a group: its size, its rates, and the learning rates of its scales."""
    numbers, rate = sum(parameter.numel() for parameter in group["params"]), float(group["lr"])
    scales = []
    for key, k in group.items():
        if key.startswith("k_"):
            first, last = (f"{rate * end:g}" for end in k)
            scales.append(f"{key[2:]} {first}" + (f" to {last}" if last != first else ""))
    lr = f"lr {rate:g}" + (f" ({', '.join(scales)})" if scales else "")
    words = f"{len(group['params'])} tensors, {numbers:,} numbers, {lr}, weight_decay {float(group['weight_decay']):g}"
    return f"{group['role']}: {words}"
