"""The placement of a parameter: whole on its device, or a DTensor split over a mesh (FSDP2, tensor parallel)."""

import functools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

__all__ = [
    *("WHOLE", "ProcessGroups", "Shard", "address", "any_process", "global_norm", "is_dtensor", "local", "shard_of"),
    *("sum_over", "whole"),
]

ProcessGroups = tuple[Any, ...]  # the process groups over which a tensor is split


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing torch.distributed."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False  # the usual case, ten times as fast
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor; it shares the storage."""
    return cast(Tensor, tensor.to_local()) if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def address(tensor: Tensor) -> tuple[int, bool, torch.dtype, torch.Size, tuple[int, ...]]:
    """Return where the values of the local part are, faster than by :func:`local`.

    These are its data pointer, whether torch negates what is there, its dtype, shape and strides.

    >>> address(torch.zeros(2, 3))[1:]
    (False, torch.float32, torch.Size([2, 3]), (3, 1))
    """
    part = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return part.data_ptr(), part.is_neg(), part.dtype, part.shape, part.stride()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, by a collective operation if it is split."""
    return cast(Tensor, tensor.full_tensor()) if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Shard:
    """The split of a tensor over a mesh: `splits` are pairs of a tensor's and a mesh's dimension, in this order.

    Without a mesh the tensor is whole. It is replicated along all other dimensions of the mesh.
    """

    mesh: Any = None  # torch.distributed.device_mesh.DeviceMesh
    spec: tuple[Any, ...] = ()  # the DTensor's placements
    splits: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def process_groups(self) -> ProcessGroups:
        """The process groups over which the tensor is split; empty if it is whole here."""
        return tuple(self.mesh.get_group(mesh_dim) for _, mesh_dim in self.splits)

    @property
    def device_type(self) -> str:
        """The type of the mesh's devices."""
        return str(self.mesh.device_type)

    def along(self, dims: Sequence[int | None]) -> "Shard":
        """Return the split of a tensor whose dimensions are those in `dims` of the tensor that is split here."""
        if self.mesh is None:
            return self
        from torch.distributed.tensor import Replicate

        splits = {mesh_dim: dims.index(d) for d, mesh_dim in self.splits if d in dims}
        if not splits:
            return WHOLE  # replicas are ordinary tensors
        spec = tuple(_moved(p, splits[i]) if i in splits else Replicate() for i, p in enumerate(self.spec))
        return Shard(self.mesh, spec, tuple((splits[i], i) for _, i in self.splits if i in splits))

    def wrap(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the local `part` as a tensor of the whole `shape`: a DTensor if there is a mesh."""
        if self.mesh is None:
            return part
        from torch.distributed.tensor import DTensor

        stride = torch.empty(tuple(shape), dtype=part.dtype, device="meta").stride()
        wrapped = DTensor.from_local(
            part.contiguous(), self.mesh, self.spec, run_check=False, shape=torch.Size(shape), stride=stride
        )
        return cast(Tensor, wrapped)

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the local part of a whole `tensor`."""
        for dim, (start, size) in enumerate(self._ranges(tensor.shape)):
            tensor = tensor.narrow(dim, start, size)
        # A copy: a view would keep the whole tensor in memory and in checkpoints.
        return tensor.clone(memory_format=torch.contiguous_format) if self.splits else tensor

    def _ranges(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return (start, size) of the local part along each dimension."""
        ranges = [(0, size) for size in shape]
        for dim, mesh_dim in self.splits:
            first, size = ranges[dim]
            chunk = -(-size // self.mesh.size(mesh_dim))  # as in DTensor and torch.chunk: the last may be short
            start = min(self.mesh.get_local_rank(mesh_dim) * chunk, size)
            ranges[dim] = first + start, min(chunk, size - start)
        return ranges

    def gather(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the whole tensor of this `shape`, by a collective operation if it is split."""
        return whole(self.wrap(part, shape)) if self.splits else part


WHOLE = Shard()


def shard_of(parameter: Tensor, name: str) -> Shard:
    """Return the placement of a parameter.

    Raises:
        ValueError: it is a partial sum, or split in another way than by whole chunks.
    """
    if not is_dtensor(parameter):
        return WHOLE
    spec: tuple[Any, ...] = tuple(parameter.placements)  # type: ignore[attr-defined]
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    # FSDP2 splits what tensor parallelism has split before, although its dimension of the mesh is the first.
    plain = [(p.dim % max(parameter.dim(), 1), i) for i, p in enumerate(spec) if p.is_shard()]
    later = [(p.dim % max(parameter.dim(), 1), i) for i, p in enumerate(spec) if _is_strided(p)]
    for dim, i in later:
        before = math.prod(mesh.size(j) for d, j in plain if d == dim and j > i)
        if spec[i].split_factor != before:
            raise ValueError(
                f"{name} is placed as {spec} on its mesh, with a dimension split in strides of {spec[i].split_factor}: "
                "shards of whole rows or columns are supported (parallelize_module, then fully_shard)"
            )
    if any(not (p.is_replicate() or p.is_shard() or _is_strided(p)) for p in spec):
        raise ValueError(f"{name} is placed as {spec} on its mesh: a parameter must be sharded or replicated")
    return Shard(mesh, spec, (*plain, *later))


def _is_strided(placement: Any) -> bool:
    """Whether a placement is that of FSDP2 for a dimension that another one has split before."""
    return type(placement).__name__ == "_StridedShard"


def _moved(placement: Any, dim: int) -> Any:
    """Return a split along another dimension of its tensor."""
    if _is_strided(placement):
        return type(placement)(dim, split_factor=placement.split_factor)
    return type(placement)(dim)


def any_process(flags: Sequence[bool], meshes: Iterable[Any]) -> list[bool]:
    """Return which of the flags are set in any process of the meshes; waits for the device only if one is not set here.

    All processes must call it with as many flags.
    """
    for mesh in dict.fromkeys(meshes):
        make = torch.ones(len(flags), dtype=torch.float32, device=mesh.device_type)
        count = make if all(flags) else torch.tensor(flags, dtype=torch.float32, device=mesh.device_type)
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dim))
        if not all(flags):
            flags = [flag > 0.0 for flag in count.tolist()]
    return list(flags)


def sum_over(group: Any, tensors: Sequence[Tensor], device: str) -> None:
    """Replace tensors by their sums over a process group, in float64 and one all-reduce."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1).to(device, torch.float64) for tensor in tensors])
    torch.distributed.all_reduce(flat, group=group)
    for tensor, piece in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))


def global_norm(
    norms: Mapping[ProcessGroups, Sequence[Tensor]],
    shared: Sequence[tuple[ProcessGroups, ProcessGroups, Tensor]],
    devices: Mapping[Any, str],
) -> Tensor:
    """Sum shared gradients over processes in place, and return the norm of all gradients.

    The gradient of a scale is its sum over all parts of the weight that share the scale. The usual case takes one
    all-reduce per dimension of the mesh; a scale that is shared along one dimension and split along another takes a
    further one, of the norm.

    Args:
        norms: norms of gradients that no other process has, by the groups over which their parameters are split.
        shared: gradients of scales, each after the groups of its parameter and its own.
        devices: all process groups with their types of devices, in the same order in every process.
    """
    if not devices:
        own = [*norms.get((), ()), *(grad for _, _, grad in shared)]
        return torch.nn.utils.get_total_norm(own) if own else torch.zeros((), dtype=torch.float32, device="cpu")
    device = next(iter(devices.values()))
    ready = [(own, grad) for whole, own, grad in shared if own == whole]  # nothing to sum
    late = [(own, grad) for whole, own, grad in shared if own != whole]
    squares = {split: _square([*parts, *_of(split, ready)], device) for split, parts in norms.items()}
    for group, kind in devices.items():
        grads = [grad for whole, own, grad in shared if group in whole and group not in own]
        sum_over(group, [*(square for split, square in squares.items() if group in split), *grads], kind)
    summed = {own: _square(_of(own, late), device) for own, _ in late}
    for group, kind in devices.items():
        sum_over(group, [square for own, square in summed.items() if group in own], kind)
    return torch.stack([*squares.values(), *summed.values()]).sum().sqrt()


def _of(split: ProcessGroups, grads: Iterable[tuple[ProcessGroups, Tensor]]) -> list[Tensor]:
    """Return the gradients that are split over these groups."""
    return [grad for own, grad in grads if own == split]


def _square(grads: Sequence[Tensor], device: str) -> Tensor:
    """Return the squared norm of all `grads`, a zero on the mesh's device if there are none."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.nn.utils.get_total_norm(grads).to(device, torch.float64) ** 2
