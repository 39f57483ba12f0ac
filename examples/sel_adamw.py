"""AdamW in curved weight space, in one file to copy. It needs only torch and keeps AdamW's state.

A curved parameter v is f(w) of a raw weight w, and AdamW trains w:

    v = f(w) = sign(w) (exp(beta |w|) - 1)/beta        f'(w) = 1 + beta |v|

The curve has a closed inverse, so nothing but v is stored: the gradient by w is v's times f'(w), and a step of w
multiplies 1 + beta |v| by exp(beta step sign(v)). The optimizer clips gradients itself, those of the raw weights:

    optimizer = SELAdamW(groups(model), lr=3e-4, weight_decay=0.1, max_grad_norm=1.0)  # and no clip_grad_norm_
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

HEADS = ("lm_head", "head", "output_head", "fc_out", "classifier", "output")  # output heads stay plain


def groups(model: nn.Module, beta: float | str = "auto") -> list[dict[str, Any]]:
    """Return parameter groups: Linear layers are curved, except heads by their names; all else is plain."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    curved: dict[int, nn.Parameter] = {}
    for name, m in model.named_modules():
        is_head = name.split(".")[-1] in HEADS or id(getattr(m, "weight", None)) in embeddings  # tied: a head
        if isinstance(m, nn.Linear) and not is_head:
            curved |= {id(p): p for p in m.parameters()}
    if beta == "auto":  # 7.5 at width 1024; the width is the most frequent side of the curved matrices
        sides = Counter(side for p in curved.values() if p.ndim == 2 for side in p.shape)
        width = max(sides, key=lambda side: (sides[side], side), default=1024)
        beta = 7.5 * (width / 1024) ** (0.8 if width >= 1024 else 0.5)
    plain = [p for p in model.parameters() if id(p) not in curved]
    return [{"params": [*curved.values()], "beta": beta}, {"params": plain}]


def raw(v: Tensor, beta: float) -> Tensor:
    """Return w, f(w) = v."""
    return v.sign() * torch.log1p(beta * v.abs()) / beta


def move(v: Tensor, step: Tensor, beta: float) -> Tensor:
    """Return f(w + step), exact for the smallest steps and the largest; a step of zero keeps the bits."""
    size, c = v.abs(), 1.0 / beta
    x = beta * torch.where(v < 0.0, -step, step)
    # The first form keeps small steps exact; the second one, weights that lose orders of magnitude.
    same = torch.where(x > -1.0, size + (c + size) * torch.expm1(x), (c + size) * torch.exp(x) - c)
    across = (size - c * torch.expm1(-x)) * (c / (c + size))  # the other side of zero
    moved = torch.where(same >= 0.0, same, across)
    return torch.where(step == 0.0, v, torch.where(v < 0.0, -moved, moved))


class SELAdamW(torch.optim.Optimizer):
    """AdamW on the raw weights of groups with a "beta", and plain AdamW on the others."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "beta": None}
        super().__init__(params, defaults | {"max_grad_norm": max_grad_norm})
        if not any(group["beta"] and group["params"] for group in self.param_groups):
            raise ValueError("params has no curved group: pass groups(model) of a model with Linear layers")
        if any(p.dtype not in (torch.float32, torch.float64) for g in self.param_groups for p in g["params"]):
            raise ValueError("parameters must be float32: keep them so, and run the model under torch.autocast")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        active = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        clip, max_grad_norm = 1.0, self.param_groups[0]["max_grad_norm"]
        if max_grad_norm is not None and active:
            norm = torch.stack([self._gradient(p, group).norm() for p, group in active]).norm()
            clip = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for p, group in active:
            step = -group["lr"] * self._direction(p, self._gradient(p, group) * clip, group)
            if group["beta"]:
                p.copy_(move(p, step - group["lr"] * group["weight_decay"] * raw(p, group["beta"]), group["beta"]))
            else:
                p.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(step)
        return loss

    def _gradient(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad * (1.0 + group["beta"] * p.abs()) if group["beta"] else p.grad

    def _direction(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        """Return Adam's direction for the gradient g and advance its moments."""
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        t = state["step"].add_(1.0).item()
        m = state["exp_avg"].lerp_(g, 1.0 - beta1) / (1.0 - beta1**t)
        return m / ((state["exp_avg_sq"].lerp_(g * g, 1.0 - beta2) / (1.0 - beta2**t)).sqrt() + group["eps"])


if __name__ == "__main__":
    text = torch.tensor(list(__doc__.encode()))
    model = nn.Sequential(nn.Embedding(128, 32), nn.Flatten(), nn.Linear(128, 64), nn.GELU())
    model.add_module("head", nn.Linear(64, 128))
    optimizer = SELAdamW(groups(model), lr=3e-3, max_grad_norm=1.0)
    for step in range(201):  # predict a character from four
        start = torch.randint(len(text) - 4, (64,))
        loss = nn.functional.cross_entropy(model(text[start[:, None] + torch.arange(4)]), text[start + 4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}")
