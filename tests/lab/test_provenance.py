import platform
import subprocess
import sys

import torch

from symexplin.lab import provenance as module
from symexplin.lab.provenance import provenance


def test_names_versions_and_machine():
    facts = provenance()
    assert facts["torch"] == torch.__version__
    assert facts["python"] == platform.python_version()
    assert facts["threads"] == torch.get_num_threads()
    assert {"symexplin", "numpy", "safetensors", "processor", "instructions"} <= facts.keys()


def test_no_commit_without_git_or_outside_a_repository(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert provenance()["commit"] is None
    monkeypatch.setattr(module, "__file__", str(tmp_path / "provenance.py"))
    assert provenance()["commit"] is None


def test_memory_grows_with_what_is_held():
    """In a process of its own: this one may keep, and use again, what earlier tests have freed."""
    program = (
        "import torch\nfrom symexplin.lab.provenance import memory\nbefore = memory()['memory_bytes']\n"
        "held = torch.ones(2**24)\nprint((memory()['memory_bytes'] - before) / held.nbytes)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) < 2.0
