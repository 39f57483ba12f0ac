"""Checkpoints of a run: folders of safetensors and JSON that are complete or do not exist.

`step-00000500/` holds model.safetensors, optimizer.safetensors and state.json, which has the digests of all three. A
checkpoint is written under another name and then renamed: a kill at any moment leaves the earlier ones.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symexplin.lab.files import sync_folder
from symexplin.lab.parallel import placed
from symexplin.lab.weights.files import iter_tensors

__all__ = [
    "CHECKPOINTS",
    "OPTIMIZER",
    "DamagedCheckpointError",
    "checkpoint_at",
    "is_checkpoint",
    "load_checkpoint",
    "load_optimizer",
    "newest",
    "newest_intact",
    "save_checkpoint",
    "set_aside",
    "split_optimizer",
    "sweep",
]

CHECKPOINTS, OPTIMIZER = "checkpoints", "optimizer.safetensors"
_STATE = "state.json"
# State of SELAdamW that is not sharded where the parameters are.
_WHOLE = ("panel1", "scalar")
_TEMPORARY, _DAMAGED = ".tmp", ".damaged"
_FORMAT = 1

State = dict[str, Any]


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing, or does not match its digest."""


def newest(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    return sorted((folder / CHECKPOINTS).glob("step-*[0-9]"), key=lambda path: int(path.name[5:]), reverse=True)


def checkpoint_at(folder: Path, step: int) -> Path:
    """Return the path of a run's checkpoint of `step`."""
    return folder / CHECKPOINTS / f"step-{step:08d}"


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint."""
    return (folder / _STATE).exists()


def sweep(folder: Path) -> None:
    """Remove the incomplete checkpoints of a killed process."""
    for path in (folder / CHECKPOINTS).glob(f"*{_TEMPORARY}"):
        shutil.rmtree(path, ignore_errors=True)


def save_checkpoint(folder: Path, step: int, write: Callable[[Path], State], keep: int) -> Path:
    """Write the checkpoint of `step`, and remove all but the `keep` newest ones.

    `write` writes files into the given folder, and returns plain values for the state.
    """
    final = checkpoint_at(folder, step)
    if final.exists():
        return final
    temporary = final.with_name(final.name + _TEMPORARY)
    temporary.mkdir(parents=True)
    try:
        state = write(temporary)
        files = {path.name: _digest(path) for path in sorted(temporary.iterdir())}
        body: State = {"format": _FORMAT, "step": step, "files": files, **state}
        text = json.dumps({"sha256": _sha256(body), "state": body}, allow_nan=False)
        with (temporary / _STATE).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(temporary)
        temporary.rename(final)
        sync_folder(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in newest(folder)[keep:]:
        gone = old.with_name(old.name + _TEMPORARY)  # an incomplete checkpoint never has the name of a complete one
        old.rename(gone)
        shutil.rmtree(gone)
    return final


def load_checkpoint(path: Path) -> State:
    """Return the plain values of a checkpoint after a check of all its files; a damaged one is an error."""
    older = [other.name for other in newest(path.parent.parent) if other.name < path.name]
    advice = f"the checkpoint before it is {older[0]}" if older else "there is no checkpoint before it"
    try:
        whole = json.loads((path / _STATE).read_text(encoding="utf-8"))
        state: State = whole["state"]
        intact = whole["sha256"] == _sha256(state)
    except (OSError, ValueError, KeyError, TypeError):
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {_STATE} cannot be read; {advice}") from None
    if not intact:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {_STATE} does not match its digest; {advice}")
    if state["format"] > _FORMAT:
        raise ValueError(f"checkpoint {path} has format {state['format']}, this version of symexplin reads {_FORMAT}")
    for name, digest in state["files"].items():
        if not (path / name).is_file() or _digest(path / name) != digest:
            raise DamagedCheckpointError(f"checkpoint {path} is damaged: {name} does not match its digest; {advice}")
    return state


def newest_intact(folder: Path, echo: Callable[[str], None]) -> tuple[Path, State] | None:
    """Return the newest undamaged checkpoint of a run and its plain values; None without checkpoints.

    `echo` receives a warning for each newer, damaged checkpoint. If all are damaged, that is an error.
    """
    found = newest(folder)
    for path in found:
        try:
            return path, load_checkpoint(path)
        except DamagedCheckpointError as error:
            if not path.exists():  # the run has replaced it meanwhile
                return newest_intact(folder, echo)
            echo(f"warning: {error}")
    if found:
        raise DamagedCheckpointError(
            f"all checkpoints in {str(folder / CHECKPOINTS)!r} are damaged: remove that folder to start the run again"
        )
    return None


def set_aside(folder: Path, last: Path) -> None:
    """Rename the checkpoints after `last`, which are damaged, so that a resumed run can write them again."""
    for path in newest(folder):
        if path.name > last.name:
            target = path.with_name(path.name + _DAMAGED)
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def split_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], State]:
    """Return the tensors of an optimizer's state by name, for the file OPTIMIZER, and the rest as plain values."""
    whole = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    plain: dict[str, State] = {}
    for index, state in whole["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                plain.setdefault(str(index), {})[key] = value
    return tensors, {"groups": whole["param_groups"], "plain": plain}


def load_optimizer(optimizer: torch.optim.Optimizer, folder: Path, saved: State) -> None:
    """Load the state of :func:`split_optimizer` from a checkpoint; the optimizer continues with the same bits.

    The file has whole tensors. An optimizer of sharded parameters takes the part of this process.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, State] = {int(index): dict(values) for index, values in saved["plain"].items()}
    for name, tensor in iter_tensors(folder / OPTIMIZER):
        index, _, key = name.partition(".")
        own = tensor if not tensor.dim() or key.startswith(_WHOLE) else placed(tensor, parameters[int(index)])
        # A copy: tensors of mapped files are not aligned as kernels need them.
        state.setdefault(int(index), {})[key] = own.clone()
    optimizer.load_state_dict({"state": state, "param_groups": saved["groups"]})
