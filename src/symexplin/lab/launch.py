"""What torchrun tells the processes that it starts. Nothing here needs torch."""

import os
import time
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Launch", "give_way", "launch", "under_torchrun"]

_HEAD_START = 2.0  # seconds


class Launch(NamedTuple):
    """Which of how many processes this one is, in the job and on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Return the place of this process in the job of torchrun; without torchrun it is alone.

    Raises:
        ValueError: a value that torchrun would not set.

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


def give_way() -> None:
    """Let the process that tells of an error print it before torchrun ends the job, as it does after the first exit."""
    if under_torchrun():
        time.sleep(_HEAD_START)
