"""The Triton kernels: against float64 in Triton's interpreter, compiled for a device that is not there, and on one."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from symexplin.kernels import cuda

HERE = Path(__file__).parent
CHECKS = (
    "effective", "range", "pullback", "step", "step_on_tensors", "kept", "marks", "not_finite", "replaced", "capture",
    "rounding", "full_tiles", "optimizer",
)  # fmt: skip
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


def compiled(tmp_path, *arguments):
    pytest.importorskip("triton")
    command = [sys.executable, str(HERE / "triton_offline.py"), *arguments]
    done = subprocess.run(
        command, env=environment(TRITON_CACHE_DIR=str(tmp_path)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_compiled(kernels):
    assert max(kernel["registers"] for kernel in kernels) <= 128  # 16 warps a multiprocessor
    assert not any(kernel["fusible"] for kernel in kernels)  # roundings are as written
    for kernel in kernels:
        assert kernel["nan"] or kernel["kernel"] not in ("pull_all", "pull_one", "update_all", "effective_one")
        assert kernel["widest"] == 128 or not kernel["aligned"], kernel  # bits at once


@pytest.mark.slow
def test_kernels_compile_without_a_device(tmp_path):
    kernels = compiled(tmp_path)
    check_compiled(kernels)
    assert {kernel["kernel"] for kernel in kernels} == {
        "pull_all", "pull_one", "finish_all", "finish_one", "effective_one", "update_all", "square_tiles", "norms",
        "update_tiles", "update_panels", "mark_tiles",
    }  # fmt: skip
    assert not any(kernel["spilled"] for kernel in kernels)


@pytest.mark.slow
def test_other_maps_and_shapes_compile_without_a_device(tmp_path):
    kernels = compiled(tmp_path, "others")
    check_compiled(kernels)
    assert max(kernel["spilled"] for kernel in kernels) <= 64


def test_without_a_device_there_are_no_kernels(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level("INFO", "symexplin"):
        assert cuda.load() is None
    assert "no kernels for CUDA" in caplog.text


def test_triton_is_not_imported_before_it_is_needed():
    script = "import sys, symexplin, symexplin.kernels.cuda; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.fixture
def helpers(monkeypatch):
    """Return the modules of cases and of checks, as a process with a device takes them."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module("triton_cases"), importlib.import_module("triton_checks")


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("small", [True, False], ids=["small tiles", "the tiles"])
def test_kernels_hold_on_a_device(helpers, name, small):
    cases, checks = helpers
    checks.CHECKS[name]("cuda", cases.SMALL if small else None)


@pytest.mark.gpu
@needs_device
def test_a_step_waits_for_no_device(helpers):
    cases, checks = helpers
    kernels = checks.CudaKernels()
    parts = [part for _, part in cases.class_mix("cuda")]
    norm = torch.ones((), device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            kernels.pull(parts)
            kernels.update(parts, norm)
            kernels.marks([part.raw for part in parts])
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_device
def test_a_graph_replays_what_was_captured(helpers):
    """With gradients of its own memory and rates on the device, whatever steps outside of it do between replays."""
    cases, checks = helpers
    mixes = [[part for _, part in cases.class_mix("cuda")] for _ in range(2)]
    for parts in mixes:
        for part in parts:
            part.rates = cases.as_tensors(part.rates, "cuda")
    kernels, factor = checks.CudaKernels(), torch.tensor(0.5, device="cuda")
    captured, plain = mixes
    for parts in mixes:
        kernels.pull(parts)
        kernels.update(parts, factor)
    graph = torch.cuda.CUDAGraph()
    outside = [part.grad for part in captured]
    with torch.cuda.graph(graph):
        for part in captured:
            part.grad = part.grad * 0.5
        kernels.pull(captured)
        kernels.update(captured, factor)
    inside = [part.grad for part in captured]
    for turn in range(3):
        graph.replay()
        for part, grad in zip(plain, outside, strict=True):
            part.grad = grad * 0.5
        kernels.pull(plain)
        kernels.update(plain, factor)
        for parts, grads in ((captured, outside), (plain, [part.grad * 2 for part in plain])):
            for part, grad in zip(parts, grads, strict=True):
                part.grad = grad
            kernels.pull(parts)
            kernels.update(parts, factor)
        for part, grad in zip(captured, inside, strict=True):
            part.grad = grad
        for one, other in zip(captured, plain, strict=True):
            assert torch.equal(one.raw, other.raw), turn
