import platform

import torch

from symexplin.lab import provenance as module
from symexplin.lab.provenance import memory, provenance


def test_versions_and_machine_are_named_and_a_commit_only_inside_its_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "provenance.py"))
    facts = provenance()
    assert (facts["torch"], facts["python"]) == (torch.__version__, platform.python_version())
    assert facts["threads"] == torch.get_num_threads()
    assert {"symexplin", "numpy", "safetensors", "processor", "instructions"} <= facts.keys()
    assert facts["commit"] is None


def test_a_cuda_device_is_named_as_the_processor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", "card of {}".format)
    assert provenance("cuda:1")["processor"] == "card of cuda:1" != provenance("cpu")["processor"]


def test_memory_is_more_than_what_is_held():
    held = torch.ones(2**26)
    assert held.nbytes < memory()["memory_bytes"] < 2**40
