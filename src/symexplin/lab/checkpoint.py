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
from concurrent.futures import Future
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from symexplin.lab.files import file_digest, read_json, write_json
from symexplin.lab.parallel import ALONE, Ranks

__all__ = [
    *("CHECKPOINTS", "STATE", "CheckpointWriter", "Saved", "is_sharded", "load_checkpoint", "newest"),
    *("newest_intact", "read_shards", "shard_metadata", "tidy", "write_shards"),
]

CHECKPOINTS = "checkpoints"
STATE = "state.json"
_TEMPORARY = ".tmp"

State = dict[str, Any]
Digests = dict[str, str]  # sha256 of files by name
# What one process saves: plain values for the state, and the digests to come of files written in the background.
Saved = tuple[State, Future[Digests] | None]
Echo = Callable[[str], None]


def newest(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    return sorted((folder / CHECKPOINTS).glob("step-*[0-9]"), key=lambda path: int(path.name[5:]), reverse=True)


class CheckpointWriter:
    """Writes the checkpoints of a run, one after another, and keeps the `keep` newest. All processes call its methods.

    Parts of tensors are written in the background.
    """

    def __init__(self, folder: Path, keep: int, ranks: Ranks = ALONE) -> None:
        self._folder, self._keep, self._ranks = folder / CHECKPOINTS, keep, ranks
        self._begun: tuple[Path, State, Future[Digests] | None] | None = None

    @property
    def written(self) -> bool:
        """Whether this process has written its files of the checkpoint in progress."""
        return self._begun is not None and self._begun[2] is not None and self._begun[2].done()

    def begin(self, step: int, write: Callable[[Path], Saved]) -> None:
        """Write the checkpoint of `step`, unless it exists; the one before it is finished first.

        `write` writes this process's files into the given folder. The state has the plain values of the first process.
        """
        self.finish()
        final = self._folder / f"step-{step:08d}"
        if self._ranks.from_first(final.exists):
            return
        self._ranks.from_first(lambda: _temporary(final).mkdir(parents=True))
        with self._removing(final), self._ranks.together():
            values, digests = write(_temporary(final))
        self._begun = final, {"step": step, **values}, digests
        if digests is None:
            self.finish()

    def finish(self) -> None:
        """Wait for what is written in the background; then the checkpoint exists."""
        if self._begun is None:
            return
        (final, state, digests), self._begun = self._begun, None
        with self._removing(final):
            with self._ranks.together():
                own = {} if digests is None else digests.result()
            known = {name: every[name] for every in self._ranks.gather(own) for name in every}
            self._ranks.from_first(lambda: _publish(final, state, known))
        self._ranks.from_first(self._remove_old)

    @contextlib.contextmanager
    def _removing(self, final: Path) -> Iterator[None]:
        """Remove the incomplete checkpoint if an error is raised."""
        try:
            yield
        except BaseException:
            if self._ranks.first:
                shutil.rmtree(_temporary(final), ignore_errors=True)
            raise

    def _remove_old(self) -> None:
        for old in newest(self._folder.parent)[self._keep :]:
            gone = _temporary(old)  # an incomplete checkpoint never has the name of a complete one
            old.rename(gone)
            shutil.rmtree(gone)


def _temporary(final: Path) -> Path:
    return final.with_name(final.name + _TEMPORARY)


def _publish(final: Path, state: State, known: Digests) -> None:
    """Write the state with the digests of all files, computed if none are `known`, and rename the checkpoint."""
    folder = _temporary(final)
    state["files"] = known or {path.name: file_digest(path) for path in sorted(folder.iterdir())}
    write_json(folder / STATE, {"sha256": _sha256(state), "state": state})
    folder.rename(final)


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


def write_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> Future[Digests]:
    """Copy this process's parts of tensors, and write the copies in the background. All processes call it.

    The result is the digest of this process's file, or OSError if a process cannot write (a full disk, for example).
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    digests: Digests = {}

    @contextlib.contextmanager
    def create_stream(path: Path, _: str) -> Iterator[BufferedWriter]:
        with _HashingFile(FileIO(path, "w")) as file:
            yield file
        digests[Path(path).name] = file.sha256.hexdigest()

    storage = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    storage.fs.create_stream = create_stream  # type: ignore[assignment, method-assign]
    written: Future[Digests] = Future()

    def tell(saving: Any) -> None:
        if (error := saving.exception()) is None:
            written.set_result(digests)
        else:
            written.set_exception(OSError(f"cannot write {str(folder)!r}: {_first(error)}"))

    saving = async_save(dict(tensors), storage_writer=storage, process_group=ranks.background)
    cast("Future[Any]", saving).add_done_callback(tell)  # the tensors are copied by now
    return written


class _HashingFile(BufferedWriter):
    """Computes the digest of what is written, so that nothing is read again."""

    def __init__(self, raw: FileIO) -> None:
        super().__init__(raw)
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        count = super().write(data)
        self.flush()  # torch before 2.14 syncs the file without the bytes that are still in this buffer
        return count


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
