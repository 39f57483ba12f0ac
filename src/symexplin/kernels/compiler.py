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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

__all__ = ["Compiler", "cache_folder", "compile_library", "find_compiler", "load_library"]

T = TypeVar("T")

# Never -ffast-math, -Ofast or -funsafe-math-optimizations: a library linked so makes the whole process flush denormals.
# OpenMP only for `#pragma omp simd`: torch has its own runtime.
_FLAGS = (
    *("-O3", "-std=c11", "-fPIC", "-shared", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp-simd"),
)
_WIDE = "-mprefer-vector-width=512"  # only compilers for x86 know it
_TARGET = "SYMEXPLIN_CPU_TARGET"  # a processor for -march, such as haswell or x86-64-v2; default: this machine's
_SECONDS, _PROBE_SECONDS = 60.0, 20.0  # time limits to compile and to print macros
_VECTORS = {"__AVX512F__": "AVX-512", "__AVX2__": "AVX2", "__aarch64__": "NEON"}
# Instructions that compilers choose on their own, as Linux names them; the macros have the same names.
_EXTENSIONS = (
    *("ssse3", "sse4_1", "sse4_2", "sse4a", "popcnt", "movbe", "avx", "f16c", "fma", "fma4", "xop", "tbm", "avx2"),
    *("bmi2", "adx", "avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"),
)


class Compiler(NamedTuple):
    """A working C compiler: its command, name with version, flags and predefined macros."""

    command: tuple[str, ...]
    name: str
    flags: tuple[str, ...]
    macros: str  # contain its version and every processor feature that it will use


def find_compiler() -> Compiler | None:
    """Return the first of $CC, cc, gcc and clang that works, or None.

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
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            return _probe(tuple(shlex.split(choice)), targets)
    return None


def _probe(command: tuple[str, ...], targets: Sequence[tuple[str, ...]]) -> Compiler:
    """Return the compiler with the first flags that it knows; ValueError if it is none."""
    for flags in targets:
        with contextlib.suppress(subprocess.CalledProcessError):
            macros = _run([*command, *flags, "-dM", "-E", "-x", "c", os.devnull], _PROBE_SECONDS)
            return Compiler(command, _name(macros), (*_FLAGS, *flags), macros)
    raise ValueError(f"{shlex.join(command)} does not work")


def _run(command: Sequence[str], seconds: float, **environment: str) -> str:
    return subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        errors="replace",  # compilers write in the encoding of the locale
        timeout=seconds,
        stdin=subprocess.DEVNULL,
        check=True,
        env=os.environ | environment,
    ).stdout


def _name(macros: str) -> str:
    defined = dict(line.split(" ", 2)[1:] for line in macros.splitlines() if line.count(" ") >= 2)
    kind, version = ("clang", "__clang_major__") if "__clang__" in defined else ("gcc", "__GNUC__")
    if version not in defined:
        raise ValueError(f"macros must contain {version}, got {macros[:80]!r}")
    wide = next((label for macro, label in _VECTORS.items() if macro in defined), "SSE2")
    return f"{kind} {defined[version]}, {wide}"


def cache_folder() -> Path:
    """Return the folder of compiled libraries: $XDG_CACHE_HOME/symexplin, else ~/.cache/symexplin."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "symexplin"


def load_library(source: Path, use: Callable[[ctypes.CDLL, str], T]) -> T:
    """Return what `use` returns for a compiled and loaded C file and its compiler's name.

    A library that `use` accepts stays in the cache. Its name has a hash of source, compiler, flags and processor, and
    one of its content: what was cut short there is not loaded, and neither is what another user can write. Processes
    do not wait for each other: each one compiles in a new folder and moves the library into its place.

    Raises:
        RuntimeError: there is no compiler for this processor, or it fails. Exceptions of `use` pass through.
    """
    compiler = _compiler_for_this_processor()
    key = "\0".join((*compiler.command, *compiler.flags, compiler.macros)).encode(errors="surrogateescape")
    stem = f"{source.stem}-{_digest(key + source.read_bytes())}"
    with contextlib.suppress(Exception):  # whatever is wrong with a library in the cache, compile it again
        return use(_open_cached(stem), compiler.name)
    for is_kept in (True, False):  # in a temporary folder where the cache cannot be used or its disk is full
        try:
            parent = _private_folder() if is_kept else None
            with tempfile.TemporaryDirectory(prefix="symexplin-", dir=parent, ignore_cleanup_errors=True) as folder:
                draft = Path(folder) / f"{stem}.so"
                compile_library(compiler, source, draft)
                content = draft.read_bytes()
                if not _is_whole(content):
                    raise OSError(f"{draft} is cut short")
                result = use(ctypes.CDLL(str(draft)), compiler.name)
                if parent is not None:
                    with contextlib.suppress(OSError):
                        draft.replace(parent / f"{stem}-{_digest(content)}.so")
                return result
        except (OSError, subprocess.SubprocessError) as error:
            failure = error
    output = failure.stderr if isinstance(failure, subprocess.CalledProcessError) else None
    raise RuntimeError(f"{shlex.join(compiler.command)} failed: {output or failure}")


def _compiler_for_this_processor() -> Compiler:
    compiler, target = find_compiler(), os.environ.get(_TARGET)
    if compiler is None:
        raise RuntimeError(f"no C compiler found that knows {_TARGET}={target}" if target else "no C compiler found")
    if target and (lacking := _lacking(compiler.macros)):
        raise RuntimeError(f"this processor lacks {', '.join(lacking)} of {_TARGET}={target}")
    return compiler


def _lacking(macros: str) -> list[str]:
    """Return the instructions that compiled code may use and this processor lacks, as far as that is known."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        if flags := next((line.split() for line in file if line.startswith("flags")), None):
            return [name for name in _EXTENSIONS if name not in flags and f" __{name.upper()}__ " in macros]
    return []


def _open_cached(stem: str) -> ctypes.CDLL:
    """Return a complete library from the cache."""
    for library in _private_folder().glob(f"{stem}-*.so"):
        if library.stem == f"{stem}-{_digest(library.read_bytes())}":
            return ctypes.CDLL(str(library))
    raise FileNotFoundError(stem)


def _private_folder() -> Path:
    """Return the cache's folder, which is created if necessary; OSError if another user can write it."""
    try:
        folder = cache_folder()
    except RuntimeError as error:  # no home folder
        raise OSError(*error.args) from None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(f"{folder} can be written by another user")
    return folder


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _is_whole(content: bytes) -> bool:
    """Whether an ELF file has its section table, which linkers put last: loading part of a file kills the process."""
    if content[:4] != b"\x7fELF":
        return True  # the loader refuses what it does not know
    order: Literal["little", "big"] = "little" if content[5:6] == b"\1" else "big"
    start, size, count = (int.from_bytes(content[a:b], order) for a, b in ((40, 48), (58, 60), (60, 62)))
    return len(content) >= 64 and start + size * count <= len(content)


def compile_library(compiler: Compiler, source: Path, library: Path) -> None:
    """Compile a C file to a shared library; temporary files go to the library's folder."""
    command = [*compiler.command, *compiler.flags, "-o", str(library), str(source), "-lm"]
    _run(command, _SECONDS, TMPDIR=str(library.parent))
