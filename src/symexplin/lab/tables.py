"""Rows as a CSV file and as plain text."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from symexplin.lab.files import replace_file

__all__ = ["format_columns", "write_csv"]


def write_csv(path: str | Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows with the same keys as a CSV file, in one step.

    Numbers have seven significant digits, as float32 has. None is an empty cell. No rows make an empty file.
    """
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{v:.7g}" if isinstance(v, float) else v for key, v in row.items()})
    replace_file(path, text.getvalue())


def format_columns(rows: Sequence[Sequence[str]], left: int = 1, gap: str = "  ") -> str:
    """Return rows of cells as lines of plain text: the first `left` columns aligned left, numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    return "\n".join(
        gap.join(align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)).rstrip()
        for row in rows
    )
