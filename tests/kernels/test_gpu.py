"""The Triton kernels where there is no GPU: they compile for one, and wrong ones are not used."""

import os
import subprocess
import sys

import pytest
import torch

from symexplin.kernels import gpu

pytest.importorskip("triton", reason="Triton has no builds for this platform")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from symexplin.kernels import gpu_kernels

TYPES = {"tiles": "*i32", **dict.fromkeys(("table", "grads", "noise"), "*i64")}
TYPES |= dict.fromkeys(("all_rows", "all_columns", "kinds"), "i32")
TYPES |= dict.fromkeys(("lerp_weight", "beta2", "one_minus_beta2", "sqrt_scale", "eps", "one_minus_decay"), "fp32")
TYPES |= dict.fromkeys(("decay", "kappa", "c", "base", "slope"), "fp32")
SIZES = {"TILE": 2048, "TALL": 64, "ROWS": 4, "COLS": 256, "TILES": 16}
for name in gpu_kernels.__all__:
    kernel = getattr(gpu_kernels, name)
    for flag in (False, True) if hasattr(kernel, "arg_names") else ():
        constants = {n: SIZES.get(n, flag) for n in kernel.arg_names if n.isupper()}
        constants |= {} if flag else {n: None for n in ("clip", "noise") if n in kernel.arg_names}
        signature = {n: "constexpr" if n in constants else TYPES.get(n, "*fp32") for n in kernel.arg_names}
        triton.compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 80, 32))
"""


def test_kernels_compile_for_gpus():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("broken", ["step", "push", "product_sums", "product_push", "product_step", None])
def test_wrong_kernels_are_not_used(broken, monkeypatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter runs where there is no GPU")
    run = gpu._Launch.run
    for name in ("_TALL", "_ROWS"):  # the interpreter takes as long for few rows
        monkeypatch.setattr(gpu, name, 256)

    def run_others(launch, kernel, *args, **constants):
        if kernel.__name__ != broken:
            run(launch, kernel, *args, **constants)

    monkeypatch.setattr(gpu._Launch, "run", run_others)
    if broken is None:
        assert gpu.load.__wrapped__(torch.device("cpu")).name.startswith("Triton")
        return
    with pytest.warns(UserWarning, match=r"no Triton kernels on cpu \(Triton .* gives wrong results\)"):
        assert gpu.load.__wrapped__(torch.device("cpu")) is None


def test_when_triton_fails_or_is_not_there_a_warning_says_how_and_what_that_costs(monkeypatch):
    def fail(error):
        raise error

    def check(said):
        with pytest.warns(UserWarning, match=f"{said}.*several times as long"):
            assert gpu.load.__wrapped__(torch.device("cuda")) is None

    for error, said in ((AssertionError(), r"\(AssertionError\)"), (OSError(28, "No space left"), "No space left")):
        monkeypatch.setattr(gpu, "triton_kernels", lambda error=error: fail(error))
        check(said)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda _: None)
    check("Triton is not installed")
