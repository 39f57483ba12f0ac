"""Runs one after the other, or side by side in processes that stop together and end with the one that began them."""

import concurrent.futures
import contextlib
import multiprocessing
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from symexplin.lab.config import RunConfig
from symexplin.lab.run import train
from symexplin.lab.stop import STOPPING, Stopped, StopSignals, follow_parent, ignoring
from symexplin.lab.train import NonFiniteError

__all__ = ["Task", "train_all"]

Echo = Callable[[str], None]
Futures = Mapping[concurrent.futures.Future[int | None], int]

_TICK = 0.2  # seconds between looks at signals and lines
_PATIENCE = 10.0  # seconds that workers have to end by themselves, with all runs saved
# What a worker process shares with the one that began it: the queue of its log lines, and the wish to stop.
_shared: dict[str, Any] = {}


class Task(NamedTuple):
    """One run to train or to go on with, in its folder."""

    label: str
    config: RunConfig
    folder: Path


def train_all(tasks: Sequence[Task], jobs: int, echo: Echo, progress: bool) -> Iterator[int]:
    """Train, and yield the index of each task when it has ended; one that broke down has ended, too.

    Args:
        tasks: runs, in the order in which they start.
        jobs: 1: in this process; more: so many processes.
        echo: takes the lines of the runs.
        progress: show a bar on a terminal; with one job it stands for the lines.

    Raises:
        ValueError, OSError: a run cannot go on; the others were saved, as far as they were.
        Stopped: SIGTERM or SIGINT came; every run was saved.
    """
    if jobs > 1 and tasks:
        yield from _side_by_side(tasks, jobs, echo)
        return
    bar = progress and sys.stderr.isatty()
    for index, task in enumerate(tasks):
        _train(task, (lambda _: None) if bar else echo, progress)
        yield index


def _train(task: Task, echo: Echo, progress: bool) -> None:
    with contextlib.suppress(NonFiniteError):  # the run's summary.json has it
        # A comparison has verified the data that all its runs read.
        train(
            task.config, task.folder, resume=True, echo=echo, tell_config=False, progress=progress, label=task.label,
            verify=False,
        )  # fmt: skip


def _side_by_side(tasks: Sequence[Task], jobs: int, echo: Echo) -> Iterator[int]:
    context = multiprocessing.get_context("spawn")  # threads and CUDA do not survive a fork
    lines, halt = context.Queue(), context.Event()
    others = set(multiprocessing.active_children())
    with (
        StopSignals() as stop,
        concurrent.futures.ProcessPoolExecutor(jobs, context, _enter, (lines, halt)) as pool,
    ):
        with ignoring(STOPPING):
            futures = {pool.submit(_work, task): index for index, task in enumerate(tasks)}
        workers = set(multiprocessing.active_children()) - others
        try:
            yield from _collect(futures, workers, stop, halt, lambda: _drain(lines, echo))
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            _end(workers, _PATIENCE if isinstance(error, Exception) else 0.0, lambda: _drain(lines, echo))
            raise
    _drain(lines, echo)


def _collect(
    futures: Futures, workers: set[BaseProcess], stop: StopSignals, halt: Any, drain: Callable[[], None]
) -> Iterator[int]:
    """Yield what ends; after a signal or a failure let the workers save their runs, then raise it."""
    waiting, failure = set(futures), None
    while waiting:
        done, waiting = concurrent.futures.wait(waiting, _TICK, concurrent.futures.FIRST_COMPLETED)
        drain()
        for future in done:
            if future.cancelled():
                continue
            error = future.exception()
            if error is not None:
                failure = failure or _failure(error)
            elif (number := future.result()) is not None:
                stop.signal = stop.signal or number
            else:
                yield futures[future]
        if failure is not None or stop.signal is not None:
            halt.set()
            for future in waiting:
                future.cancel()
            for worker in workers:  # again and again: one that was still loading has not heard it
                worker.terminate()
    if failure is not None:
        raise failure
    if stop.signal is not None:
        raise stop.stopped("with all runs saved; --resume goes on from there")


def _end(workers: set[BaseProcess], patience: float, drain: Callable[[], None]) -> None:
    """Wait until the workers, which have nothing left to do, have ended, and kill those that have not in time."""
    deadline = time.monotonic() + patience
    while (alive := [worker for worker in workers if worker.is_alive()]) and time.monotonic() < deadline:
        drain()  # a worker does not end before its lines are taken
        alive[0].join(_TICK)
    for worker in alive:
        worker.kill()  # a run survives it
    while workers & set(multiprocessing.active_children()):  # the executor's thread may be the one that sees the end
        time.sleep(0.01)


def _failure(error: BaseException) -> BaseException:
    if isinstance(error, concurrent.futures.BrokenExecutor):
        return ChildProcessError(
            "a worker process ended unexpectedly, perhaps for want of memory: --resume goes on, maybe with fewer jobs"
        )
    return error


def _drain(lines: Any, echo: Echo) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            echo(lines.get_nowait())


def _enter(lines: Any, halt: Any) -> None:
    """Begin the life of a worker."""
    _shared.update(lines=lines, halt=halt)
    # Between runs SIGTERM does nothing; a run heeds what is not ignored outright (symexplin.lab.stop).
    signal.signal(signal.SIGTERM, lambda *_: None)
    follow_parent()


def _work(task: Task) -> int | None:
    """Train in a worker; the number of the signal that stopped it, if one did."""
    if _shared["halt"].is_set():
        return int(signal.SIGTERM)
    try:
        _train(task, _shared["lines"].put, progress=False)
    except Stopped as stopped:
        return stopped.signal
    except BaseException:
        _shared["halt"].set()  # here: the next task may begin before the parent has heard of it
        raise
    return None
