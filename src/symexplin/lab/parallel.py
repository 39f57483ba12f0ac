"""The processes of a job under torchrun: shared computations, decisions and errors."""

import atexit
import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed

from symexplin.lab.model import Transformer
from symexplin.lab.process import follow_launcher, launch, under_torchrun
from symexplin.lab.settings import differences
from symexplin.optim.placement import is_dtensor, whole

__all__ = ["ALONE", "PARALLEL", "ElsewhereError", "Ranks", "first_to_tell", "joined", "leave", "placed", "shard"]

T = TypeVar("T")

PARALLEL = ("ddp", "fsdp")
# The first process may write a checkpoint or a report meanwhile.
_PATIENCE = datetime.timedelta(minutes=30)
_MOMENT = datetime.timedelta(seconds=5)
_TOLD = "symexplin/told"
_ENDED = "another process of the job has ended or cannot be reached; --resume continues from the last checkpoint"


class ElsewhereError(ValueError):
    """Another process of the job has failed, and reports the error."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a job: this is process `rank` of `size`.

    All processes must call the methods except :meth:`rows`, in the same order.

    >>> ALONE.first, ALONE.rows(6), Ranks(1, 4).rows(6)
    (True, slice(0, 6, None), slice(1, 3, None))
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that reads and writes for all."""
        return self.rank == 0

    def facts(self) -> dict[str, int | str]:
        """Return the number of processes and their backend, for the record of a run."""
        return {} if self.size == 1 else {"processes": self.size, "backend": str(distributed.get_backend())}

    def rows(self, count: int) -> slice:
        """Return this process's share of `count` rows."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every process, in their order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found

    def sums(self, *numbers: float) -> tuple[float, ...]:
        """Return the sums of `numbers` over the processes, the same bits everywhere."""
        return tuple(self.table(*numbers).sum(0).tolist())

    def table(self, *numbers: float) -> Tensor:
        """Return a float64 row of `numbers` per process."""
        own = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.size)] if self.size > 1 else [own]
        if self.size > 1:
            distributed.all_gather(found, own)
        return torch.stack(found)

    def agree(self, settings: Mapping[str, Any], free: Collection[str] = ()) -> None:
        """Raise ValueError unless all processes have the same settings, except for the dotted keys `free`."""
        tables = self.gather(settings)
        found: dict[str, list[str]] = {}
        for rank, table in enumerate(tables):
            for key, (first, other) in differences(tables[0], table).items():
                found.setdefault(key, []).append(f"{key} is {first!r} in process 0, {other!r} in process {rank}")
        odd = [texts[0] + " and others" * (len(texts) > 1) for key, texts in found.items() if key not in free]
        with self.together():
            if odd:
                raise ValueError(f"all processes must have the same settings: {'; '.join(odd)}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise the error of one process in all: in the others as ElsewhereError."""
        if self.size == 1:
            yield
            return
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        said = self.gather(None if error is None else str(error) or type(error).__name__)
        teller = next((rank for rank, text in enumerate(said) if text is not None), None)
        if teller is None:
            return
        if error is not None and teller == self.rank:
            raise error
        raise ElsewhereError(f"process {teller}: {said[teller]}")

    def tell(self, make: Callable[[], T]) -> T:
        """Return the result of `make`, which the first process alone calls."""
        made = None
        with self.together():
            made = make() if self.first else None
        if self.size > 1:
            box = [made]
            distributed.broadcast_object_list(box, src=0)
            (made,) = box
        return cast(T, made)

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors in the first process, gathered one by one; nothing in the others."""
        found = {}
        for name, tensor in tensors.items():
            gathered = whole(tensor)
            if self.first:
                found[name] = gathered.cpu() if is_dtensor(tensor) else gathered
        return found


ALONE = Ranks()


@contextlib.contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the job of torchrun, if there is one. On GPUs each process takes that of its local rank.

    >>> with joined("cpu") as ranks:
    ...     ranks.sums(1.5, 2.0)
    (1.5, 2.0)
    """
    started, gpus = launch(), device != "cpu" and torch.cuda.is_available()
    try:
        # A second group cannot use the store of torchrun.
        if distributed.is_available() and distributed.is_initialized():
            yield Ranks(distributed.get_rank(), distributed.get_world_size())
            return
        if started.size == 1:
            yield ALONE
            return
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} must be in the environment beside WORLD_SIZE = {started.size}, as torchrun "
                "puts them there: start with torchrun, or unset WORLD_SIZE"
            )
        if under_torchrun():
            follow_launcher()
        # Plain values go through gloo, without waiting for a GPU.
        distributed.init_process_group("cpu:gloo,cuda:nccl" if gpus else "cpu:gloo", timeout=_PATIENCE)
        atexit.register(distributed.destroy_process_group)
        ranks = Ranks(started.rank, started.size)
        if gpus:
            with ranks.together():
                _take_gpu(started.local_rank)
        yield ranks
        distributed.barrier()  # gloo may abort a process that ends while others still work
    except Exception as error:
        if not _lost(error):
            raise
        atexit.unregister(distributed.destroy_process_group)  # it would wait for the ended processes
        raise ChildProcessError(_ENDED) from error


def first_to_tell() -> bool:
    """Whether this is the first process of the job to call this function; if the store is gone, all are."""
    try:
        store = distributed.distributed_c10d._get_default_store()
        store.set_timeout(_MOMENT)
        return int(store.add(_TOLD, 1)) == 1
    except RuntimeError:
        return True


def leave(status: int) -> None:
    """End a process of a job with `status`; return if this process is alone.

    A thread of gloo may free a tensor while the interpreter shuts down, and this aborts the process
    (https://github.com/pytorch/pytorch/pull/179291). So there is no shutdown here.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if status == 0:  # after an error it could wait for the others without end
        distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _take_gpu(local_rank: int) -> None:
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"device cuda needs a GPU for each process of a machine, got {torch.cuda.device_count()}: give torchrun "
            "--nproc-per-node as many, or add --device cpu"
        )
    torch.cuda.set_device(local_rank)


def _lost(error: Exception) -> bool:
    """Whether an error says that another process is gone."""
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def shard(model: Transformer, ranks: Ranks, device: str) -> None:
    """Shard the parameters of `model`, which is on the CPU, over the processes and their devices, per block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    scalar = next((name for name, parameter in model.named_parameters() if not parameter.dim()), None)
    if scalar is not None:
        raise ValueError(f"parallel must be 'ddp' for a map that learns single numbers, such as {scalar}, got 'fsdp'")
    mesh = init_device_mesh(torch.device(device).type, (ranks.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor`, which is whole in all processes, sharded as `like` is."""
    if not is_dtensor(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    target = cast(Any, like)
    return distribute_tensor(tensor.to(like.device), target.device_mesh, target.placements, src_data_rank=None)
