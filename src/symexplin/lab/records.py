"""What a run writes down while it trains: its metrics, its timing, and what trackers show."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from symexplin.lab.config import RunConfig
from symexplin.lab.files import JsonLines
from symexplin.lab.trackers import Trackers

__all__ = ["METRICS", "TIMING", "Records"]

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"


class Records:
    """The record of a run, or with `silent` of none: the processes but the first one write nothing.

    Args:
        folder: of the run.
        config: says which trackers.
        step: the run goes on after it.
        lengths: bytes to keep of the files of an earlier life.
        silent: take everything, write nothing.

    Raises:
        ValueError: a file shorter than its length, a tracker that is not installed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Records(Path(folder), RunConfig(""), 0, {}) as records:
    ...     records.update(1, {"loss": 2.0}, tokens=64)
    ...     records.sync()
    {'metrics': 39, 'timing': 0}
    """

    def __init__(
        self, folder: Path, config: RunConfig, step: int, lengths: Mapping[str, int], silent: bool = False
    ) -> None:
        self._silent = silent
        with contextlib.ExitStack() as stack:
            if not silent:
                self._metrics = stack.enter_context(JsonLines(folder / METRICS, lengths.get("metrics", 0)))
                self._timing = stack.enter_context(JsonLines(folder / TIMING, lengths.get("timing", 0)))
                self._trackers = stack.enter_context(Trackers(folder, config, step))
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def update(self, step: int, record: Mapping[str, float], tokens: int) -> None:
        """Write down an update: its record, and the tokens seen so far."""
        if not self._silent:
            self._metrics.write(step=step, **record, tokens=tokens)
            self._trackers.log(step, record)

    def evaluation(self, step: int, loss: float, stats: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Write down an evaluation with its figures, and the pace."""
        if not self._silent:
            self._metrics.write(step=step, eval_loss=loss, **({"stats": stats} if stats else {}))
            self._timing.write(step=step, **timing)
            self._trackers.log(step, {"eval_loss": loss, **stats, **timing})

    def error(self, step: int, text: str) -> None:
        """Write down what ended the run."""
        if not self._silent:
            self._metrics.write(step=step, error=text)

    def sync(self) -> dict[str, int]:
        """Make what was written survive a power cut and return the files' lengths."""
        files = {} if self._silent else {"metrics": self._metrics, "timing": self._timing}
        for file in files.values():
            file.sync()
        return {name: file.length for name, file in files.items()}
