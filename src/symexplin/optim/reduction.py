"""Communication between the processes of a sharded model: shared gradients, the global norm, outcomes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from symexplin.optim.batch import Batch
from symexplin.optim.parameter import ParameterView
from symexplin.optim.placement import Placement

__all__ = ["agree", "reduce_"]


def reduce_(active: Sequence[ParameterView], batches: Sequence[Batch]) -> Tensor:
    """Sum shared gradients in place, in one all-reduce per process group, and return the global norm.

    Gradients of panels along an unsplit dimension become their sums over all parts of the weight.

    Args:
        active: the parameters with a gradient, in the same order in every process.
        batches: the same parameters in batches. Batches may differ between processes.
    """
    norms = [norm for batch in batches if batch.views[0].placement.group is None for norm in batch.norms()]
    places = {view.placement.group: view.placement for view in active if view.placement.group is not None}
    if not places:
        return torch.nn.utils.get_total_norm(norms)
    total = _square(norms, next(iter(places.values())))
    for group, place in places.items():  # in the order of the parameters, the same in every process
        own = [batch for batch in batches if batch.views[0].placement.group == group]
        summands = {key: grads for batch in own for key, grads in batch.shared().items()}
        shared = [grad for view in active for grad in summands.get(view.key, ())]
        split = _square([norm for batch in own for norm in batch.norms()], place)
        _sum_([split, *shared], place)
        total = total + split.to(total.device) + _square(shared, place).to(total.device)
    return total.sqrt()


def _square(grads: Sequence[Tensor], place: Placement) -> Tensor:
    """Return the squared norm of all `grads`, a zero on the mesh's device if there are none."""
    if not grads:
        return torch.zeros((), device=place.mesh.device_type)
    return torch.nn.utils.get_total_norm(grads) ** 2


def _sum_(tensors: Sequence[Tensor], place: Placement) -> None:
    """Replace tensors by their sums over the process group."""
    widest = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    flat = torch.cat([tensor.reshape(-1).to(place.mesh.device_type, widest) for tensor in tensors])
    torch.distributed.all_reduce(flat, group=place.group)
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view(tensor.shape))


def agree(outcomes: Sequence[tuple[ParameterView, int]]) -> list[tuple[ParameterView, int]]:
    """Return the largest outcome over processes for each parameter; all processes must pass the same parameters."""
    settled = dict(enumerate(outcome for _, outcome in outcomes))
    places = {view.placement.group: view.placement for view, _ in outcomes if view.placement.group is not None}
    for group, place in places.items():
        mine = [i for i, (view, _) in enumerate(outcomes) if view.placement.group == group]
        largest = torch.tensor([int(settled[i]) for i in mine], device=place.mesh.device_type)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        settled |= dict(zip(mine, largest.tolist(), strict=True))
    return [(view, settled[i]) for i, (view, _) in enumerate(outcomes)]
