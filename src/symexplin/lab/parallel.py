"""The processes of `train` under torchrun: shared computations, decisions and errors."""

import atexit
import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed

from symexplin.lab.process import end_with_parent
from symexplin.optim.shard import is_dtensor

__all__ = ["ALONE", "Ranks", "joined", "leave", "placed"]

T = TypeVar("T")

# The others wait while the first process writes a checkpoint.
_PATIENCE = datetime.timedelta(minutes=30)
_ENDED = "another process of the job has ended or cannot be reached; --resume continues from the last checkpoint"


@dataclass(frozen=True)
class Ranks:
    """The processes of a job, all of which call the methods in the same order: this is process `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that reads and writes for all."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """Return this process's share of `count` rows."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every process, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise the error of one process in all: in those without one of their own as a ValueError."""
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        told = self.gather(None if error is None else str(error) or type(error).__name__)
        if error is not None:
            raise error
        for rank, text in enumerate(told):
            if text is not None:
                raise ValueError(f"process {rank}: {text}")

    def from_first(self, make: Callable[[], T]) -> T:
        """Return the result of `make`, which the first process alone calls."""
        with self.together():
            made = make() if self.first else None
        return cast(T, self.gather(made)[0])


ALONE = Ranks()


@contextlib.contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the job of torchrun, if there is one. On GPUs each process takes that of its local rank."""
    if os.environ.get("WORLD_SIZE", "1") == "1" and not _initialized():
        yield ALONE
        return
    try:
        if not _initialized():  # a second group cannot use the store of torchrun
            _join(device != "cpu" and torch.cuda.is_available())
        yield Ranks(distributed.get_rank(), distributed.get_world_size())
        distributed.barrier()  # gloo may abort a process that ends while others still work
    except Exception as error:
        lost = isinstance(error, RuntimeError) and "gloo" in str(error)
        if not lost and not isinstance(error, distributed.DistError):
            raise
        atexit.unregister(distributed.destroy_process_group)  # it would wait for the ended processes
        raise ChildProcessError(_ENDED) from error


def _join(gpus: bool) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started this process
        end_with_parent()
    # Plain values go through gloo, without waiting for a GPU.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if gpus else "cpu:gloo", timeout=_PATIENCE)
    atexit.register(distributed.destroy_process_group)
    if gpus:
        local, count = int(os.environ.get("LOCAL_RANK", distributed.get_rank())), torch.cuda.device_count()
        with Ranks(distributed.get_rank(), distributed.get_world_size()).together():
            if local >= count:
                raise ValueError(f"device cuda needs one GPU per process, got {count}: or add --device cpu")
        torch.cuda.set_device(local)


def leave(status: int) -> None:
    """End a process of a job with `status`; return if this process is alone.

    A thread of gloo may free a tensor while the interpreter shuts down, and this aborts the process
    (https://github.com/pytorch/pytorch/pull/179291). So there is no shutdown here.
    """
    if not _initialized():
        return
    if status == 0:  # after an error it could wait for the others forever
        distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _initialized() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor`, which is whole in all processes, sharded as `like` is."""
    if not is_dtensor(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    target = cast(Any, like)
    return distribute_tensor(tensor.to(like.device), target.device_mesh, target.placements, src_data_rank=None)
