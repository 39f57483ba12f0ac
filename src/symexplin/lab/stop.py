"""How processes end: signals as a wish to stop at the next step, others with the one that began them."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["LAUNCHER", "STOPPING", "StopSignals", "Stopped", "follow_launcher", "follow_parent", "ignoring"]

# Environment variable with the number of the process that a run follows to its end (symexplin.lab.compare.launch).
LAUNCHER = "SYMEXPLIN_LAUNCHER"

_GLANCE = 1.0  # seconds between looks at whether the launcher is there
# SIGHUP, which Windows has not: the terminal has gone.
STOPPING = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class Stopped(Exception):  # noqa: N818 (it is no error)
    """A run was asked to stop, and has saved what it had; `signal` is what asked."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {message}")
        self.signal = number


class StopSignals:
    """Remembers SIGTERM, SIGINT and SIGHUP in `signal` instead of dying of them; a second SIGINT interrupts at once.

    A SIGHUP that is ignored, as under nohup, stays ignored.

    Outside the main thread, where Python sets no handlers, it does nothing.

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
            for number in STOPPING:
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
        """Return the exception to raise when all is saved."""
        assert self.signal is not None
        return Stopped(self.signal, message)


@contextlib.contextmanager
def ignoring(numbers: Sequence[int]) -> Iterator[None]:
    """Ignore signals while processes start, which inherit that: a terminal's then reach this process alone.

    Outside the main thread it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow_parent() -> None:
    """End this worker process with the one that began it, however that ends: a killed one cannot end its workers."""
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def follow_launcher(launcher: int | None = None) -> None:
    """Send this process SIGTERM when its launcher has ended: a killed launcher cannot stop what it started.

    Args:
        launcher: its process number; None: the present parent process.
    """
    threading.Thread(target=_stop_without, args=(launcher or os.getppid(),), daemon=True).start()


def _stop_without(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_GLANCE)
    os.kill(os.getpid(), signal.SIGTERM)
