"""What is held against what: a model with all that takes an optimizer step on it, the stock way and the curved ways."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import symexplin as sel
from symexplin.lab.bench.config import DTYPES, BenchConfig, Case
from symexplin.lab.model import Transformer

__all__ = ["BASELINES", "MasterAdamW", "Variant", "build_plain", "build_variant"]

# Variant -> its baseline, by part and dtype. What has fp32 parameters takes the same optimizer step in both dtypes.
BASELINES: dict[tuple[str, str], dict[str, str]] = {
    ("map", "fp32"): {"adamw": "adamw", "forward": "adamw", "backward": "adamw"},
    ("map", "bf16"): {"adamw": "adamw", "forward": "adamw", "backward": "adamw"},
    ("optimizer", "fp32"): {"adamw": "adamw", "sel": "adamw", "module": "adamw"},
    ("optimizer", "bf16"): {"adamw_master": "adamw_master", "sel": "adamw_master"},
    ("step", "fp32"): {"adamw": "adamw", "sel": "adamw", "module": "adamw"},
    ("step", "bf16"): {
        "adamw_master": "adamw_master",
        "sel": "adamw_master",
        "adamw_autocast": "adamw_master",
        "module": "adamw_autocast",
    },
}
_LR, _DECAY, _MAX_NORM = 3e-4, 0.01, 1.0  # section 5.1
_STEPS = 100_000  # of the annealing: far more than are ever measured


class Variant(NamedTuple):
    """A model, what takes its optimizer step (clipping included), and whether its forward pass is under autocast."""

    model: nn.Module
    step: Callable[[], object]
    autocast: bool


class MasterAdamW:
    """The stock recipe for bf16 parameters: upcast the gradients, clip, fused AdamW on fp32 masters, copy back.

    The upcast gradients live only as long as the step, which is the least memory the recipe can do with.

    >>> parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> parameter.grad = torch.ones_like(parameter)
    >>> MasterAdamW([parameter], lr=0.5, weight_decay=0.0).step()
    >>> parameter.tolist()
    [0.5, 0.5]
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = _LR, weight_decay: float = _DECAY) -> None:
        self.parameters = list(parameters)
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.adamw = torch.optim.AdamW(self.masters, lr=lr, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """Take one step from the gradients of the parameters."""
        pairs = zip(self.masters, self.parameters, strict=True)
        given = [(master, parameter.grad) for master, parameter in pairs if parameter.grad is not None]
        upcast = [torch.empty_like(master) for master, _ in given]
        torch._foreach_copy_(upcast, [grad for _, grad in given])
        for (master, _), grad in zip(given, upcast, strict=True):
            master.grad = grad
        nn.utils.clip_grad_norm_(self.masters, _MAX_NORM)
        self.adamw.step()
        torch._foreach_copy_(self.parameters, self.masters)  # type: ignore[arg-type]
        self.adamw.zero_grad(set_to_none=True)


def build_plain(config: BenchConfig, case: Case, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Return the plain model of a case, the same in every variant."""
    run = config.run(case)
    torch.manual_seed(config.seed)
    with device:  # drawn there: billions of weights take minutes elsewhere
        model = Transformer(run.model)
    model.recompute, model.loss_chunk = run.compute.recompute, run.compute.loss_chunk or 0
    return model.to(dtype)


def build_variant(name: str, config: BenchConfig, case: Case, device: torch.device) -> Variant:
    """Return a variant of a case, fresh.

    Raises:
        ValueError: a map that has no inverse at some of the drawn weights.
    """
    bf16 = case.dtype == "bf16"
    autocast = bf16 and name in ("adamw_autocast", "module")
    model = build_plain(config, case, torch.float32 if autocast else DTYPES[case.dtype], device)
    if name == "adamw_master":
        return Variant(model, MasterAdamW(model.parameters()).step, autocast)
    curve = config.curve(case.width)
    if name == "sel":
        groups = sel.param_groups(model, lr=_LR, weight_decay=_DECAY, config=curve)
        return Variant(model, sel.SELAdamW(groups, total_steps=_STEPS, max_grad_norm=_MAX_NORM).step, autocast)
    if name == "module":
        sel.convert(model, curve)
        groups = sel.param_groups(model, lr=_LR, weight_decay=_DECAY)
    else:
        groups = [{"params": list(model.parameters()), "lr": _LR, "weight_decay": _DECAY}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    if name == "module":
        sel.anneal_scales(optimizer, total_steps=_STEPS)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
        optimizer.step()

    return Variant(model, step, autocast)


def fill_gradients(parameters: Iterable[Tensor]) -> None:
    """Give every parameter a random gradient, of a norm far above what it is clipped to."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.uniform_(-0.01, 0.01)
