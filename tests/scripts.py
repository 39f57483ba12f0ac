"""Import a script, run one in this process, as a command line would, or stop it."""

import importlib.util
import runpy
import sys
from pathlib import Path

__all__ = ["load", "run", "stop_at_second"]


def load(path):
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def run(script, *arguments, capsys, monkeypatch):
    """Return what the script printed."""
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    capsys.readouterr()
    runpy.run_path(str(script), run_name="__main__")
    return capsys.readouterr().out


def stop_at_second(patch, module, name):
    """Replace a function that saves by one that leaves half a file and ends the program at its second call."""
    save, calls = getattr(module, name), []

    def broken(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            path = next(value for value in arguments if isinstance(value, Path))
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        save(*arguments)

    patch.setattr(module, name, broken)
