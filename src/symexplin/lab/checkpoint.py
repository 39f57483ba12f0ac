"""Checkpoints of a run: folders of safetensors and JSON that are complete or do not exist.

`step-00000500/` holds the tensors of the model and of the optimizer, and state.json, which has the digests of all
files. A checkpoint is written under another name and then renamed: a kill at any moment leaves the earlier ones.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from symexplin.lab.files import file_digest, read_json, write_json
from symexplin.lab.parallel import ALONE, Ranks

__all__ = [
    *("CHECKPOINTS", "STATE", "State", "is_sharded", "load_checkpoint", "newest"),
    *("newest_intact", "read_shards", "save_checkpoint", "shard_metadata", "tidy", "write_shards"),
]

CHECKPOINTS = "checkpoints"
STATE = "state.json"
_TEMPORARY = ".tmp"

State = dict[str, Any]
Echo = Callable[[str], None]


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
        names = ranks.from_first(lambda: sorted(path.name for path in place.iterdir()))
        with ranks.together():
            share = {name: _synced_digest(place / name) for name in names[ranks.rank :: ranks.size]}
        state["files"] = {name: digest for every in ranks.gather(share) for name, digest in every.items()}
        ranks.from_first(lambda: write_json(place / STATE, {"sha256": _sha256(state), "state": state}))
        ranks.from_first(lambda: place.rename(final))
    except BaseException:
        if ranks.first:
            shutil.rmtree(place, ignore_errors=True)
        raise
    ranks.from_first(lambda: _remove(newest(folder)[keep:]))


def _remove(checkpoints: Sequence[Path]) -> None:
    for path in checkpoints:
        gone = _temporary(path)  # an incomplete checkpoint never has the name of a complete one
        path.rename(gone)
        shutil.rmtree(gone)


def _temporary(final: Path) -> Path:
    return final.with_name(final.name + _TEMPORARY)


def _synced_digest(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return file_digest(path)


def load_checkpoint(path: Path, ranks: Ranks = ALONE) -> State:
    """Return the plain values of a checkpoint after a check of all its files, of which each process reads its share.

    Raises:
        ValueError: it is damaged, in all processes.
        OSError: a file cannot be read, which is no damage.
    """
    with ranks.together():
        state, damage = _checked(path, ranks)
    if told := [each for each in ranks.gather(damage) if each is not None]:
        raise ValueError(f"checkpoint {path} is damaged: {told[0]}")
    return state


def _checked(path: Path, ranks: Ranks) -> tuple[State, str | None]:
    """Return the plain values of a checkpoint, and what is wrong with this process's share of its files."""
    try:
        content = read_json(path / STATE)
        state: State = content["state"]
        bad = [STATE] if content["sha256"] != _sha256(state) else []
        share = list(state["files"].items())[ranks.rank :: ranks.size]
        bad += [name for name, digest in share if file_digest(path / name) != digest]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        return {}, str(error)
    return state, f"{bad[0]} does not match its digest" if bad else None


def newest_intact(folder: Path, echo: Echo, ranks: Ranks = ALONE) -> tuple[Path, State] | None:
    """Return the newest undamaged checkpoint and its plain values; None without any. `echo` receives warnings."""
    paths = ranks.from_first(lambda: newest(folder))
    for path in paths:
        try:
            return path, load_checkpoint(path, ranks)
        except ValueError as error:
            if not ranks.from_first(path.exists):  # the run has replaced it meanwhile
                return newest_intact(folder, echo, ranks)
            echo(f"warning: {error}; trying the one before it")
    if paths:
        place = str(folder / CHECKPOINTS)
        raise ValueError(f"all checkpoints in {place!r} are damaged: remove that folder to start the run again")
    return None


def tidy(folder: Path, echo: Echo, ranks: Ranks = ALONE) -> tuple[Path, State] | None:
    """Return :func:`newest_intact`, after removing what is damaged or incomplete."""
    intact = newest_intact(folder, echo, ranks)

    def remove() -> None:
        damaged = newest(folder)
        damaged = damaged if intact is None else damaged[: damaged.index(intact[0])]
        for path in (*damaged, *(folder / CHECKPOINTS).glob(f"*{_TEMPORARY}")):
            shutil.rmtree(path)

    ranks.from_first(remove)
    return intact


def _sha256(state: State) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


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
