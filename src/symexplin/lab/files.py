"""Files that are either the old ones or the new ones, whole."""

import os
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Write `content` beside `path` and move it there in one step, so that no reader finds half a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_file(Path(folder, "a.txt"), "whole")
    ...     [(p.name, p.read_text()) for p in Path(folder).iterdir()]
    [('a.txt', 'whole')]
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
