"""Run scripts in turn, as torchrun would start them, forked from one process that has imported what is slow.

As a script: the arguments are a JSON list of modules to import and one of jobs, each a number of processes and a
command line. A job of several processes has the environment that torchrun gives.
"""

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys

__all__ = ["TRAINER", "outputs", "preload"]

# What a run of the Hugging Face trainers imports.
TRAINER = [
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "accelerate", "peft"),
    *("symexplin.optim", "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"),
]

_END = "the end of a job"
_context = multiprocessing.get_context("fork")


def outputs(modules, jobs, timeout=240):
    """Return what each job printed; `jobs` has a (number of processes, command line) for each."""
    command = [sys.executable, __file__, json.dumps(modules), json.dumps(jobs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(_END)[:-1]


def preload(modules):
    """Import modules, and exempt their objects from garbage collection, here and in processes forked later."""
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _execute(rank, processes, variables, arguments):
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
    os.environ |= variables | (ranks if variables else {})
    sys.argv[:] = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def _run(processes, arguments):
    variables = {}
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
    # They exit without shutting down the interpreter, which takes a second.
    jobs = [(rank, processes, variables, arguments) for rank in range(processes)]
    workers = [_context.Process(target=_execute, args=job) for job in jobs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ends = [worker.exitcode for worker in workers]
    if any(ends):
        sys.exit(f"ended with {ends}: {arguments}")
    print(_END, flush=True)  # noqa: T201


if __name__ == "__main__":
    preload(json.loads(sys.argv[1]))
    for job in json.loads(sys.argv[2]):
        _run(*job)
    os._exit(0)
