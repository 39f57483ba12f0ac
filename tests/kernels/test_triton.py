"""The Triton kernels: against float64 in Triton's interpreter, compiled for a device that is not there, and on one."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from symexplin.kernels import triton_launch

HERE = Path(__file__).parent
CHECKS = ("write", "pull", "update", "range", "rounding", "not_finite", "coordinates", "first_use", "covers")
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def environment(**changes):
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])} | changes


@pytest.fixture(scope="module")
def interpreter():
    """Return a function that runs a check in a process with Triton's interpreter."""
    pytest.importorskip("triton")
    command = [sys.executable, str(HERE / "triton_interpreter.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(OMP_NUM_THREADS="1"), **pipes) as process:

        def run(name):
            process.stdin.write(name + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, "the interpreter's process has ended"
            assert answer == "\n", json.loads(answer)

        yield run
        process.stdin.close()


@pytest.mark.parametrize("name", CHECKS)
def test_kernels_hold_in_the_interpreter(interpreter, name):
    interpreter(name)


@pytest.mark.slow
def test_kernels_compile_without_a_device(tmp_path):
    pytest.importorskip("triton")
    command, changes = [sys.executable, str(HERE / "triton_offline.py")], {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment(**changes), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert {(kernel["kernel"], kernel["architecture"]) for kernel in kernels} == {
        (name, architecture) for name in ("pull", "update", "write") for architecture in (80, 90, 100)
    }
    for kernel in kernels:
        assert kernel["registers"] <= 128, kernel  # 16 warps per multiprocessor
        assert kernel["spilled"] <= (32 if kernel["aligned"] else 64), kernel
        assert not kernel["fusible"], kernel  # roundings are as written
        assert kernel["nan"], kernel
        if kernel["aligned"]:  # bits at once
            assert kernel["loads"] == 128, kernel
            assert kernel["kernel"] == "pull" or kernel["stores"] == kernel["written"], kernel


def test_without_a_device_there_are_no_kernels(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level("INFO", "symexplin"):
        assert triton_launch.load() is None
    assert "no kernels for CUDA" in caplog.text


def test_triton_is_not_imported_before_it_is_needed():
    script = "import sys, symexplin, symexplin.kernels.triton_launch; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.fixture
def checks(monkeypatch):
    """Return the checks, for a process with a device."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module("triton_checks")


@pytest.mark.gpu
@needs_device
@pytest.mark.filterwarnings("error:symexplin does not use")
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("small", [True, False], ids=["small tiles", "the tiles"])
def test_kernels_hold_on_a_device(checks, name, small):
    checks.CHECKS[name]("cuda", triton_launch.TritonKernels(checks.SMALL if small else None))


@pytest.mark.gpu
@needs_device
@pytest.mark.filterwarnings("error:symexplin does not use")
def test_a_step_waits_for_no_device(checks):
    kernels, case = triton_launch.TritonKernels(), checks.CASES[0]
    terms, (matrices, old, new, grads) = checks.terms_of(case), checks.make(case, "cuda")
    clip, rates = torch.ones((), device="cuda"), checks.Rates(0.01, 0.1, 0.9, 0.99, 1e-8, (0.1, 0.1))
    kernels.write(terms, matrices, old)  # compares and compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.pull(terms, matrices, old, grads)
        kernels.update(terms, matrices, old, new, grads, rates, clip)
    finally:
        torch.cuda.set_sync_debug_mode("default")
