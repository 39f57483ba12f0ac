"""The system's C compiler, used once a machine: a private cache of compiled libraries."""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Compiler", "cache_folder", "find_compiler", "load_library"]

_log = logging.getLogger("symexplin")

# No -ffast-math: NaN, infinities and signed zeros must come through, and every sum keeps its order. No contraction:
# kernels that share a formula must give the same bits.
_FLAGS = (
    *("-O3", "-std=c11", "-fPIC", "-shared", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_TARGETS: tuple[tuple[str, ...], ...] = (("-march=native",), ())  # some compilers for ARM lack the first
_SECONDS = 120.0


class Compiler(NamedTuple):
    """A C compiler that runs: how to call it, its name and version, its flags and the macros it predefines here."""

    command: tuple[str, ...]
    name: str
    flags: tuple[str, ...]
    macros: str  # names its version and every feature of this CPU that it will use


@functools.cache
def find_compiler() -> Compiler | None:
    """Return the first of $CC, cc, gcc and clang that runs, or None.

    >>> compiler = find_compiler()
    >>> compiler is None or compiler.name.split()[0] in ("gcc", "clang")
    True
    """
    if os.name == "nt":
        return None
    for choice in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        for target in _TARGETS if choice else ():
            with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
                command = shlex.split(choice)
                macros = _run([*command, *target, "-dM", "-E", "-x", "c", os.devnull])
                return Compiler(tuple(command), _name(macros), (*_FLAGS, *target), macros)
        if choice == os.environ.get("CC"):
            _log.info("CC=%s does not run as a C compiler: others are tried", choice)
    return None


def _run(command: Sequence[str]) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL, check=True
    ).stdout


def _name(macros: str) -> str:
    defined = dict(line.split(" ", 2)[1:] for line in macros.splitlines() if line.count(" ") >= 2)
    parts = ("__clang_major__", "__clang_minor__", "__clang_patchlevel__")
    if "__clang__" not in defined:
        parts = ("__GNUC__", "__GNUC_MINOR__", "__GNUC_PATCHLEVEL__")
    version = ".".join(defined.get(part, "?") for part in parts)
    return f"{'clang' if '__clang__' in defined else 'gcc'} {version}"


def cache_folder() -> Path:
    """Return where compiled libraries stay: $XDG_CACHE_HOME/symexplin, else ~/.cache/symexplin."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "symexplin"


def load_library(source: Path, defines: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Return a C file compiled for this very machine and loaded, or None, with the reason in the log.

    The library is kept under a name that tells source (with the headers beside it), compiler, flags and CPU apart. One
    that another user could have written is not loaded.
    """
    compiler = find_compiler()
    if compiler is None:
        _log.info("no C compiler found: the readable formulas are used on the CPU")
        return None
    flags = (*compiler.flags, *defines)
    digest = hashlib.sha256("\0".join((*compiler.command, *flags, compiler.macros)).encode())
    for file in sorted(source.parent.glob("*.[ch]")):
        digest.update(file.read_bytes())
    name = f"{source.stem}-{digest.hexdigest()[:32]}.so"
    try:
        try:
            return _load_kept(cache_folder(), name, compiler, flags, source)
        except (OSError, RuntimeError):  # RuntimeError: there is no home
            with tempfile.TemporaryDirectory(prefix="symexplin-") as folder:
                return _load_kept(Path(folder), name, compiler, flags, source)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or "").strip() or f"exit status {error.returncode}"
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        reason = str(error)
    _log.info("%s failed, so the readable formulas are used on the CPU: %s", compiler.name, reason)
    return None


def _load_kept(folder: Path, name: str, compiler: Compiler, flags: Sequence[str], source: Path) -> ctypes.CDLL:
    """Load a library from a folder, compiled before or now; OSError: the folder cannot be used."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)
    library = folder / name
    if library.exists():
        with contextlib.suppress(OSError):
            _check_private(library)
            return ctypes.CDLL(str(library))
    handle, draft = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        _run([*compiler.command, *flags, "-o", draft, str(source), "-lm"])
        with Path(draft).open("rb") as file:
            os.fsync(file.fileno())
        # Two processes may be at it: each puts a whole file in place.
        Path(draft).replace(library)
    finally:
        Path(draft).unlink(missing_ok=True)
    return ctypes.CDLL(str(library))


def _check_private(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(f"{path} can be written by another user")
