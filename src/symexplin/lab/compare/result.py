"""What a run says of its result, in result.json."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symexplin.lab.compare.comparison import Run
from symexplin.lab.compare.grid import Cell
from symexplin.lab.compare.launch import EXAMPLE, process_file
from symexplin.lab.files import read_json
from symexplin.lab.folders import RESULT
from symexplin.lab.settings import NotNegative, Schema, from_table

__all__ = ["read_run"]

_LARGEST = 3.4028235e38
_OF_THE_LABORATORY = ("step", "steps", "parameters", "sha256")  # further keys of its runs, not to show


@dataclass(frozen=True)
class _Result(Schema):
    """The keys of result.json that have a meaning; other numbers are a user's own."""

    loss: float | None = None
    curve: tuple[tuple[float, ...], ...] = ()
    seconds: NotNegative | None = None
    tokens_per_second: NotNegative | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        """Check the keys, and the order of the rows."""
        super().__post_init__()
        if self.loss is None and not self.error:
            raise ValueError("loss must be given")
        if {len(row) for row in self.curve} not in (set(), {2}, {3}):
            raise ValueError("curve must be a list of [step, loss] or of [step, loss, seconds]")
        steps, times = [row[0] for row in self.curve], [row[2] for row in self.curve if len(row) == 3]
        if steps != sorted(set(steps)) or any(step < 0 or step % 1 for step in steps):
            raise ValueError("curve must have steps that are whole numbers and increase from 0")
        if times != sorted(times) or any(not 0 <= time < math.inf for time in times):
            raise ValueError("curve must have seconds that increase from 0")


def read_run(folder: Path, cell: Cell) -> Run:
    """Return the result of a run that has written its result.json.

    That is {"loss": number}, and optionally "curve": [[step, loss], ...] or [[step, loss, seconds], ...], whose last
    loss it replaces, "seconds", "tokens_per_second" and "error": why the run ended early. Other numbers are shown. A
    loss that is NaN or infinite means that it diverged.

    Raises:
        ValueError: anything else.
    """
    path = folder / RESULT
    try:
        run = _run(json.loads(path.read_bytes(), parse_int=float), cell)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{str(path)!r} must be like {EXAMPLE} (the curve is optional), but {error}: correct it, or delete it to "
            "run again; then --resume"
        ) from None
    record = process_file(folder, ".json")
    if run.seconds is None and record.exists():
        run = dataclasses.replace(run, seconds=read_json(record).get("seconds"))
    return run


def _run(table: Any, cell: Cell) -> Run:
    if not isinstance(table, dict):
        raise ValueError("it is not an object")
    known = {field.name for field in dataclasses.fields(_Result)}
    result = from_table(_Result, {key: value for key, value in table.items() if key in known})
    loss, curve = math.nan if result.loss is None or result.error else result.loss, list(result.curve)
    if _is_finite(loss):
        step, _, *seconds = curve.pop() if curve else (0.0, loss)
        curve.append((step, loss, *seconds))
    curve = [row for row in curve if _is_finite(row[1])]
    numbers = {key: x for key, x in table.items() if key not in known and key not in _OF_THE_LABORATORY}
    return Run(
        *cell,
        curve=tuple((int(row[0]), row[1]) for row in curve),
        seconds=result.seconds,
        tokens_per_second=result.tokens_per_second,
        error=None if _is_finite(loss) else result.error or f"loss is {loss}",
        by_time=tuple((row[2], row[1]) for row in curve if len(row) == 3),
        extra={key: x for key, x in numbers.items() if isinstance(x, float) and _is_finite(x)},
    )


def _is_finite(x: float) -> bool:
    """Whether a number is finite in float32: a larger loss has diverged."""
    return abs(x) <= _LARGEST
