"""The origin of a result: versions, commit, processor, threads. And the memory in use."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

__all__ = ["cores", "memory", "provenance"]


def provenance(device: str = "cpu") -> dict[str, str | int | None]:
    """Return what a reader needs to know of the machine and the software, as plain values.

    "processor" is the CPU, or the GPU for a CUDA device. "commit" is None unless this very file is tracked by git; a
    "+" marks uncommitted changes.
    """
    import torch

    return {
        **{name: importlib.metadata.version(name) for name in ("symexplin", "numpy", "safetensors")},
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": _commit(),
        "processor": torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _commit() -> str | None:
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed copy may lie inside another repository, whose commit says nothing about it.
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory(device: str = "cpu") -> dict[str, int]:
    """Return the most bytes in use so far: "memory_bytes" of the process, on a CUDA device also "device_peak_bytes"."""
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = {"memory_bytes": peak if platform.system() == "Darwin" else 1024 * peak}
    if device.startswith("cuda"):
        import torch

        used["device_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return used
