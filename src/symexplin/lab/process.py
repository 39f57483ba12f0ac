"""A process and what started it: its place in a job of torchrun, signals that stop it. Nothing here needs torch."""

import os
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

__all__ = ["LAUNCHER", "Launch", "StopSignals", "Stopped", "follow_launcher", "give_way", "launch", "under_torchrun"]

# Environment variable with the number of the process that a run follows to its end (symexplin.lab.compare.launch).
LAUNCHER = "SYMEXPLIN_LAUNCHER"

_GLANCE = 1.0  # seconds between looks at whether the launcher is there
# Windows has no SIGHUP, the signal of a closed terminal.
_STOPPING = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
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


class Stopped(Exception):  # noqa: N818 (it is no error)
    """A run was stopped by `signal`, and has saved a checkpoint."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {message}")
        self.signal = number


class StopSignals:
    """Stores SIGTERM, SIGINT and SIGHUP in `signal`. A second SIGINT interrupts at once.

    A SIGHUP that is ignored, as under nohup, stays ignored. Outside the main thread Python allows no handlers.

    >>> with StopSignals() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     print(stop.signal == signal.SIGTERM)
    True
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.signal = number

    def stopped(self, message: str) -> Stopped:
        """Return the exception to raise after the checkpoint."""
        assert self.signal is not None
        return Stopped(self.signal, message)


def follow_launcher(launcher: int | None = None) -> None:
    """Send this process SIGTERM when the process `launcher`, by default the parent, has ended."""
    threading.Thread(target=_stop_without, args=(launcher or os.getppid(),), daemon=True).start()


def _stop_without(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_GLANCE)
    os.kill(os.getpid(), signal.SIGTERM)
