"""What torchrun tells the processes that it starts, and what they tell it; nothing here needs torch."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Launch", "launch", "outlived", "report_failure", "under_torchrun"]

_HEAD_START = 2.0  # seconds


class Launch(NamedTuple):
    """Which of how many processes this one is, in the job and on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Return what torchrun has said to this process; without torchrun it is alone.

    Raises:
        ValueError: what torchrun would not say.

    >>> launch({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    Launch(rank=3, size=4, local_rank=1)
    >>> launch({})
    Launch(rank=0, size=1, local_rank=0)
    """
    size = _whole(environment, "WORLD_SIZE", "1")
    if size < 2 or "RANK" not in environment:
        return Launch()
    rank = _whole(environment, "RANK")
    if rank >= size:
        raise ValueError(f"RANK, which torchrun sets, must be less than WORLD_SIZE = {size}, got {rank}")
    return Launch(rank, size, _whole(environment, "LOCAL_RANK", str(rank)))


def _whole(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name, default)
    if not text.isdecimal():
        raise ValueError(f"{name}, which torchrun sets, must be a whole number >= 0, got {text!r}: unset it without")
    return int(text)


def under_torchrun() -> bool:
    """Whether torchrun has begun this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def outlived(started: Launch) -> bool:
    """Wait a little for torchrun to end this process, as it does after another's error; return whether it did not.

    So the first process can tell of an error that all have before torchrun ends it in turn; of one that only another
    machine has, the first process there tells. Without torchrun nobody is ended, and this returns False at once.
    """
    if not under_torchrun():
        return False
    time.sleep(_HEAD_START if started.local_rank == 0 else 2 * _HEAD_START)
    return True


def report_failure(line: str) -> None:
    """Give torchrun the line that its report of failed processes then ends with, if torchrun is there."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        said = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": said}))
