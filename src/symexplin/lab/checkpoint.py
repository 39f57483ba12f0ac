"""Checkpoints of a run: folders of safetensors and JSON that are complete or do not exist.

`step-00000500/` holds the tensors of the model and of the optimizer, and state.json, which has the digests of all
files. A checkpoint is written under another name and then renamed: a kill at any moment leaves the earlier ones.
"""

import contextlib
import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

from torch import Tensor

from symexplin.lab.files import file_digest, read_json, write_json
from symexplin.lab.parallel import ALONE, Ranks

__all__ = [
    *("CHECKPOINTS", "STATE", "is_sharded", "load_checkpoint", "newest", "newest_intact"),
    *("read_shards", "save_checkpoint", "shard_metadata", "tidy", "write_shards"),
]

CHECKPOINTS = "checkpoints"
STATE = "state.json"
_TEMPORARY = ".tmp"

State = dict[str, Any]
Echo = Callable[[str], None]


def newest(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    return sorted((folder / CHECKPOINTS).glob("step-*[0-9]"), key=lambda path: int(path.name[5:]), reverse=True)


def save_checkpoint(folder: Path, step: int, write: Callable[[Path], State], keep: int, ranks: Ranks = ALONE) -> Path:
    """Write the checkpoint of `step`, and remove all but the `keep` newest ones. All processes call it.

    `write` writes this process's files into the given folder, and returns plain values; those of the first process are
    the state. Their "digests" may have those of its files, which are read for theirs otherwise.
    """
    final = folder / CHECKPOINTS / f"step-{step:08d}"
    if ranks.from_first(final.exists):
        return final
    temporary = final.with_name(final.name + _TEMPORARY)
    ranks.from_first(lambda: temporary.mkdir(parents=True))

    def finish(known: Mapping[str, str]) -> None:
        names = sorted(path.name for path in temporary.iterdir())
        state["files"] = {name: known.get(name) or file_digest(temporary / name) for name in names}
        write_json(temporary / STATE, {"sha256": _sha256(state), "state": state})
        temporary.rename(final)

    try:
        with ranks.together():
            state = {"step": step, **write(temporary)}
        digests = ranks.gather(state.pop("digests", {}))
        ranks.from_first(lambda: finish({name: own[name] for own in digests for name in own}))
    except BaseException:
        if ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    ranks.from_first(lambda: _remove_old(folder, keep))
    return final


def _remove_old(folder: Path, keep: int) -> None:
    for old in newest(folder)[keep:]:
        gone = old.with_name(old.name + _TEMPORARY)  # an incomplete checkpoint never has the name of a complete one
        old.rename(gone)
        shutil.rmtree(gone)


def load_checkpoint(path: Path, ranks: Ranks = ALONE) -> State:
    """Return the plain values of a checkpoint after a check of all its files, of which each process reads its share."""
    try:
        content = read_json(path / STATE)
        state: State = content["state"]
        bad = [STATE] if content["sha256"] != _sha256(state) else []
        share = list(state["files"].items())[ranks.rank :: ranks.size]
        bad += [name for name, digest in share if file_digest(path / name) != digest]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {error}") from None
    if bad:
        raise ValueError(f"checkpoint {path} is damaged: {bad[0]} does not match its digest")
    return state


def newest_intact(folder: Path, echo: Echo, ranks: Ranks = ALONE) -> tuple[Path, State] | None:
    """Return the newest undamaged checkpoint and its plain values; None without any. `echo` receives warnings."""
    paths = ranks.from_first(lambda: newest(folder))
    for path in paths:
        try:
            with ranks.together():
                state = load_checkpoint(path, ranks)
            return path, state
        except ValueError as error:
            if not path.exists():  # the run has replaced it meanwhile
                return newest_intact(folder, echo)
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


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write this process's parts of tensors into a folder; return the digest of its file. All processes call it.

    Raises:
        OSError: a process cannot write, because of a full disk for example.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    digests = {}

    @contextlib.contextmanager
    def create_stream(path: Path, _: str) -> Iterator[BufferedWriter]:
        with _HashingFile(FileIO(path, "w")) as file:
            yield file
        digests[Path(path).name] = file.sha256.hexdigest()

    storage = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    storage.fs.create_stream = create_stream  # type: ignore[assignment, method-assign]
    try:
        save(dict(tensors), storage_writer=storage)
    except CheckpointException as error:
        raise OSError(f"cannot write {str(folder)!r}: {_first(error)}") from None
    return digests


class _HashingFile(BufferedWriter):
    """Computes the digest of what is written, so that nothing is read again."""

    def __init__(self, raw: FileIO) -> None:
        super().__init__(raw)
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return super().write(data)


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


def _first(error: Any) -> BaseException:
    """Return the first failure in a CheckpointException."""
    failure: BaseException = next(iter(error.failures.values()))[0]
    return failure
