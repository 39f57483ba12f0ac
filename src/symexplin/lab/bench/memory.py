"""Peak memory of a variant on a CPU: only a process of its own tells it, as the system never takes a peak back."""

import multiprocessing
import platform
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from symexplin.lab.bench.config import BenchConfig, Case
from symexplin.lab.bench.work import make_work
from symexplin.lab.malloc import return_freed_memory
from symexplin.lab.stop import follow_parent, ignoring

__all__ = ["peak_in_child"]

_STEPS = 3  # the first creates the states beside the activations of none; later ones have both


def peak_in_child(name: str, config: BenchConfig, case: Case) -> int:
    """Return the most bytes of memory that a fresh process has resident while it takes a few steps of a variant.

    They include Python, torch and the model's building, but no memory that malloc only kept. The process ends with this
    one, however that ends.

    Raises:
        ChildProcessError: the process failed, or was ended from outside, most likely by the system for its memory.
    """
    context = multiprocessing.get_context("spawn")  # a forked one would begin with this one's memory
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(sender, name, config, case))
    with receiver:
        with sender, ignoring([signal.SIGINT]):  # on Ctrl-C this process ends it
            child.start()
        try:
            found: int | str = receiver.recv()
        except EOFError:
            child.join()
            killed = child.exitcode is not None and child.exitcode < 0
            why = "most likely as memory ran out" if killed else "is the main script guarded by its __name__?"
            found = f"its process ended with {child.exitcode}, {why} (--no-memory leaves all memory out)"
        finally:
            child.kill()
            child.join()
    if isinstance(found, str):
        raise ChildProcessError(found)
    return found


def _report(sender: Connection, name: str, config: BenchConfig, case: Case) -> None:
    """Send the peak, or what went wrong."""
    follow_parent()
    try:
        sender.send(_peak(name, config, case))
    except Exception as error:  # the parent tells of it in a line
        sender.send(f"{type(error).__name__}: {error}".splitlines()[0])


def _peak(name: str, config: BenchConfig, case: Case) -> int:
    return_freed_memory()
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
