"""Where a result comes from: versions, commit, processor, threads."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

__all__ = ["provenance"]


def provenance() -> dict[str, str | int | None]:
    """Return what a reader needs to know of the machine and the software, as plain values.

    "commit" is None unless this very file is tracked by git; a "+" marks uncommitted changes.

    >>> provenance()["torch"] == torch.__version__
    True
    """
    return {
        **{name: importlib.metadata.version(name) for name in ("symexplin", "numpy", "safetensors")},
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": _commit(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _commit() -> str | None:
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed copy may lie inside somebody else's repository, whose commit says nothing about it.
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
