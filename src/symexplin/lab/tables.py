"""Rows as a CSV file and as plain text."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from symexplin.lab.files import replace_file

__all__ = ["format_columns", "write_csv"]


def write_csv(path: str | Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows with the same keys as a CSV file, in one step.

    The first line has the keys. Numbers have seven significant digits, as float32 has. None is an empty cell.
    No rows make an empty file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_csv(Path(folder, "a.csv"), [{"arm": "SEL", "loss": 1 / 3, "error": None}])
    ...     print(Path(folder, "a.csv").read_text(), end="")
    arm,loss,error
    SEL,0.3333333,
    """
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    replace_file(path, text.getvalue())


def _cell(value: object) -> object:
    return f"{value:.7g}" if isinstance(value, float) else value


def format_columns(rows: Sequence[Sequence[str]], left: int = 1, gap: str = "  ") -> str:
    """Return rows of cells as lines of plain text with aligned columns.

    Args:
        rows: of the same length, the head among them.
        left: number of first columns that are aligned left. The others are aligned right, as numbers are.
        gap: between columns.

    >>> print(format_columns([("arm", "loss"), ("AdamW", "1.76")]))
    arm    loss
    AdamW  1.76
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    return "\n".join(
        gap.join(align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)).rstrip()
        for row in rows
    )
