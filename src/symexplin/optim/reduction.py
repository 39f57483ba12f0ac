"""What the processes of a sharded model must settle together: shared gradients, the global norm, outside writes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from symexplin.optim.entry import Entry
from symexplin.optim.placement import Placement
from symexplin.optim.target import Target

__all__ = ["agree", "reduce_"]

Late = list[tuple[list[int], Tensor]]


def reduce_(targets: Sequence[Target], watched: Sequence[tuple[Entry, Tensor | None]]) -> tuple[Tensor, Late]:
    """Add up what each process has a part of, in one all-reduce a process group, and return the global norm.

    In `targets`, the gradients of panels along a dimension that is not split are replaced by their sums over all parts
    of the weight. With the norm come the sums of the flags of the `watched` parameters that are split, by `id`.
    """
    whole = [target.grad for target in targets if target.placement.group is None]
    places = {p.group: p for p in (*(t.placement for t in targets), *(e.placement for e, _ in watched)) if p.group}
    if not places:
        return torch.nn.utils.get_total_norm(whole), []
    total = _square(whole, next(iter(places.values())))
    late: Late = []
    for group, place in places.items():  # in the order of the parameters, the same in every process
        split = [t.grad for t in targets if t.placement.group == group and t.split]
        shared = [t for t in targets if t.placement.group == group and not t.split]
        flags = [(id(e.parameter), flag) for e, flag in watched if e.placement.group == group]
        square = _square(split, place)
        raised = torch.stack(
            [square.new_zeros(()), *(square.new_zeros(()) if f is None else f.to(square) for _, f in flags)]
        )
        square, raised, *grads = _sum([square, raised, *(t.grad for t in shared)], place)
        for target, grad in zip(shared, grads, strict=True):
            target.grad = grad
        total = total + (square + _square(grads, place)).to(total.device)
        late.append(([key for key, _ in flags], raised[1:]))
    return total.sqrt(), late


def _square(grads: list[Tensor], place: Placement) -> Tensor:
    """Return the squared norm of all `grads`; of none a zero on the right device."""
    return torch.nn.utils.get_total_norm(grads) ** 2 if grads else torch.zeros((), device=place.mesh.device_type)


def _sum(tensors: list[Tensor], place: Placement) -> list[Tensor]:
    """Return the sums of `tensors` over the processes that have the other parts."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(place.mesh.device_type)
    torch.distributed.all_reduce(flat, group=place.group)
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape).to(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


def agree(outcomes: list[tuple[Entry, int]]) -> list[tuple[Entry, int]]:
    """Return the outcomes of taking over writes, each the largest of all processes that have a part."""
    settled = dict(enumerate(outcome for _, outcome in outcomes))
    places = {entry.placement.group: entry.placement for entry, _ in outcomes if entry.placement.group}
    for group, place in places.items():
        mine = [i for i, (entry, _) in enumerate(outcomes) if entry.placement.group == group]
        largest = torch.tensor([settled[i] for i in mine], device=place.mesh.device_type)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        settled |= dict(zip(mine, largest.tolist(), strict=True))
    return [(entry, settled[i]) for i, (entry, _) in enumerate(outcomes)]
