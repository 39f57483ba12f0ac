"""Peak memory of a variant on a CPU: only a process of its own tells it, as the system never takes a peak back."""

import concurrent.futures
import multiprocessing
import platform
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from symexplin.lab.bench.config import BenchConfig, Case
from symexplin.lab.bench.work import make_work
from symexplin.lab.malloc import keep_freed_memory

__all__ = ["peak_in_child"]

_STEPS = 3  # the first creates the states beside the activations of none; later ones have both


def peak_in_child(name: str, config: BenchConfig, case: Case) -> int:
    """Return the most bytes of memory that a fresh process has resident while it takes a few steps of a variant.

    They include Python, torch and the model's building.

    Raises:
        ValueError: the process was ended from outside, most likely by the system for its memory.
    """
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_peak, name, config, case).result()
        except BrokenProcessPool:
            raise ValueError(
                f"memory of {name}, {case}: its process was ended, most likely as memory ran out: choose a smaller "
                "model or fewer tokens, or leave it out with --no-memory"
            ) from None


def _peak(name: str, config: BenchConfig, case: Case) -> int:
    keep_freed_memory()
    run = config.run(case)
    torch.set_num_threads(run.compute.threads or 1)
    work = make_work(name, config, case, torch.device("cpu"))
    for _ in range(_STEPS):
        work.prepare()
        work.run()
    return _high_water()


def _high_water() -> int:
    """Return the peak of this process; getrusage's may be its parent's, which Linux hands on."""
    status = Path("/proc/self/status")
    if status.exists():
        (kibibytes,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return 1024 * int(kibibytes)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else 1024 * peak
