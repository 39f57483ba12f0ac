"""Checkpoints of a run: folders of safetensors and JSON that are complete or do not exist.

`step-00000500/` holds the tensors of the model and of the optimizer, and the rest in state.json. A checkpoint is
written under another name, synced and then renamed: a kill at any moment leaves the earlier ones.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from symexplin.lab.files import write_json

__all__ = ["STATE", "State", "newest", "remove_incomplete", "save_checkpoint"]

_CHECKPOINTS = "checkpoints"
STATE = "state.json"
_TEMPORARY = ".tmp"

State = dict[str, Any]


def newest(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    return sorted((folder / _CHECKPOINTS).glob("step-*[0-9]"), key=lambda path: int(path.name[5:]), reverse=True)


def save_checkpoint(folder: Path, step: int, keep: int, write: Callable[[Path], State]) -> None:
    """Write the checkpoint of `step`, unless it exists, and remove all but the `keep` newest.

    `write` writes files into the given folder and syncs them, and returns plain values for the state.
    """
    final = folder / _CHECKPOINTS / f"step-{step:08d}"
    if final.exists():
        return
    place = _temporary(final)
    place.mkdir(parents=True)
    try:
        write_json(place / STATE, {"step": step, **write(place)})
        place.rename(final)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    for path in newest(folder)[keep:]:
        gone = _temporary(path)  # an incomplete checkpoint never has the name of a complete one
        path.rename(gone)
        shutil.rmtree(gone)


def remove_incomplete(folder: Path) -> None:
    """Remove what a kill has left of a checkpoint."""
    for path in (folder / _CHECKPOINTS).glob(f"*{_TEMPORARY}"):
        shutil.rmtree(path)


def _temporary(final: Path) -> Path:
    return final.with_name(final.name + _TEMPORARY)
