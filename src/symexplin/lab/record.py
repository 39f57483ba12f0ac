"""What a run records: metrics.jsonl, timing.jsonl, and events for TensorBoard."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from symexplin.lab.files import JsonLines

__all__ = ["METRICS", "TIMING", "Recorder"]

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"


class Recorder(contextlib.ExitStack):
    """Writes the record of a run.

    Args:
        folder: of the run; None: write nothing, as in all processes but the first.
        tensorboard: write events, too.
        step: completed steps of a resumed run; later events are dropped.
        lengths: bytes of each file that a resumed run keeps.

    Raises:
        ValueError: a file that is shorter than its length, no TensorBoard.
    """

    def __init__(
        self,
        folder: Path | None,
        tensorboard: bool = False,
        step: int = 0,
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self._files: dict[str, JsonLines] = {}
        self._events: Any = None
        if folder is None:
            return
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError(f"pip install tensorboard, or add --no-tensorboard: {error}") from None
            self._events = SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)
            self.callback(self._events.close)
        kept = lengths or {}
        for name, file in (("metrics", METRICS), ("timing", TIMING)):
            lines = JsonLines(folder / file, kept.get(name, 0))
            self._files[name] = self.enter_context(lines)

    def update(self, step: int, record: Mapping[str, float], tokens: int) -> None:
        """Record an update, and the number of tokens so far."""
        self._write("metrics", step=step, **record, tokens=tokens)
        self._plot(step, record)

    def evaluation(self, step: int, loss: float, stats: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Record the loss of an evaluation, the statistics of the map, and the time."""
        self._write("metrics", step=step, eval_loss=loss, **({"stats": stats} if stats else {}))
        self._write("timing", step=step, **timing)
        self._plot(step, {"eval_loss": loss, **stats, **timing})

    def error(self, step: int, text: str) -> None:
        """Record the error that ended the run."""
        self._write("metrics", step=step, error=text)

    def sync(self) -> dict[str, int]:
        """Flush the files to the disk; return their lengths in bytes."""
        return {name: file.sync() for name, file in self._files.items()}

    def _write(self, name: str, **record: Any) -> None:
        if self._files:
            self._files[name].write(**record)

    def _plot(self, step: int, values: Mapping[str, float]) -> None:
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
