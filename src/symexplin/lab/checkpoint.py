"""Checkpoints of a run: folders of safetensors and JSON that are complete or do not exist.

`step-00000500/` holds model.safetensors, optimizer.safetensors and state.json, which has the digests of all three. A
checkpoint is written under another name and then renamed: a kill at any moment leaves the earlier ones.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symexplin.lab.files import file_digest, read_json, write_json
from symexplin.lab.parallel import placed
from symexplin.lab.weights import iter_tensors

__all__ = [
    *("CHECKPOINTS", "OPTIMIZER", "is_checkpoint", "load_checkpoint", "load_optimizer"),
    *("newest", "newest_intact", "save_checkpoint", "split_optimizer", "tidy"),
]

CHECKPOINTS, OPTIMIZER = "checkpoints", "optimizer.safetensors"
_STATE = "state.json"
# State that is sharded as its parameter: the weight's own. Optimizers with scales take those whole, and shard them.
_OF_WEIGHTS = frozenset({"raw", "master", "exp_avg", "exp_avg_sq", "momentum_buffer"})
_TEMPORARY = ".tmp"

State = dict[str, Any]


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
        whole = read_json(path / _STATE)
        state: State = whole["state"]
        bad = [_STATE] if whole["sha256"] != _sha256(state) else []
        bad += [name for name, digest in state["files"].items() if file_digest(path / name) != digest]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {error}") from None
    if bad:
        raise ValueError(f"checkpoint {path} is damaged: {bad[0]} does not match its digest")
    return state


def newest_intact(folder: Path, echo: Callable[[str], None]) -> tuple[Path, State] | None:
    """Return the newest undamaged checkpoint and its plain values; None without any. `echo` receives warnings."""
    found = newest(folder)
    for path in found:
        try:
            return path, load_checkpoint(path)
        except ValueError as error:
            if not path.exists():  # the run has replaced it meanwhile
                return newest_intact(folder, echo)
            echo(f"warning: {error}; trying the one before it")
    if found:
        place = str(folder / CHECKPOINTS)
        raise ValueError(f"all checkpoints in {place!r} are damaged: remove that folder to start the run again")
    return None


def tidy(folder: Path, echo: Callable[[str], None]) -> tuple[Path, State] | None:
    """Return :func:`newest_intact`, after removing what is damaged or incomplete."""
    for path in (folder / CHECKPOINTS).glob(f"*{_TEMPORARY}"):
        shutil.rmtree(path)
    found = newest_intact(folder, echo)
    for path in newest(folder):
        if found is not None and path.name > found[0].name:
            shutil.rmtree(path)
    return found


def _sha256(state: State) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


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
    """Load the state of :func:`split_optimizer` from a checkpoint; sharded parameters take their part of it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, State] = {int(index): dict(values) for index, values in saved["plain"].items()}
    for name, tensor in iter_tensors(folder / OPTIMIZER):
        index, _, key = name.partition(".")
        own = placed(tensor, parameters[int(index)]) if key in _OF_WEIGHTS else tensor
        # A copy: tensors of mapped files are not aligned as kernels need them.
        state.setdefault(int(index), {})[key] = own.clone()
    optimizer.load_state_dict({"state": state, "param_groups": saved["groups"]})
