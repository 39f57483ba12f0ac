"""What stops this process. Nothing here needs torch."""

import ctypes
import signal
import sys
import threading
from types import FrameType
from typing import Any, Self

__all__ = ["StopSignals", "Stopped", "end_with_parent"]

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# Windows has no SIGHUP, the signal of a closed terminal.
_STOPPING = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class Stopped(Exception):  # noqa: N818 (it is no error)
    """A run was stopped by `signal`, and has saved a checkpoint."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {message}")
        self.signal = number


class StopSignals:
    """Stores SIGTERM, SIGINT and SIGHUP in `signal`. A second SIGINT interrupts at once.

    A SIGHUP that is ignored, as under nohup, stays ignored. Outside the main thread Python allows no handlers.
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

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.signal = number

    def stopped(self, message: str) -> Stopped:
        """Return the exception to raise after the checkpoint."""
        assert self.signal is not None
        return Stopped(self.signal, message)


def end_with_parent() -> None:
    """Let the kernel send this process SIGTERM when its parent ends, which Linux alone offers."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
