"""Checkpoints of a run: folders that are whole or not there, of safetensors and JSON alone.

`step-00000500/` holds model.safetensors, optimizer.safetensors and state.json, which has the digests of both and its
own. It is written under another name and renamed, so that a kill at any moment leaves the earlier ones.
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
    "checkpoint_at",
    "is_checkpoint",
    "load_checkpoint",
    "load_optimizer",
    "newest",
    "save_checkpoint",
    "split_optimizer",
    "sweep",
]

CHECKPOINTS, OPTIMIZER = "checkpoints", "optimizer.safetensors"
_STATE = "state.json"
# State of SELAdamW that every process has whole where the parameters are sharded.
_WHOLE = ("panel1", "scalar")
_TEMPORARY = ".tmp"
_FORMAT = 1

State = dict[str, Any]


def newest(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, the newest first."""
    return sorted((folder / CHECKPOINTS).glob("step-*[0-9]"), key=lambda path: int(path.name[5:]), reverse=True)


def checkpoint_at(folder: Path, step: int) -> Path:
    """Return where a run's checkpoint of `step` lies."""
    return folder / CHECKPOINTS / f"step-{step:08d}"


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint."""
    return (folder / _STATE).exists()


def sweep(folder: Path) -> None:
    """Remove what a killed process has left half-written or half-removed."""
    for path in (folder / CHECKPOINTS).glob(f"*{_TEMPORARY}"):
        shutil.rmtree(path, ignore_errors=True)


def save_checkpoint(folder: Path, step: int, write: Callable[[Path], State], keep: int) -> Path:
    """Write the checkpoint of `step` and remove all but the `keep` newest ones.

    Args:
        folder: of the run.
        step: completed optimizer steps.
        write: writes files into the folder that it is given and returns plain values to keep with them.
        keep: checkpoints that stay, this one included.

    Raises:
        OSError: the disk is full, ...; what was written of it is removed.
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
        gone = old.with_name(old.name + _TEMPORARY)  # never a checkpoint with files missing
        old.rename(gone)
        shutil.rmtree(gone)
    return final


def load_checkpoint(path: Path) -> State:
    """Return the plain values of a checkpoint after checking all its files.

    Raises:
        ValueError: a file is missing, damaged or of a newer format; the message says how to go on.
    """
    advice = f"remove that folder to go on from the checkpoint before it ({_before(path)})"
    try:
        whole = json.loads((path / _STATE).read_text(encoding="utf-8"))
        state: State = whole["state"]
        intact = whole["sha256"] == _sha256(state)
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"checkpoint {path} is damaged: {_STATE} cannot be read; {advice}") from None
    if not intact:
        raise ValueError(f"checkpoint {path} is damaged: {_STATE} does not match its digest; {advice}")
    if state["format"] > _FORMAT:
        raise ValueError(f"checkpoint {path} has format {state['format']}, this version of symexplin reads {_FORMAT}")
    for name, digest in state["files"].items():
        if not (path / name).is_file() or _digest(path / name) != digest:
            raise ValueError(f"checkpoint {path} is damaged: {name} does not match its digest; {advice}")
    return state


def _before(path: Path) -> str:
    older = [other.name for other in newest(path.parent.parent) if other.name < path.name]
    return older[0] if older else "none: the run starts again"


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
    """Load what :func:`split_optimizer` gave; the optimizer goes on bit for bit.

    The tensors are whole, also for an optimizer over sharded parameters, which takes this process's part of them.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, State] = {int(index): dict(values) for index, values in saved["plain"].items()}
    for name, tensor in iter_tensors(folder / OPTIMIZER):
        index, _, key = name.partition(".")
        own = tensor if not tensor.dim() or key.startswith(_WHOLE) else placed(tensor, parameters[int(index)])
        # A copy of its own: mapped files align tensors less well than torch, which kernels notice.
        state.setdefault(int(index), {})[key] = own.clone()
    optimizer.load_state_dict({"state": state, "param_groups": saved["groups"]})
