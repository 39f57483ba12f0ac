"""Compile a C file with the system's compiler, and cache the library privately."""

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Compiler", "cache_folder", "compile_library", "find_compiler", "load_library"]

# Never -ffast-math, -Ofast or -funsafe-math-optimizations: a library linked so makes the whole process flush denormals.
# OpenMP only for `#pragma omp simd`: torch has its own runtime.
_FLAGS = (
    *("-O3", "-std=c11", "-fPIC", "-shared", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp-simd"),
)
_WIDE = "-mprefer-vector-width=512"  # only compilers for x86 know it
_TARGET = "SYMEXPLIN_CPU_TARGET"  # a processor for -march, such as haswell or x86-64-v2; default: this machine's
_SECONDS, _PROBE_SECONDS = 120.0, 20.0  # time limits to compile and to print macros


class Compiler(NamedTuple):
    """A working C compiler: its command, name with version, flags and predefined macros."""

    command: tuple[str, ...]
    name: str
    flags: tuple[str, ...]
    macros: str  # contain its version and every processor feature that it will use


def find_compiler() -> Compiler | None:
    """Return the first of $CC, cc, gcc and clang that runs, or None.

    It compiles for this machine, or for the processor in SYMEXPLIN_CPU_TARGET.

    >>> compiler = find_compiler()
    >>> compiler is None or compiler.name.split()[0] in ("gcc", "clang")
    True
    """
    return _find(os.environ.get("CC", ""), os.environ.get(_TARGET, ""))


@functools.cache
def _find(chosen: str, target: str) -> Compiler | None:
    if os.name == "nt":
        return None
    march = f"-march={target or 'native'}"
    # Some compilers for ARM lack -march=native; a processor that was named must be known.
    targets = ((march, _WIDE), (march,), *(() if target else ((),)))
    for choice in filter(None, (chosen, "cc", "gcc", "clang")):
        for flags in targets:
            with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
                command = shlex.split(choice)
                macros = _run([*command, *flags, "-dM", "-E", "-x", "c", os.devnull], _PROBE_SECONDS)
                return Compiler(tuple(command), _name(macros), (*_FLAGS, *flags), macros)
    return None


def _run(command: Sequence[str], seconds: float) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL, check=True
    ).stdout


def _name(macros: str) -> str:
    defined = dict(line.split(" ", 2)[1:] for line in macros.splitlines() if line.count(" ") >= 2)
    kind, version = ("clang", "__clang_major__") if "__clang__" in defined else ("gcc", "__GNUC__")
    wide = next((label for macro, label in _VECTORS.items() if macro in defined), "SSE2")
    return f"{kind} {defined[version]}, {wide}"


_VECTORS = {"__AVX512F__": "AVX-512", "__AVX2__": "AVX2", "__aarch64__": "NEON"}


def cache_folder() -> Path:
    """Return the folder of compiled libraries: $XDG_CACHE_HOME/symexplin, else ~/.cache/symexplin."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "symexplin"


def load_library(source: Path) -> tuple[ctypes.CDLL, str] | str:
    """Return a compiled and loaded C file with the compiler's name, or the reason for a failure.

    The library's name is a hash of source, compiler, flags and processor. A library that another user can write is not
    loaded. One process compiles while others wait.
    """
    compiler = find_compiler()
    if compiler is None:
        target = os.environ.get(_TARGET)
        return f"no C compiler found that knows {_TARGET}={target}" if target else "no C compiler found"
    key = "\0".join((*compiler.command, *compiler.flags, compiler.macros, source.read_text()))
    name = f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    try:
        try:
            return _load_kept(cache_folder(), name, compiler, source), compiler.name
        except (OSError, RuntimeError):  # RuntimeError: no home folder
            with tempfile.TemporaryDirectory(prefix="symexplin-") as folder:
                return _load_kept(Path(folder), name, compiler, source), compiler.name
    except subprocess.CalledProcessError as error:
        return f"{compiler.name} failed: {(error.stderr or '').strip() or f'exit status {error.returncode}'}"
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return f"{compiler.name} failed: {error}"


def _load_kept(folder: Path, name: str, compiler: Compiler, source: Path) -> ctypes.CDLL:
    """Load a library from a folder after compiling it if necessary; OSError if the folder cannot be used."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)
    library = folder / name
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(library))
    with _alone(folder / f"{name}.lock"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(library))  # if another process has compiled it in the meantime
        draft = folder / f"{name}.draft"  # the lock is held: an existing draft is of a killed process
        try:
            compile_library(compiler, source, draft)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(library)
        finally:
            draft.unlink(missing_ok=True)
    return ctypes.CDLL(str(library))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the system releases it when a process ends."""
    import fcntl  # not on Windows, where nothing is compiled

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_library(compiler: Compiler, source: Path, library: Path) -> None:
    """Compile a C file to a shared library."""
    _run([*compiler.command, *compiler.flags, "-o", str(library), str(source), "-lm"], _SECONDS)


def _check_private(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(f"{path} can be written by another user")
