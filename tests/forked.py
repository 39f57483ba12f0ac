"""Run scripts in turn, as torchrun would start them, forked from one process that has imported what is slow.

As a script: the arguments are a JSON list of modules to import and one of jobs, each a number of processes, a command
line and the exit code to expect. A job of several processes has the environment that torchrun gives.
"""

import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys

__all__ = ["TRAINER", "outputs"]

# What a run of the Hugging Face trainers imports.
TRAINER = [
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "accelerate", "peft"),
    *("symexplin.hf", "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"),
]

_END = "the end of a job"


def outputs(modules, jobs, timeout=240, ends=None):
    """Return what each job printed; `jobs` has a (number of processes, command line) for each."""
    jobs = [(*job, end) for job, end in zip(jobs, ends or [0] * len(jobs), strict=True)]
    command = [sys.executable, __file__, json.dumps(modules), json.dumps(jobs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(_END)[:-1]


def _run(processes, arguments, expected):
    variables = {}
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
    pids = []
    for rank in range(processes):
        pids.append(os.fork())
        if not pids[-1]:
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
            os.environ |= variables | (ranks if variables else {})
            sys.argv[:] = arguments
            runpy.run_path(arguments[0], run_name="__main__")
            sys.exit()
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if ends != [expected] * processes:
        sys.exit(f"ended with {ends}: {arguments}")
    print(_END, flush=True)  # noqa: T201


if __name__ == "__main__":
    for name in json.loads(sys.argv[1]):
        importlib.import_module(name)
    gc.freeze()  # or every process would take all modules apart when it ends, which takes seconds
    for job in json.loads(sys.argv[2]):
        _run(*job)
