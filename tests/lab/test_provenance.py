import platform

import torch

from symexplin.lab import provenance as module
from symexplin.lab.provenance import memory, provenance


def test_names_versions_and_machine():
    facts = provenance()
    assert facts["torch"] == torch.__version__
    assert facts["python"] == platform.python_version()
    assert facts["threads"] == torch.get_num_threads()
    assert {"symexplin", "numpy", "safetensors", "processor", "instructions"} <= facts.keys()


def test_no_commit_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "provenance.py"))
    assert provenance()["commit"] is None


def test_no_commit_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance()["commit"] is None


def test_memory_grows_with_what_is_held():
    before = memory()["memory_bytes"]
    held = torch.ones(2**24)  # 64 MiB
    assert memory()["memory_bytes"] - before > 0.9 * held.nbytes
