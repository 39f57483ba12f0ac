"""What a run is, and whether another one is the same: nothing else asks.

run.json in a run's folder has its identity: the configuration and the digest of the data, or the words of a command,
the folder where it is executed and the digests of the files that the words name; and the code of this package.
"""

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from symexplin.lab.files import file_digest, read_json, write_json
from symexplin.lab.folders import FACTS
from symexplin.lab.provenance import provenance
from symexplin.lab.settings import differences

__all__ = [
    *("Changes", "changes", "check_config", "check_run", "config_hash", "mixed", "of_command", "of_config"),
    "of_package",
]

_PACKAGE = Path(__file__).parents[1]
_CODE = (".py", ".c", ".toml")
_LARGE = 2**26  # bytes; a larger file, such as one of data, is known by its size and time
# Keys of a configuration that may differ: the data's path (their digest counts) and logging. Those of the machine
# change the rounding alone.
_FREE, _MACHINE = ("data", "log"), "compute"
_OUT = "{out}"

Facts = Mapping[str, Any]


@functools.cache
def of_package() -> dict[str, Any]:
    """Return the digest of this package's code, and its origin."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _PACKAGE.rglob("*") if path.suffix in _CODE):
        digest.update(f"{path.relative_to(_PACKAGE)} {file_digest(path)}\n".encode())
    return {"source": digest.hexdigest(), "provenance": provenance()}


def of_config(config: Facts, data: str) -> dict[str, Any]:
    """Return the identity of a run of the laboratory, by its whole configuration and the digest of its data."""
    return {"config": config, "data": data, **of_package()}


def of_command(words: Sequence[str], folder: Path, out: Path) -> dict[str, Any]:
    """Return the identity of a run of a command that is executed in `folder` and writes to `out`."""
    paths = {word: folder / word for word in words}
    files = {word: _digest(path) for word, path in paths.items() if _is_file(path) and out not in path.parents}
    command = [word.replace(str(out), _OUT) for word in words]
    return {"command": command, "folder": str(folder), "files": files, **of_package()}


def _is_file(path: Path) -> bool:
    with contextlib.suppress(OSError):  # a word may be longer than any name of a file
        return path.is_file()
    return False


def _digest(path: Path) -> str:
    about = path.stat()
    return f"{about.st_size} bytes, {about.st_mtime_ns}" if about.st_size > _LARGE else file_digest(path)


class Changes(NamedTuple):
    """In words, what makes two identities another run, what changes the rounding alone, and what code differs."""

    run: list[str]
    machine: list[str]
    code: list[str]


def changes(saved: Facts, new: Facts) -> Changes:
    """Return what differs between two runs, or between a run and its repetition.

    >>> changes({"source": "a", "files": {"train.py": "1"}}, {"source": "a", "files": {"train.py": "2"}})
    Changes(run=[], machine=[], code=['train.py'])
    """
    run, machine = _of_configs(saved.get("config", {}), new.get("config", {}))
    if saved.get("command") != new.get("command"):
        before, now = (" ".join(of.get("command", [])) for of in (saved, new))
        run.append(f"command was {before!r}, is {now!r} now")
    if saved.get("data") != new.get("data"):
        run.append("data had other tokens")
    processes = [of.get("provenance", {}).get("processes", 1) for of in (saved, new)]
    if processes[0] != processes[1]:
        machine.append(f"processes were {processes[0]}, are {processes[1]} now")
    before, now = saved.get("files", {}), new.get("files", {})
    code = [name for name, digest in before.items() if now.get(name, digest) != digest]
    if saved.get("folder") != new.get("folder"):
        code.append(f"the folder ({saved.get('folder')})")
    if saved.get("source") != new.get("source"):
        was, is_now = (str(of.get("provenance", {}).get("commit"))[:12] for of in (saved, new))
        code.append("symexplin" if was == is_now else f"symexplin (from commit {was} to {is_now})")
    return Changes(run, machine, code)


def _of_configs(saved: Facts, new: Facts) -> tuple[list[str], list[str]]:
    run: list[str] = []
    machine: list[str] = []
    for key, (old, now) in differences(saved, new).items():
        table = key.partition(".")[0]
        if table not in _FREE:
            (machine if table == _MACHINE else run).append(f"{key} was {old!r}, is {now!r} now")
    return run, machine


def check_run(folder: Path, saved: Facts, new: Facts) -> Changes:
    """Return :func:`changes` of the run in a folder; raise ValueError if it is another run."""
    found = changes(saved, new)
    _refuse(folder, "run", found.run)
    return found


def check_config(folder: Path, kind: str, saved: Facts, new: Facts) -> None:
    """Raise ValueError unless what a folder has, such as "a dataset", was made with the same settings."""
    _refuse(folder, kind, _of_configs(saved, new)[0])


def _refuse(folder: Path, kind: str, changed: Sequence[str]) -> None:
    if changed:
        there = f"{str(folder)!r} with a {kind} whose {'; '.join(changed)}"
        raise ValueError(f"out must be a new folder for another configuration, got {there}")


def config_hash(config: Facts) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a run's configuration, without what may differ."""
    kept = {key: value for key, value in config.items() if key not in _FREE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def mixed(changed: Sequence[str], runs: Sequence[str], out: str | Path) -> ValueError:
    """Return the error that runs in a folder were made by other code."""
    others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return ValueError(
        f"out must be a new folder for other code, got {str(out)!r}: since {runs[0]}{others} began, "
        f"{' and '.join(changed)} changed; --mix-code goes on all the same"
    )


def _again(folder: Path) -> None:
    """Write the identity of the command's run in a folder anew, as its job begins."""
    facts = read_json(folder / FACTS)
    words = [word.replace(_OUT, str(folder)) for word in facts["command"]]
    write_json(folder / FACTS, of_command(words, Path(facts["folder"]), folder))


if __name__ == "__main__":
    _again(Path(sys.argv[1]).resolve())
