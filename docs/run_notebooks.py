"""Run the notebooks of docs/notebooks, and write each with its output beside its source, for the site to show."""

import hashlib
import os
import tempfile
from pathlib import Path

import jupytext
import nbclient
from nbformat import NotebookNode
from traitlets.config import Config

__all__ = ["NOTEBOOKS", "digest", "execute"]

NOTEBOOKS = sorted(Path(__file__).with_name("notebooks").glob("*.py"))
_TIMEOUT = 600  # seconds, of a cell


def digest(source: Path) -> str:
    """Return the digest of a notebook's source, which its output carries."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


def execute(source: Path) -> NotebookNode:
    """Return the executed notebook of a source: without times, paths and random names."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    with tempfile.TemporaryDirectory() as sockets:
        # Over TCP the kernel warns that nothing is encrypted. Its sockets lie beside the connection file.
        kernel = {"transport": "ipc", "connection_file": str(Path(sockets, "kernel.json"))}
        client = nbclient.NotebookClient(
            notebook, timeout=_TIMEOUT, record_timing=False, config=Config(ConnectionFileMixin=kernel)
        )
        client.execute(env=os.environ | {"OMP_NUM_THREADS": "1"})  # several threads round otherwise
    notebook.metadata = {"language_info": {"name": "python"}, "source_sha256": digest(source)}
    return notebook


if __name__ == "__main__":
    for path in NOTEBOOKS:
        jupytext.write(execute(path), path.with_suffix(".ipynb"))
