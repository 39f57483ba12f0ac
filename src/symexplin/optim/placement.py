"""The placement of a parameter: whole on its device, or a shard of a DTensor along one dimension (FSDP2)."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["WHOLE", "Placement", "address", "is_dtensor", "local", "on_host", "placement_of", "whole"]


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing torch.distributed."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False  # the usual case, ten times as fast
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor; it shares the storage."""
    return cast(Tensor, tensor.to_local()) if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor is on the CPU, so that reading a value does not wait for a device."""
    return tensor.device.type == "cpu"


def address(tensor: Tensor) -> tuple[int, torch.dtype, torch.Size, tuple[int, ...]]:
    """Return the data pointer, dtype, shape and strides of the local part, faster than by :func:`local`.

    >>> address(torch.zeros(2, 3))[1:]
    (torch.float32, torch.Size([2, 3]), (3, 1))
    """
    part = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return part.data_ptr(), part.dtype, part.shape, part.stride()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, by a collective operation if it is split."""
    return cast(Tensor, tensor.full_tensor()) if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Placement:
    """The split of a parameter and its state: `dim` of the tensor over dimension `mesh_dim` of the mesh.

    Without a mesh the parameter is whole. With a mesh and `dim` None it is replicated in every process.
    """

    mesh: Any = None  # torch.distributed.device_mesh.DeviceMesh
    spec: tuple[Any, ...] = ()  # the DTensor's placements
    dim: int | None = None
    mesh_dim: int | None = None

    @property
    def group(self) -> Any:
        """The process group over which the parameter is split, or None if it is whole here."""
        return None if self.dim is None else self.mesh.get_group(self.mesh_dim)

    def wrap(self, part: Tensor, shape: Sequence[int], dim: int | None = None) -> Tensor:
        """Return the local `part` as a tensor of the whole `shape`, split along `dim`, by default as the parameter.

        A part along an unsplit `dim` is returned unchanged. Without `dim` the result is a DTensor if there is a mesh.
        """
        if self.mesh is None or (dim is not None and dim != self.dim):
            return part
        from torch.distributed.tensor import DTensor

        stride = torch.empty(tuple(shape), device="meta").stride()
        wrapped = DTensor.from_local(
            part.contiguous(), self.mesh, self.spec, run_check=False, shape=torch.Size(shape), stride=stride
        )
        return cast(Tensor, wrapped)

    def cut(self, tensor: Tensor, dim: int | None) -> Tensor:
        """Return the local part of a whole `tensor` if the parameter is split along `dim`, else the tensor."""
        if dim is None or dim != self.dim:
            return tensor
        size = tensor.shape[dim]
        chunk = -(-size // self.mesh.size(self.mesh_dim))  # as in DTensor and torch.chunk: the last may be short
        start = min(self.mesh.get_local_rank(self.mesh_dim) * chunk, size)
        # A copy: a view would keep the whole tensor in memory and in checkpoints.
        return tensor.narrow(dim, start, min(chunk, size - start)).clone(memory_format=torch.contiguous_format)

    def gather(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the whole tensor of this `shape`, by a collective operation if the parameter is split."""
        return whole(self.wrap(part, shape))


WHOLE = Placement()


def placement_of(parameter: Tensor, name: str) -> Placement:
    """Return the placement of a parameter.

    Raises:
        ValueError: it is split over more than one dimension of the mesh, or is a partial sum.
    """
    if not is_dtensor(parameter):
        return WHOLE
    spec: tuple[Any, ...] = tuple(parameter.placements)  # type: ignore[attr-defined]
    split = [(i, placement) for i, placement in enumerate(spec) if not placement.is_replicate()]
    if len(split) > 1 or any(not placement.is_shard() for _, placement in split):
        raise ValueError(
            f"{name} is placed as {spec} on its mesh: one sharded dimension and replication are supported "
            "(fully_shard on a mesh of shards or of replicas x shards)"
        )
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    if not split:
        return Placement(mesh, spec)
    ((mesh_dim, placement),) = split
    return Placement(mesh, spec, placement.dim % max(parameter.dim(), 1), mesh_dim)
