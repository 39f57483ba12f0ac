"""Muon in curved weight space: orthogonalised momentum for raw matrices, AdamW for everything else."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from symexplin.curve import from_matrices, is_weight, matrices, sides
from symexplin.heads import check_parts, map_parts
from symexplin.optim.adamw import SELAdamW
from symexplin.optim.entry import Entry, Leaf
from symexplin.optim.groups import is_curved, name_of
from symexplin.patterns import check_patterns, first_match
from symexplin.routes import Rate
from symexplin.validation import check_choice, check_flag, check_fraction, check_not_negative, check_whole

__all__ = ["ADJUSTMENTS", "SELMuon", "newton_schulz"]

ADJUSTMENTS = ("match_rms_adamw", "original")
# Keller Jordan's quintic, https://kellerjordan.github.io/posts/muon/, as in torch.optim.Muon.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MOST_STEPS = 99  # torch's limit
# Root mean square of AdamW's updates (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2).
_ADAMW_RMS = 0.2


class SELMuon(SELAdamW):
    """Muon on raw weight matrices, AdamW on biases, scales and plain parameters.

    Gradients are pulled back through the map and clipped by one global norm. For a raw matrix x with A outputs, B
    inputs and gradient g::

        m <- mu m + (1 - mu) g;  u = (1 - mu) g + mu m  (nesterov)  or  m
        x <- x (1 - lr wd) - lr r NS(u)

    as in `torch.optim.Muon`. NS is Newton-Schulz's quintic in bfloat16 (:func:`newton_schulz`). For "match_rms_adamw",
    r = 0.2 sqrt(max(A, B)): entries of NS(u) have root mean square 1/sqrt(max(A, B)), AdamW's updates about 0.2.
    A learning rate and decay tuned for AdamW then fit both. For "original", r = sqrt(max(1, A/B)) (Keller Jordan);
    its learning rates are about 0.02. A and B do not depend on the storage (transformers' `Conv1D` is transposed). Each
    expert of a stack is a matrix; a convolution's rows are its output channels. Queries, keys and values in one weight,
    or gate and input, are orthogonalised apart where their usual names identify them (:mod:`symexplin.heads`).

    The state of a raw matrix is "momentum_buffer", 4 bytes per parameter, besides a raw weight if the map stores one.
    Under FSDP2 each step gathers the momentum of one matrix at a time.

    Args:
        params, lr, betas, eps, weight_decay: as in :class:`symexplin.SELAdamW`.
        momentum: mu, in [0, 1).
        nesterov: look ahead by one gradient.
        ns_coefficients: a, b, c of the quintic a x + b x^3 + c x^5.
        ns_steps: iterations, from 1 to 99.
        ns_eps: lower bound of the norm that divides the matrix.
        adjust_lr_fn: "match_rms_adamw" or "original".
        split: {name pattern: sizes} of further weights whose outputs are those of several matrices, one behind the
            other, such as {"*.wqkv.weight": (64, 16, 16)}. Sizes that add up to a divisor of the outputs repeat. An
            empty sequence: one matrix. A loaded state brings its own, as it does all settings of the rule.
        settings: total_steps, max_grad_norm and the other arguments of :class:`symexplin.SELAdamW`.

    Raises:
        ValueError: a value out of range, or the errors of :class:`symexplin.SELAdamW`.

    >>> import symexplin as sel
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    >>> optimizer = SELMuon(sel.param_groups(model, lr=1e-3, config=sel.preset("paper")), total_steps=100)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Rate = 0.01,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = _COEFFICIENTS,
        ns_steps: int = 5,
        ns_eps: float = 1e-7,
        adjust_lr_fn: str = "match_rms_adamw",
        split: Mapping[str, Sequence[int]] | None = None,
        **settings: Any,
    ) -> None:
        three = isinstance(ns_coefficients, tuple | list) and len(ns_coefficients) == 3
        if not three or any(not isinstance(number, float | int) for number in ns_coefficients):
            raise ValueError(f"ns_coefficients must be three numbers, got {ns_coefficients!r}")
        muon = {
            "momentum": check_fraction("momentum", momentum),
            "nesterov": check_flag("nesterov", nesterov),
            "ns_coefficients": tuple(ns_coefficients),
            "ns_steps": check_whole("ns_steps", ns_steps, maximum=_MOST_STEPS),
            "ns_eps": check_not_negative("ns_eps", ns_eps),
            "adjust_lr_fn": check_choice("adjust_lr_fn", adjust_lr_fn, ADJUSTMENTS),
        }
        super().__init__(params, lr, betas, eps, weight_decay, **settings)
        self.defaults |= muon
        for group in self.param_groups:
            group |= {key: group.get(key, value) for key, value in muon.items()}
        self._divide(split or {})

    def _divide(self, split: Mapping[str, Sequence[int]]) -> None:
        """Set the parts of the weights whose names match the patterns."""
        curved = [group for group in self.param_groups if is_curved(group)]
        names = [name_of(group, i) for group in curved for i in range(len(group["params"]))]
        check_patterns("split", tuple(split), names)
        for group in curved:
            for i, (axes, shape) in enumerate(zip(group["axes"], group["shape"], strict=True)):
                pattern = first_match([name_of(group, i)], tuple(split))
                if pattern is not None:
                    parts = check_parts(name_of(group, i), split[pattern], sides(axes, shape)[0])
                    group["parts"][i] = " ".join(map(str, parts))

    def moments_(self, kind: str, axes: str) -> tuple[str, ...]:
        """Return the name of the momentum for raw matrices, of AdamW's moments for other leaves."""
        return ("momentum_buffer",) if is_weight(axes) else super().moments_(kind, axes)

    def is_adamw_(self, entry: Entry) -> bool:
        """Whether AdamW updates all leaves of a parameter; Muon updates a raw matrix."""
        return type(self).rule_ is SELMuon.rule_ and not is_weight(entry.axes)

    def rule_(self, leaves: Sequence[Leaf], group: dict[str, Any]) -> None:
        """Apply Muon to raw matrices in place, AdamW to other leaves."""
        super().rule_([leaf for leaf in leaves if not is_weight(leaf.axes)], group)
        for leaf in leaves:
            if is_weight(leaf.axes):
                _muon_(leaf, group)


def _muon_(leaf: Leaf, group: dict[str, Any]) -> None:
    momentum, buffer = group["momentum"], leaf.moments["momentum_buffer"]
    buffer.lerp_(leaf.grad, 1.0 - momentum)
    update = leaf.gather(leaf.grad.lerp(buffer, momentum) if group["nesterov"] else buffer)
    rule = functools.partial(_orthogonal, group=group)
    update = from_matrices(map_parts(rule, matrices(update, leaf.axes), leaf.parts), leaf.axes, update.shape)
    leaf.decay_()
    leaf.value.sub_(leaf.scatter(update) * leaf.lr)


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float] = _COEFFICIENTS, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """Return approximately U V^T of a matrix U S V^T in bfloat16, with singular values from about 0.7 to 1.2.

    Iterates ``x <- a x + (b (x x^T) + c (x x^T)^2) x`` from x = matrix / max(||matrix||_F, eps), `steps` times. The
    matrix may have a leading batch dimension.

    >>> values = torch.linalg.svdvals(newton_schulz(torch.diag(torch.tensor([1.0, 0.3, 0.1]))).float())
    >>> bool(((values > 0.6) & (values < 1.3)).all())
    True
    """
    a, b, c = coefficients
    tall = matrix.shape[-2] > matrix.shape[-1]  # the smaller Gram matrix
    x = (matrix.mT if tall else matrix).bfloat16()
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    addmm = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = addmm(x, addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _orthogonal(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """Return r NS(matrix) in its dtype; rows are outputs. There may be a leading dimension."""
    d_out, d_in = matrix.shape[-2:]
    if group["adjust_lr_fn"] == "original":
        ratio = math.sqrt(max(1.0, d_out / d_in))
    else:
        ratio = _ADAMW_RMS * math.sqrt(max(d_out, d_in))
    coefficients, steps, eps = group["ns_coefficients"], group["ns_steps"], group["ns_eps"]
    return newton_schulz(matrix, coefficients, steps, eps).to(matrix.dtype) * ratio
