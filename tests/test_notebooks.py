"""The notebooks of the documentation run, and the output that is kept beside each is of its source."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from scripts import load

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "docs/notebooks").glob("*.py"))


def kept(source):
    return json.loads(source.with_suffix(".ipynb").read_text(encoding="utf-8"))


def printed(notebook):
    """Return what each cell printed, with # for each number: these depend on the processor."""
    streams = [output for cell in notebook["cells"] for output in cell.get("outputs", ()) if "text" in output]
    assert {stream["name"] for stream in streams} == {"stdout"}  # warnings would name files of a machine
    return [re.sub(r"[-+]?\d[\d.,]*(e[-+]\d+)?", "#", "".join(stream["text"])) for stream in streams]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_output_of_a_notebook_is_of_its_source(source):
    same = kept(source)["metadata"]["source_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert same, f"{source.name} has changed since its output was written: run `make notebooks`"
    assert printed(kept(source))


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_runs_and_prints_what_is_kept(source):
    for name in ("ipykernel", "jupytext", "nbclient"):
        pytest.importorskip(name)
    assert printed(load(ROOT / "docs/run_notebooks.py").execute(source)) == printed(kept(source))
