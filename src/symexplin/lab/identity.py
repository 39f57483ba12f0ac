"""By which code a run was made: it is in its run.json, and compared before a run or a comparison goes on.

A run of the laboratory is made by this package alone; a run of a command also by the files that its words name, in the
folder where it is executed.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from symexplin.lab.files import file_digest
from symexplin.lab.provenance import provenance

__all__ = ["changes", "mixed", "of_command", "of_package", "source"]

_PACKAGE = Path(__file__).parents[1]
_CODE = (".py", ".c", ".toml")
_LARGE = 2**26  # bytes; a larger file, such as one of data, is known by its size and time


@functools.cache
def source() -> str:
    """Return the digest of this package's code."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _PACKAGE.rglob("*") if path.suffix in _CODE):
        digest.update(f"{path.relative_to(_PACKAGE)} {file_digest(path)}\n".encode())
    return digest.hexdigest()


@functools.cache
def of_package() -> dict[str, Any]:
    """Return the digest of this package's code, and its origin."""
    return {"source": source(), "provenance": provenance()}


def of_command(words: Sequence[str], folder: Path, out: Path) -> dict[str, Any]:
    """Return the identity of a run of a command that is executed in `folder` and writes to `out`."""
    paths = {word: folder / word for word in words}
    files = {word: _digest(path) for word, path in paths.items() if path.is_file() and out not in path.parents}
    return {"command": list(words), "folder": str(folder), "files": files, **of_package()}


def _digest(path: Path) -> str:
    about = path.stat()
    return f"{about.st_size} bytes, {about.st_mtime_ns}" if about.st_size > _LARGE else file_digest(path)


def changes(saved: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return in words what code differs between two runs, or between a run and its repetition.

    >>> changes({"source": "a", "files": {"train.py": "1"}}, {"source": "a", "files": {"train.py": "2"}})
    ['train.py']
    """
    before, now = saved.get("files", {}), new.get("files", {})
    changed = [name for name, digest in before.items() if now.get(name, digest) != digest]
    if saved.get("folder") != new.get("folder"):
        changed.append(f"the folder ({saved.get('folder')})")
    if saved.get("source") != new.get("source"):
        was, is_now = (str(of.get("provenance", {}).get("commit"))[:12] for of in (saved, new))
        changed.append("symexplin" if was == is_now else f"symexplin (from commit {was} to {is_now})")
    return changed


def mixed(changed: Sequence[str], runs: Sequence[str], out: str | Path) -> ValueError:
    """Return the error that runs in a folder were made by other code."""
    others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return ValueError(
        f"out must be a new folder for other code, got {str(out)!r}: since {runs[0]}{others} began, "
        f"{' and '.join(changed)} changed; --mix-code goes on all the same"
    )
