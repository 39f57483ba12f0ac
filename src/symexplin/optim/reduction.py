"""Communication between the processes of a sharded model: shared gradients, the global norm, outcomes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from symexplin.optim.batch import Batch
from symexplin.optim.parameter import ParameterView

__all__ = ["agree", "reduce_"]

_Groups = tuple[Any, ...]  # the process groups over which a tensor is split
_SUM = torch.float64  # in every process, whatever computes its part


def reduce_(active: Sequence[ParameterView], batches: Sequence[Batch]) -> Tensor:
    """Sum shared gradients in place, in one all-reduce per dimension of the mesh, and return the global norm.

    The gradient of a panel becomes its sum over all parts of the weight that share the panel. A panel that is shared
    along one dimension of the mesh and split along another needs a further all-reduce, of the norm.

    Args:
        active: the parameters with a gradient, in the same order in every process.
        batches: the same parameters in batches. Batches may differ between processes.
    """
    norms: dict[_Groups, list[Tensor]] = {}
    for batch in batches:
        norms.setdefault(batch.views[0].placement.groups, []).extend(batch.norms())
    devices = _devices(active)
    if not devices:
        return torch.nn.utils.get_total_norm(norms.get((), []))
    shared: list[tuple[_Groups, _Groups, Tensor]] = []  # over which groups the parameter and the panel are split
    found = {key: grads for batch in batches for key, grads in batch.shared().items()}
    for view in active:  # in the order of the parameters, the same in every process
        places = ((view.place(panel).groups, grad) for panel, grad in found.get(view.key, {}).items())
        shared += [(view.placement.groups, split, grad) for split, grad in places]
    device = next(iter(devices.values()))
    squares = {split: _square(norms.get(split, []), device) for split in _splits(active)}
    for group, kind in devices.items():
        grads = [grad for whole, split, grad in shared if group in whole and group not in split]
        _sum_([*(square for split, square in squares.items() if group in split), *grads], group, kind)
    late = {split: _square([g for _, s, g in shared if s == split], device) for _, split, _ in shared}
    for group, kind in devices.items():
        _sum_([square for split, square in late.items() if group in split], group, kind)
    return sum((*squares.values(), *late.values()), torch.zeros((), dtype=_SUM, device=device)).sqrt()


def _splits(views: Sequence[ParameterView]) -> list[_Groups]:
    return list(dict.fromkeys(view.placement.groups for view in views))


def _devices(views: Sequence[ParameterView]) -> dict[Any, str]:
    """Return the process groups of split parameters, in the same order in every process, with their device types."""
    return {group: view.placement.device_type for view in views for group in view.placement.groups}


def _square(grads: Sequence[Tensor], device: str) -> Tensor:
    """Return the squared norm of all `grads`, a zero on the mesh's device if there are none."""
    if not grads:
        return torch.zeros((), dtype=_SUM, device=device)
    return torch.nn.utils.get_total_norm(grads).to(device, _SUM) ** 2


def _sum_(tensors: Sequence[Tensor], group: Any, device: str) -> None:
    """Replace tensors by their sums over the process group."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1).to(device, _SUM) for tensor in tensors])
    torch.distributed.all_reduce(flat, group=group)
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view(tensor.shape))


def agree(outcomes: Sequence[tuple[ParameterView, int]]) -> list[tuple[ParameterView, int]]:
    """Return the largest outcome over processes for each parameter; all processes must pass the same parameters."""
    settled = dict(enumerate(outcome for _, outcome in outcomes))
    for group, device in _devices([view for view, _ in outcomes]).items():
        mine = [i for i, (view, _) in enumerate(outcomes) if group in view.placement.groups]
        largest = torch.tensor([int(settled[i]) for i in mine], device=device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        settled |= dict(zip(mine, largest.tolist(), strict=True))
    return [(view, settled[i]) for i, (view, _) in enumerate(outcomes)]
