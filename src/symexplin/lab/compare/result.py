"""What a run says of its result, in result.json."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from symexplin.lab.compare.comparison import Run
from symexplin.lab.compare.grid import Cell
from symexplin.lab.compare.launch import EXAMPLE, process_file
from symexplin.lab.files import read_json
from symexplin.lab.folders import RESULT

__all__ = ["read_run"]

_SHOWN = 80  # characters of a curve that is wrong
_LARGEST = 3.4e38  # of a loss, as in float32: a larger one has diverged
# Keys with a meaning, those of the laboratory's runs among them; other numbers are a user's own.
_KNOWN = ("loss", "curve", "seconds", "tokens_per_second", "error", "step", "steps", "parameters", "sha256")


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
        run = _run(path.read_bytes(), cell)
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} must be like {EXAMPLE} (the curve is optional), but {error}: correct it, or delete it to "
            "run again; then --resume"
        ) from None
    record = process_file(folder, ".json")
    if run.seconds is None and record.exists():
        run = dataclasses.replace(run, seconds=read_json(record).get("seconds"))
    return run


def _run(content: bytes, cell: Cell) -> Run:
    """Return a run with the content of its result.json; a ValueError speaks of it in the words of JSON."""
    try:
        result: Any = json.loads(content, parse_int=float)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(result, dict):
        raise ValueError("it is not an object")
    ended_early = result.get("error")
    if not ended_early and "loss" not in result:
        raise ValueError('it has no "loss"')
    loss = math.nan if ended_early else _number('"loss"', result["loss"])
    table, beyond = _curve(result), ", beyond float32" if math.isfinite(loss) else ""
    if is_finite := abs(loss) <= _LARGEST:
        last, *_ = table[-1:] or [(0.0, loss)]
        table = [*table[:-1], (last[0], loss, *last[2:])]
    table = [row for row in table if abs(row[1]) <= _LARGEST]
    return Run(
        *cell,
        curve=tuple((int(row[0]), row[1]) for row in table),
        seconds=_positive("seconds", result),
        tokens_per_second=_positive("tokens_per_second", result),
        error=None if is_finite else str(ended_early or f"loss is {loss}{beyond}"),
        by_time=tuple((row[2], row[1]) for row in table if len(row) == 3),
        extra={key: x for key, x in result.items() if key not in _KNOWN and isinstance(x, float) and math.isfinite(x)},
    )


def _curve(result: Mapping[str, Any]) -> list[tuple[float, ...]]:
    """Return the rows of "curve": a step, a loss and perhaps the seconds."""
    try:
        table = [tuple(_number("curve", number) for number in row) for row in result.get("curve", [])]
        widths = {len(row) for row in table}
    except (TypeError, ValueError):
        widths = {0}
    if widths not in (set(), {2}, {3}):
        wrong = f'"curve" is {json.dumps(result["curve"])[:_SHOWN]}'
        raise ValueError(f"{wrong}, not a list of [step, loss] or of [step, loss, seconds]")
    steps, times = [row[0] for row in table], [row[2] for row in table if len(row) == 3]
    if steps != sorted(set(steps)) or any(step < 0 or step % 1 for step in steps):
        raise ValueError('the steps of "curve" are not whole numbers that increase from 0')
    if times != sorted(times) or any(not 0 <= time < math.inf for time in times):
        raise ValueError('the seconds of "curve" do not increase from 0')
    return table


def _positive(key: str, result: Mapping[str, Any]) -> float | None:
    if result.get(key) is None:
        return None
    number = _number(f'"{key}"', result[key])
    if not 0 <= number < math.inf:
        raise ValueError(f'"{key}" is {json.dumps(number)}, not a finite number of at least 0')
    return number


def _number(name: str, value: object) -> float:
    if not isinstance(value, float):  # whole numbers were read as floats
        raise ValueError(f"{name} is {json.dumps(value)}, not a number")
    return value
