"""Checkpoints of a run: folders of safetensors and JSON that are complete or do not exist.

`step-00000500/` holds the tensors of the model and of the optimizer, and state.json, which has the digests of all
files. A checkpoint is written under another name and then renamed: a kill at any moment leaves the earlier ones.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from symexplin.lab.files import file_digest, read_json, write_json

__all__ = [
    *("CHECKPOINTS", "is_checkpoint", "load_checkpoint", "newest"),
    *("newest_intact", "save_checkpoint", "tidy"),
]

CHECKPOINTS = "checkpoints"
_STATE = "state.json"
_TEMPORARY = ".tmp"

State = dict[str, Any]
Echo = Callable[[str], None]


def newest(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    return sorted((folder / CHECKPOINTS).glob("step-*[0-9]"), key=lambda path: int(path.name[5:]), reverse=True)


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint."""
    return (folder / _STATE).exists()


def save_checkpoint(folder: Path, step: int, write: Callable[[Path], State], keep: int) -> Path:
    """Write the checkpoint of `step`, and remove all but the `keep` newest ones.

    `write` writes files into the given folder, and returns plain values for the state.
    """
    final = folder / CHECKPOINTS / f"step-{step:08d}"
    if final.exists():
        return final
    temporary = final.with_name(final.name + _TEMPORARY)
    temporary.mkdir(parents=True)
    try:
        state = {"step": step, **write(temporary)}
        state["files"] = {path.name: file_digest(path) for path in sorted(temporary.iterdir())}
        write_json(temporary / _STATE, {"sha256": _sha256(state), "state": state})
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in newest(folder)[keep:]:
        gone = old.with_name(old.name + _TEMPORARY)  # an incomplete checkpoint never has the name of a complete one
        old.rename(gone)
        shutil.rmtree(gone)
    return final


def load_checkpoint(path: Path) -> State:
    """Return the plain values of a checkpoint after a check of all its files."""
    try:
        content = read_json(path / _STATE)
        state: State = content["state"]
        bad = [_STATE] if content["sha256"] != _sha256(state) else []
        bad += [name for name, digest in state["files"].items() if file_digest(path / name) != digest]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {error}") from None
    if bad:
        raise ValueError(f"checkpoint {path} is damaged: {bad[0]} does not match its digest")
    return state


def newest_intact(folder: Path, echo: Echo) -> tuple[Path, State] | None:
    """Return the newest undamaged checkpoint and its plain values; None without any. `echo` receives warnings."""
    paths = newest(folder)
    for path in paths:
        try:
            return path, load_checkpoint(path)
        except ValueError as error:
            if not path.exists():  # the run has replaced it meanwhile
                return newest_intact(folder, echo)
            echo(f"warning: {error}; trying the one before it")
    if paths:
        place = str(folder / CHECKPOINTS)
        raise ValueError(f"all checkpoints in {place!r} are damaged: remove that folder to start the run again")
    return None


def tidy(folder: Path, echo: Echo) -> tuple[Path, State] | None:
    """Return :func:`newest_intact`, after removing what is damaged or incomplete."""
    for path in (folder / CHECKPOINTS).glob(f"*{_TEMPORARY}"):
        shutil.rmtree(path)
    intact = newest_intact(folder, echo)
    for path in newest(folder):
        if intact is None or path == intact[0]:
            break
        shutil.rmtree(path)
    return intact


def _sha256(state: State) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
