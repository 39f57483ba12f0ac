"""Where a parameter lies: whole on its device, or one shard of a DTensor along one tensor dimension (FSDP2)."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["WHOLE", "Placement", "address", "is_dtensor", "local", "on_host", "placement_of", "whole"]


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing torch.distributed where nobody has."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False  # the usual case, at a tenth of the time
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that lies on this device, sharing its storage."""
    return cast(Tensor, tensor.to_local()) if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def on_host(tensor: Tensor) -> bool:
    """Whether reading a value waits for no device."""
    return tensor.device.type == "cpu"


def address(tensor: Tensor) -> tuple[int, torch.dtype, torch.Size, tuple[int, ...]]:
    """Return where and how the part of a tensor lies that is on this device; cheaper than asking :func:`local` for it.

    >>> address(torch.zeros(2, 3))[1:]
    (torch.float32, torch.Size([2, 3]), (3, 1))
    """
    part = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return part.data_ptr(), part.dtype, part.shape, part.stride()


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, a collective operation where it is split."""
    return cast(Tensor, tensor.full_tensor()) if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Placement:
    """How a parameter and what belongs to it are split: `dim` of the tensor over dimension `mesh_dim` of the mesh.

    Without a mesh it is whole; with a mesh and `dim` None every process has all of it.
    """

    mesh: Any = None  # torch.distributed.device_mesh.DeviceMesh
    spec: tuple[Any, ...] = ()  # the DTensor's placements
    dim: int | None = None
    mesh_dim: int | None = None

    @property
    def group(self) -> Any:
        """The process group over which the parameter is split; None: it is whole here."""
        return None if self.dim is None else self.mesh.get_group(self.mesh_dim)

    def wrap(self, part: Tensor, shape: Sequence[int], dim: int | None = None) -> Tensor:
        """Return this process's `part` as the tensor of that whole `shape`, split along `dim`; None: as the parameter.

        A part that is not split comes back as it is, but for the parameter's own shape, which stays a DTensor.
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
        """Return this process's part of a whole `tensor` if the parameter is split along `dim`, else all of it."""
        if dim is None or dim != self.dim:
            return tensor
        size = tensor.shape[dim]
        chunk = -(-size // self.mesh.size(self.mesh_dim))  # as DTensor and torch.chunk do: the last may be short
        start = min(self.mesh.get_local_rank(self.mesh_dim) * chunk, size)
        # A copy: as a view it would keep all of the tensor in memory and in checkpoints.
        return tensor.narrow(dim, start, min(chunk, size - start)).clone(memory_format=torch.contiguous_format)

    def gather(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the whole tensor of that `shape`, a collective operation where the parameter is split."""
        return whole(self.wrap(part, shape))


WHOLE = Placement()


def placement_of(parameter: Tensor, name: str) -> Placement:
    """Return where a parameter lies.

    Raises:
        ValueError: it is split over more than one dimension of the mesh, or is a sum that is still pending.
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
