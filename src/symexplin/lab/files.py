"""Files that are replaced in one step: JSON, JSON lines and CSV; and rows as plain text."""

import contextlib
import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    *("file_digest", "format_columns", "read_json", "read_json_lines"),
    *("replace_file", "replacing", "write_csv", "write_json"),
]


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary name for a file, which is renamed to `path` at the end. After an error the old file stays."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(path)  # a full disk names no file
        raise


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Write a file in one step (:func:`replacing`)."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(path: Path, why: str) -> ValueError:
    """Return the error that a file of a folder is damaged, with what to do."""
    return ValueError(f"{str(path)!r} is damaged: {why}; restore it, or start again in another folder")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file with a JSON object per line, without an incomplete last line."""
    complete, _, _ = path.read_bytes().rpartition(b"\n")
    records = []
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise _damaged(path, f"line {number} is not JSON: {error}") from None
    return records


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or raise ValueError."""
    try:
        table = json.loads(path.read_bytes())
    except ValueError:
        table = None
    if not isinstance(table, dict):
        raise _damaged(path, "it is not a JSON object")
    return table


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write an object as indented JSON in one step."""
    replace_file(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


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


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines of plain text: the first column aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.ljust] + [str.rjust] * (len(widths) - 1)
    return "\n".join(
        "  ".join(align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)).rstrip()
        for row in rows
    )
