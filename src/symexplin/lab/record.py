"""What a run records: metrics.jsonl, timing.jsonl, and events for TensorBoard and Weights & Biases."""

import contextlib
import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from symexplin.lab.config import RunConfig
from symexplin.lab.files import JsonLines
from symexplin.lab.settings import to_table

__all__ = ["METRICS", "TIMING", "Recorder", "Trackers"]

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"


class Recorder:
    """Writes the record of a run; with `silent` it writes nothing, as in all processes but the first.

    Args:
        folder: of the run.
        config: says which trackers are used.
        step: completed steps of a resumed run.
        lengths: bytes of each file that a resumed run keeps.
        silent: write nothing.

    Raises:
        ValueError: a file that is shorter than its length, a tracker that is not installed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Recorder(Path(folder), RunConfig(""), 0, {}) as recorder:
    ...     recorder.update(1, {"loss": 2.0}, tokens=64)
    ...     recorder.sync()
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
        """Record an update, and the number of tokens so far."""
        if not self._silent:
            self._metrics.write(step=step, **record, tokens=tokens)
            self._trackers.log(step, record)

    def evaluation(self, step: int, loss: float, stats: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Record an evaluation, the statistics of the map, and the time."""
        if not self._silent:
            self._metrics.write(step=step, eval_loss=loss, **({"stats": stats} if stats else {}))
            self._timing.write(step=step, **timing)
            self._trackers.log(step, {"eval_loss": loss, **stats, **timing})

    def error(self, step: int, text: str) -> None:
        """Record the error that ended the run."""
        if not self._silent:
            self._metrics.write(step=step, error=text)

    def sync(self) -> dict[str, int]:
        """Flush the files to the disk; return their lengths in bytes."""
        files = {} if self._silent else {"metrics": self._metrics, "timing": self._timing}
        for file in files.values():
            file.sync()
        return {name: file.length for name, file in files.items()}


class Trackers:
    """Sends numbers to the trackers that the configuration names.

    Args:
        folder: of the run; its name is the run's name in the tracker.
        config: `log` says which trackers are used.
        step: completed steps of a resumed run: later events are dropped.

    Raises:
        ValueError: a tracker that is not installed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Trackers(Path(folder), RunConfig("data"), 0) as trackers:
    ...     trackers.log(1, {"loss": 2.0})
    """

    def __init__(self, folder: Path, config: RunConfig, step: int) -> None:
        self._tensorboard: Any = None
        self._wandb: Any = None
        if config.log.tensorboard:
            module = _module("torch.utils.tensorboard", "tensorboard", "--no-tensorboard")
            self._tensorboard = module.SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)
        if config.log.wandb is not None:
            module = _module("wandb", "wandb", "leave out wandb")
            table, place = to_table(config), folder.resolve()
            # One id per folder: a resumed run continues its record.
            identity = hashlib.sha256(str(place).encode()).hexdigest()[:16]
            self._wandb = module.init(
                project=config.log.wandb, id=identity, name=place.name, dir=folder, resume="allow", config=table
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if kind is None else 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers at a step."""
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)


def _module(name: str, package: str, otherwise: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{package} is not installed: pip install {package}, or {otherwise} ({error})") from None
