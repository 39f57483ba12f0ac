"""A compiler that fails in chosen ways, and the first steps of an optimizer in a process that a signal may end."""

import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import symexplin as sel
from processes import start
from symexplin import kernels
from symexplin.kernels import compiler

__all__ = ["Found", "begin", "fake_compiler", "first_steps"]

Found = dict[str, Any]


def fake_compiler(path: Path, probe: str, build: str) -> None:
    """Write a script that runs one shell command to print macros, and one to write the library "$2"."""
    path.parent.mkdir(exist_ok=True)
    case = f'case "$*" in *-dM*)\n{probe}\n;; *) while [ "$1" != -o ]; do shift; done\n{build}\n;; esac'
    path.write_text(f"#!/bin/sh\n{case}\n")
    path.chmod(0o700)


def begin(**arguments: Any) -> tuple[Any, Connection]:
    """Begin :func:`first_steps` in another process; return it and where the result arrives."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = start(_send, sender, arguments)
    sender.close()
    return process, receiver


def first_steps(**arguments: Any) -> Found:
    """Return what two steps find in another process: an AssertionError if a signal ends it, or it waits for long."""
    process, receiver = begin(**arguments)
    process.join(60)
    assert process.exitcode == 0, f"exit status {process.exitcode}"
    found: Found = receiver.recv()
    return found


def _send(sender: Connection, arguments: dict[str, Any]) -> None:
    sender.send(_steps(**arguments))


def _steps(
    environment: dict[str, str], seconds: float = 20.0, state: str = "", interrupt: type[BaseException] | None = None
) -> Found:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as in a new process
    compiler._SECONDS = compiler._PROBE_SECONDS = seconds
    torch.set_num_threads(1)
    fast, plain = (nn.Linear(4, 3, dtype=torch.float32) for _ in range(2))
    plain.load_state_dict(fast.state_dict())
    models = {"auto": fast, "readable": plain}
    for model in models.values():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    if state:
        torch.set_default_dtype(getattr(torch, state))
    raised = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for choice, model in models.items():
            optimizer = sel.SELAdamW(model, lr=0.1)
            with kernels.using(choice):
                if choice == "auto" and interrupt:
                    raised = _interrupted(optimizer, interrupt)
                for _ in range(2):
                    optimizer.step()
        name = kernels.describe("cpu")
    difference = float((fast.weight.detach() - plain.weight.detach()).abs().max())
    return {"name": name, "warnings": [str(w.message) for w in caught], "difference": difference, "raised": raised}


def _interrupted(optimizer: torch.optim.Optimizer, kind: type[BaseException]) -> str:
    def handler(*_: Any) -> None:
        raise kind("from the handler")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    since = time.monotonic()
    try:
        optimizer.step()
    except kind as error:
        return f"{error} after {'less' if time.monotonic() - since < 1 else 'more'} than a second"
    return "nothing"
