"""Checkpoints of a run: folders of safetensors and JSON that are complete or do not exist.

`step-00000500/` holds the tensors of the model and of the optimizer, and the rest in state.json. A checkpoint is
written under another name, synced and then renamed: a kill at any moment leaves the earlier ones.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from symexplin.lab.files import write_json
from symexplin.lab.parallel import ALONE, Ranks

__all__ = [
    *("CHECKPOINTS", "STATE", "State", "is_sharded", "newest", "read_shards"),
    *("remove_incomplete", "save_checkpoint", "shard_metadata", "write_shards"),
]

CHECKPOINTS = "checkpoints"
STATE = "state.json"
_TEMPORARY = ".tmp"

State = dict[str, Any]


def newest(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    return sorted((folder / CHECKPOINTS).glob("step-*[0-9]"), key=lambda path: int(path.name[5:]), reverse=True)


def save_checkpoint(folder: Path, step: int, keep: int, write: Callable[[Path], State], ranks: Ranks = ALONE) -> None:
    """Write the checkpoint of `step`, unless it exists, and remove all but the `keep` newest. All processes call this.

    `write` writes this process's files into the given folder, and returns plain values for the state.
    """
    final = folder / CHECKPOINTS / f"step-{step:08d}"
    if ranks.from_first(final.exists):
        return
    place = _temporary(final)
    ranks.from_first(lambda: place.mkdir(parents=True))
    try:
        with ranks.together():
            state = {"step": step, **write(place)}
        names = ranks.from_first(lambda: sorted(place.iterdir()))
        with ranks.together():
            for path in names[ranks.rank :: ranks.size]:
                _sync(path)
        ranks.from_first(lambda: write_json(place / STATE, state))
        ranks.from_first(lambda: place.rename(final))
    except BaseException:
        if ranks.first:
            shutil.rmtree(place, ignore_errors=True)
        raise
    ranks.from_first(lambda: _remove(newest(folder)[keep:]))


def remove_incomplete(folder: Path) -> None:
    """Remove what a kill has left of a checkpoint."""
    for path in (folder / CHECKPOINTS).glob(f"*{_TEMPORARY}"):
        shutil.rmtree(path)


def _remove(checkpoints: Sequence[Path]) -> None:
    for path in checkpoints:
        gone = _temporary(path)  # an incomplete checkpoint never has the name of a complete one
        path.rename(gone)
        shutil.rmtree(gone)


def _temporary(final: Path) -> Path:
    return final.with_name(final.name + _TEMPORARY)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# --- Tensors in parts, one file for each process: torch.distributed.checkpoint, which writes safetensors as well ------


def is_sharded(folder: Path) -> bool:
    """Return whether a folder has tensors in parts."""
    return any(folder.glob("shard-*.safetensors"))


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this process's parts of tensors. All processes call it.

    Raises:
        OSError: a process cannot write, for example since the disk is full.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise OSError(f"cannot write {str(folder)!r}: {_first(error)}") from None


def shard_metadata(folder: Path) -> dict[str, Any]:
    """Return what the headers of :func:`write_shards` tell of each tensor: its `size` and `properties.dtype`."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return dict(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read this process's parts of `tensors` into them, whatever the number of processes that wrote them."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():  # it tells that the processes do not wait for each other
            warnings.simplefilter("ignore", UserWarning)
            load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise ValueError(f"{str(folder)!r} does not fit its model: {_first(error)}") from None


def _first(error: BaseException) -> BaseException:
    """Return the first failure in a CheckpointException; another error is returned as it is."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error
