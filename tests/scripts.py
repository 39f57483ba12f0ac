"""Run an example in this process, as a command line would; what is slow to import is imported once."""

import runpy
import sys

__all__ = ["run"]


def run(script, *arguments, capsys, monkeypatch):
    """Return what the script printed."""
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    capsys.readouterr()
    runpy.run_path(str(script), run_name="__main__")
    return capsys.readouterr().out
