"""What the processes of a sharded model must settle together: shared gradients, the global norm, what to act on."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from symexplin.optim.entry import Entry
from symexplin.optim.placement import Placement
from symexplin.optim.target import Target

__all__ = ["HELD", "UNEVEN", "agree", "reduce_"]

# Codes of a parameter for the next step.
HELD, UNEVEN = 1, 2  # a write waits for all processes; some had a gradient and some had none

Late = list[tuple[list[int], Tensor]]


def reduce_(
    entries: Sequence[Entry],
    targets: Mapping[int, Sequence[Target]],
    held: Mapping[int, Tensor],
    measures: Sequence[Tensor] = (),
) -> tuple[Tensor, Late]:
    """Add up what each process has a part of, in one all-reduce a process group, and return the global norm.

    Gradients of panels along a dimension that is not split are replaced by their sums over all parts of the weight.

    Args:
        entries: all parameters that have state, in the same order in every process.
        targets: of those that have a gradient, by `id` of the parameter.
        held: flags of parameters that were written into, likewise.
        measures: tensors whose norm is that of further gradients, of what lies whole in every process.

    Returns:
        The norm, and codes for the next step of parameters, by `id`, that are split.
    """
    whole = (targets.get(entry.key, ()) for entry in entries if entry.placement.group is None)
    norms = [*measures, *(target.grad for own in whole for target in own)]
    places = {e.placement.group: e.placement for e in entries if e.placement.group is not None}
    if not places:
        return torch.nn.utils.get_total_norm(norms), []
    total = _square(norms, next(iter(places.values())))
    late: Late = []
    for group, place in places.items():  # in the order of the parameters, the same in every process
        mine = [entry for entry in entries if entry.placement.group == group]
        square, codes = _reduce_group(mine, place, targets, held)
        total = total + square.to(total.device)
        late.append(([entry.key for entry in mine], codes))
    return total.sqrt(), late


def _reduce_group(
    entries: list[Entry], place: Placement, targets: Mapping[int, Sequence[Target]], held: Mapping[int, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the squared norm and the codes of the parameters that are split over one process group."""
    have = [targets.get(entry.key, ()) for entry in entries]
    split = _square([t.grad for own in have for t in own if t.split], place)
    flags = [held.get(entry.key) for entry in entries]
    none = split.new_zeros(())
    written = torch.stack([none if flag is None else flag.to(split) for flag in flags])
    present = torch.stack([none + 1.0 if own else none for own in have])
    shared: list[tuple[Target | None, Tensor]] = []  # what has no gradient here keeps its place in the buffer
    for entry, own in zip(entries, have, strict=True):
        ready = {target.kind: target for target in own if not target.split}
        for kind, panel in entry.shared_panels():
            target = ready.get(kind)
            shared.append((target, torch.zeros_like(panel) if target is None else target.grad))
    split, written, present, *grads = _sum([split, written, present, *(grad for _, grad in shared)], place)
    for (target, _), grad in zip(shared, grads, strict=True):
        if target is not None:
            target.grad = grad
    uneven = (present > 0.0) & (present < place.mesh.size(place.mesh_dim))
    return split + _square(grads, place), HELD * (written > 0.0) + UNEVEN * uneven


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
    """Return the outcomes, each the largest of all processes that have a part; all of them must ask of the same."""
    settled = dict(enumerate(outcome for _, outcome in outcomes))
    places = {entry.placement.group: entry.placement for entry, _ in outcomes if entry.placement.group is not None}
    for group, place in places.items():
        mine = [i for i, (entry, _) in enumerate(outcomes) if entry.placement.group == group]
        largest = torch.tensor([settled[i] for i in mine], device=place.mesh.device_type)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        settled |= dict(zip(mine, largest.tolist(), strict=True))
    return [(entry, settled[i]) for i, (entry, _) in enumerate(outcomes)]
