"""TensorBoard and Weights & Biases: a run's numbers for those who watch it."""

import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from symexplin.lab.config import RunConfig
from symexplin.lab.settings import to_table

__all__ = ["Trackers"]


class Trackers:
    """The trackers that a configuration asks for; metrics.jsonl stays the record.

    Args:
        folder: of the run; its name is the run's name there.
        config: `log` says which trackers.
        step: the run goes on after it: later events of an earlier life are dropped.

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
            # The same run when it resumes, another one for a folder of the same name elsewhere.
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
