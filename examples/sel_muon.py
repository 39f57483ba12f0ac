"""Muon in curved weight space, in one file to copy: orthogonalized momentum for raw matrices, AdamW for all the rest.

    optimizer = SELMuon(model, lr=3e-4, max_grad_norm=1.0, split={"*.qkv_proj.weight": (1024, 256, 256)})

Gradients are pulled back through the map and clipped by one global norm. For a raw matrix x with A outputs, B inputs
and gradient g:

    m <- mu m + (1 - mu) g;  u = (1 - mu) g + mu m  (nesterov)  or  m
    x <- x (1 - lr wd) - lr r NS(u)

as in torch.optim.Muon. For "match_rms_adamw", r = 0.2 sqrt(max(A, B)): the update has the size of AdamW's, so one
learning rate and decay fit both. For "original", r = sqrt(max(1, A/B)), for learning rates of about 0.02. Each expert
of a stack is a matrix of its own. The state of a raw matrix is "momentum_buffer". Under FSDP2 each process gathers the
momentum of one matrix at a time.
"""

import fnmatch
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import symexplin as sel

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's quintic, as in torch.optim.Muon
ADAMW_RMS = 0.2  # root mean square of AdamW's updates (Liu et al. 2025, arXiv 2502.16982, section 2.2)


class SELMuon(sel.RawSpaceOptimizer):
    """Muon on raw weight matrices, AdamW on biases, scales and plain parameters.

    Args:
        params: a plain model, or its sel.param_groups.
        lr, betas, eps, weight_decay, config, no_decay, total_steps, max_grad_norm: as in sel.SELAdamW.
        momentum: mu, in [0, 1).
        nesterov: look ahead by one gradient.
        ns_steps: iterations of Newton-Schulz.
        adjust_lr_fn: "match_rms_adamw" or "original".
        split: {name pattern: sizes} of fused projections: the outputs of each of their matrices, one behind the other.
            Sizes that add up to a divisor of all outputs repeat.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Mapping[str, float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Mapping[str, float] = 0.01,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        split: Mapping[str, Sequence[int]] | None = None,
        config: sel.SELConfig | None = None,
        no_decay: Sequence[str] = (),
        total_steps: int | str | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        adamw = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        muon["split"] = json.dumps(split or {})  # checkpoints drop empty tables
        run = {"total_steps": total_steps, "max_grad_norm": max_grad_norm}
        super().__init__(params, adamw | muon | run, config, no_decay)
        names = [name for group in self.param_groups for name, _ in _matrices(group)]
        for pattern in split or {}:
            if not fnmatch.filter(names, pattern):
                raise ValueError(f"split pattern {pattern!r} matches no curved matrix")

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a setting out of range."""
        sel.SELAdamW.check_group(self, group)
        if not 0.0 <= group["momentum"] < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {group['momentum']}")
        if group["adjust_lr_fn"] not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr_fn must be 'match_rms_adamw' or 'original', got {group['adjust_lr_fn']!r}")
        for name, outputs in _matrices(group):
            sizes = _sizes(name, outputs, group)
            if min(sizes) < 1 or outputs % sum(sizes):
                raise ValueError(
                    f"split of {name} must be sizes that add up to its {outputs} outputs, or to a divisor, got {sizes}"
                )

    def moment_names(self, kind: str, axes: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the name of the momentum for raw matrices, of AdamW's moments for other leaves."""
        return ("momentum_buffer",) if "i" in axes else ("exp_avg", "exp_avg_sq")

    def rule_(self, leaves: Sequence[sel.Leaf], group: dict[str, Any]) -> None:
        """Apply Muon to raw matrices in place, AdamW to other leaves."""
        sel.SELAdamW.rule_(self, [leaf for leaf in leaves if "i" not in leaf.axes], group)
        for leaf in leaves:
            if "i" in leaf.axes:
                buffer = leaf.moments["momentum_buffer"]
                buffer.lerp_(leaf.grad, 1.0 - group["momentum"])
                update = leaf.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                update = _orthogonal(leaf.gather(update), leaf, group)
                leaf.decay_()
                leaf.value.sub_(leaf.scatter(update), alpha=leaf.lr)


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Return about U V^T of a matrix U S V^T in bfloat16; a leading dimension is a batch."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]  # the smaller Gram matrix
    x = (matrix.mT if tall else matrix).bfloat16()
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    addmm = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = addmm(x, addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _orthogonal(whole: Tensor, leaf: sel.Leaf, group: dict[str, Any]) -> Tensor:
    """Return r NS(u) of each matrix u in a whole tensor."""
    matrices = whole.mT if "io" in leaf.axes else whole  # outputs by inputs
    sizes = _sizes(leaf.name, matrices.shape[-2], group)
    done = []
    for part in matrices.unflatten(-2, (-1, sum(sizes))).split(sizes, dim=-2):
        matrix = part.flatten(-3, -2)
        d_out, d_in = matrix.shape[-2:]
        original = group["adjust_lr_fn"] == "original"
        ratio = math.sqrt(max(1.0, d_out / d_in)) if original else ADAMW_RMS * math.sqrt(max(d_out, d_in))
        done.append((newton_schulz(matrix, group["ns_steps"]).to(whole.dtype) * ratio).reshape(part.shape))
    update = torch.cat(done, dim=-2).reshape(matrices.shape)
    return update.mT if "io" in leaf.axes else update


def _matrices(group: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of outputs of each curved matrix of a group."""
    named = zip(group.get("param_names", ()), group.get("axes", ()), group.get("shape", ()), strict=False)
    for name, axes, shape in named:
        if "i" in axes:
            yield name, shape[axes.index("o")]


def _sizes(name: str, outputs: int, group: dict[str, Any]) -> list[int]:
    """Return the numbers of outputs of the matrices in a weight; the first pattern that matches its name counts."""
    table = json.loads(group["split"]).items()
    return next((sizes for pattern, sizes in table if fnmatch.fnmatchcase(name, pattern)), [outputs])
