"""Compile the kernels for CPUs (`cpu.c`) into a wheel, or beside their source for an editable installation.

On x86-64, there is a library for each of three instruction sets, elsewhere one. Without a C compiler, and on Windows,
the wheel is pure. It reads CC and CFLAGS.
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
        source, is_editable = Path(self.root, "src", KERNELS, "cpu.c"), version == "editable"
        if is_editable:
            for stale in source.parent.glob("cpu-*.so"):
                stale.unlink()
        self._folder = tempfile.TemporaryDirectory(prefix=".symexplin-", dir=self.root if is_editable else None)
        try:
            libraries = compile_kernels(source, Path(self._folder.name))
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or error
            self.app.display_warning(f"symexplin is built without its C kernels: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform()}"
        for library in libraries:
            if is_editable:
                library.replace(source.with_name(library.name))  # from the same file system: whole
            else:
                build_data["force_include"][str(library)] = f"{KERNELS}/{library.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the temporary folder."""
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
        library = folder / f"cpu-{level}.so"
        flags = (*FLAGS, *march, *wide, f'-DDIGEST="{digest}"', *shlex.split(os.environ.get("CFLAGS", "")))
        command = [*compiler, *flags, "-o", str(library), str(source), "-lm"]
        subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace")
        libraries.append(library)
    return libraries


def _platform() -> str:
    """Return the platform of a wheel's name; a library has one architecture where Python may have two."""
    name = sysconfig.get_platform().replace("universal2", platform.machine())
    return name.replace("-", "_").replace(".", "_")
