"""Run a function in a process that may be killed, or in several that are joined by gloo."""

import functools
import multiprocessing.forkserver
import os
import pickle
import queue
import traceback
import unittest.mock
from datetime import timedelta
from pathlib import Path

import torch

__all__ = ["run", "start"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["preloaded"])


@functools.cache
def _begin():
    """Start the forkserver of this process; it looks for what it preloads where a new interpreter does."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with unittest.mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(paths)}):
        multiprocessing.forkserver.ensure_running()


def start(function, *args):
    """Call a function in another process, which has torch already, and return that process."""
    _begin()
    process = _context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def _work(rank, world, store, results, function, args):
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        # As bytes: a tensor in a queue is a file handle that dies with this process.
        results.put((rank, True, pickle.dumps(function(*args))))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def run(world, folder, function, *args, timeout=240):
    """Return what `function(*args)` returned in each of `world` processes; `folder` is for their rendezvous.

    The function must live in a module that another process can import: one of the helpers beside this file.
    """
    results = _context.Queue()
    store = folder / f"rendezvous-{world}-{len(list(folder.iterdir()))}"
    workers = [start(_work, rank, world, store, results, function, args) for rank in range(world)]
    found = {}
    try:
        while len(found) < world:
            rank, fine, value = results.get(timeout=timeout)
            assert fine, f"process {rank} of {world}:\n{value}"
            found[rank] = pickle.loads(value)
    except queue.Empty:
        raise AssertionError(f"processes {sorted(set(range(world)) - set(found))} of {world} hang") from None
    finally:
        for worker in workers:
            worker.join(timeout=5 if len(found) == world else 0)
            worker.kill()
    return [found[rank] for rank in range(world)]
