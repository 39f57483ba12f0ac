"""What torchrun tells the processes that it starts, and what they tell it; nothing here needs torch."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Launch", "launch", "report_failure"]


class Launch(NamedTuple):
    """Which of how many processes this one is, in the job and on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Return what torchrun has said to this process; without torchrun it is alone.

    >>> launch({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    Launch(rank=3, size=4, local_rank=1)
    >>> launch({})
    Launch(rank=0, size=1, local_rank=0)
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size < 2 or "RANK" not in environment:
        return Launch()
    rank = int(environment["RANK"])
    return Launch(rank, size, int(environment.get("LOCAL_RANK", rank)))


def report_failure(line: str) -> None:
    """Give torchrun the line that its report of failed processes then ends with, if torchrun is there."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        said = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": said}))
