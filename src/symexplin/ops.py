"""The map as two torch operators, so that torch.compile can call kernels from its graphs.

They have no autograd formula of their own; :class:`SELLinear` provides it.
"""

import torch
from torch import Tensor

from symexplin.coordinates import Coordinates
from symexplin.kernels import terms_of
from symexplin.layout import Layout

__all__ = ["Key", "effective_op", "key_of", "pullback_op"]

Key = tuple[str, str]  # axes, configuration as JSON


def key_of(layout: Layout) -> Key | None:
    """Return the operators' arguments that identify a map; None: no kernel covers it, so it is traced instead."""
    return None if terms_of(layout) is None else (layout.letters, layout.config.to_json())


@torch.library.custom_op("symexplin::effective", mutates_args=())
def effective_op(
    raw: Tensor,
    panel0: Tensor,
    panel1: Tensor,
    scalar: Tensor,
    full: Tensor,
    letters: str,
    config: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return the effective weight of :class:`symexplin.coordinates.Coordinates` in `dtype`."""
    layout = Layout.of(tuple(raw.shape), letters, config)
    return Coordinates(layout, raw, panel0, panel1, scalar, full).effective(dtype)


@effective_op.register_fake
def _(
    raw: Tensor,
    panel0: Tensor,  # noqa: ARG001
    panel1: Tensor,  # noqa: ARG001
    scalar: Tensor,  # noqa: ARG001
    full: Tensor,  # noqa: ARG001
    letters: str,  # noqa: ARG001
    config: str,  # noqa: ARG001
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty_like(raw, dtype=dtype)


@torch.library.custom_op("symexplin::pullback", mutates_args=())
def pullback_op(
    raw: Tensor,
    panel0: Tensor,
    panel1: Tensor,
    scalar: Tensor,
    full: Tensor,
    g: Tensor,
    letters: str,
    config: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients by raw weight and panels for a gradient `g` of the effective weight."""
    layout = Layout.of(tuple(raw.shape), letters, config)
    pulled = Coordinates(layout, raw, panel0, panel1, scalar, full).pullback(g)
    return pulled.raw, pulled.panel0, pulled.panel1, pulled.scalar, pulled.full


@pullback_op.register_fake
def _(
    raw: Tensor,
    panel0: Tensor,
    panel1: Tensor,
    scalar: Tensor,
    full: Tensor,
    g: Tensor,  # noqa: ARG001
    letters: str,  # noqa: ARG001
    config: str,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    empty = torch.empty_like
    return empty(raw), empty(panel0), empty(panel1), empty(scalar), empty(full)
