"""What a run records: metrics.jsonl, timing.jsonl, and events for TensorBoard."""

import contextlib
import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

__all__ = ["METRICS", "TIMING", "Recorder"]

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"


class Recorder(contextlib.ExitStack):
    """Writes the record of a run.

    Args:
        folder: of the run; None: write nothing, as in all processes but the first.
        tensorboard: write events, too.
        step: completed steps of a resumed run; later events are dropped.
        lengths: bytes of each file that a resumed run keeps, as :meth:`sync` returned them.

    Raises:
        ValueError: a file that is shorter than its length.
    """

    def __init__(
        self,
        folder: Path | None,
        tensorboard: bool = False,
        step: int = 0,
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self._files: dict[str, FileIO] = {}
        self._events: Any = None
        if folder is None:
            return
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)
            self.callback(self._events.close)
        for name, path in (("metrics", folder / METRICS), ("timing", folder / TIMING)):
            length = lengths[name] if lengths else 0
            file = self._files[name] = self.enter_context(path.open("ab", buffering=0))
            if file.tell() < length:
                size = f"it has {file.tell():,} bytes, and {length:,} were written"
                raise ValueError(f"{str(path)!r} is damaged: {size}; restore it, or start again in another folder")
            file.truncate(length)

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
        for file in self._files.values():
            os.fsync(file.fileno())
        return {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}

    def _write(self, name: str, **record: Any) -> None:
        if not self._files:
            return
        left = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            while left:  # a full disk may take a part of a line
                left = left[self._files[name].write(left) :]
        except OSError as error:
            error.filename = self._files[name].name
            raise

    def _plot(self, step: int, values: Mapping[str, float]) -> None:
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
