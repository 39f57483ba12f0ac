"""Compile the kernels for CPUs (`cpu.c`) into a wheel, or beside their source for an editable installation.

On x86-64, there is a library for each of three instruction sets, elsewhere one. Without a C compiler, and on Windows,
the wheel is pure. CC and CFLAGS are what they are everywhere.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "symexplin/kernels"
# Never -ffast-math, -Ofast or -funsafe-math-optimizations: a library linked so makes the whole process flush denormals.
# OpenMP only for `#pragma omp simd`: torch has its own runtime.
FLAGS = (
    *("-O3", "-std=c11", "-fPIC", "-shared", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp-simd"),
)
X86_64 = ("x86-64-v2", "x86-64-v3", "x86-64-v4")


class KernelsHook(BuildHookInterface):
    """Hatchling's hook of a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and make the wheel one of this platform; if there is no compiler, say so."""
        source = Path(self.root, "src", KERNELS, "cpu.c")
        self._folder = tempfile.TemporaryDirectory(prefix="symexplin-")
        folder = source.parent if version == "editable" else Path(self._folder.name)
        for stale in folder.glob("cpu-*.so"):
            stale.unlink()
        try:
            libraries = compile_kernels(source, folder)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or error
            self.app.display_warning(f"symexplin is built without its C kernels: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform()}"
        if version != "editable":
            build_data["force_include"] |= {str(library): f"{KERNELS}/{library.name}" for library in libraries}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove what was compiled for a wheel."""
        self._folder.cleanup()


def compile_kernels(source: Path, folder: Path) -> list[Path]:
    """Compile a library for each instruction set, with the digest of its source.

    Raises:
        OSError: there is no compiler for this system.
        subprocess.CalledProcessError: the compiler failed; its `stderr` says why.
    """
    if os.name == "nt":
        raise OSError("there are none for Windows")
    usual = next(filter(shutil.which, ("cc", "gcc", "clang")), "cc")
    compiler, digest = shlex.split(os.environ.get("CC") or usual), hashlib.sha256(source.read_bytes()).hexdigest()
    libraries = []
    for level in X86_64 if platform.machine() in ("x86_64", "AMD64") else ("baseline",):
        wide = ("-mprefer-vector-width=512",) if level == "x86-64-v4" else ()
        march = () if level == "baseline" else (f"-march={level}",)
        library, draft = folder / f"cpu-{level}.so", folder / f"cpu-{level}.so.draft"
        flags = (*FLAGS, *march, *wide, f'-DDIGEST="{digest}"', *shlex.split(os.environ.get("CFLAGS", "")))
        command = [*compiler, *flags, "-o", str(draft), str(source), "-lm"]
        subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace")
        libraries.append(draft.replace(library))
    return libraries


def _platform() -> str:
    """Return the platform of a wheel's name; a library has one architecture where Python may have two."""
    name = sysconfig.get_platform().replace("universal2", platform.machine())
    return name.replace("-", "_").replace(".", "_")
