"""Execute the runs of a comparison in this process, one by one: a process of its own takes seconds to start."""

import contextlib
import io
import runpy
import sys

import pytest

from symexplin import cli
from symexplin.lab.compare import sweep
from symexplin.lab.compare.launch import EXAMPLE
from symexplin.lab.files import write_json

__all__ = ["executed", "in_process"]


def _status(words):
    if "symexplin" in words:
        return cli.main(words[words.index("symexplin") + 1 :])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words[1:])
        try:
            runpy.run_path(words[1], run_name="__main__")
        except SystemExit as error:
            if isinstance(error.code, str):
                sys.stderr.write(error.code)
            return int(bool(error.code))
    return 0


def _execute(tasks, _jobs, _timeout, echo):
    while tasks:
        task, said = tasks.popleft(), io.StringIO()
        task.begin()
        with contextlib.chdir(task.cwd or "."), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = _status(task.command)
        lines = said.getvalue().splitlines()
        for line in lines:
            if line.startswith("train: "):
                echo(f"{task.label}{line.removeprefix('train')}")
        last = (lines or ["no output"])[-1].removeprefix("symexplin: error: ")
        if task.has_result(status):
            write_json(task.file(".json"), {})
            yield task, None
        else:
            yield task, last if status else f"it ended without {str(task.result)!r}, such as {EXAMPLE}: {last}"


@contextlib.contextmanager
def executed():
    """Execute here meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "execute", _execute)
        yield


@pytest.fixture
def in_process():
    """Execute here in a test."""
    with executed():
        yield
