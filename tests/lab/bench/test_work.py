import dataclasses
import os
import sys

import pytest
import torch
from torch import nn

import symexplin as sel
from symexplin.lab.bench import BenchConfig, Case
from symexplin.lab.bench import work as module
from symexplin.lab.bench.work import BASELINES, MasterAdamW, _fill_gradients, build_variant, make_work, peak_in_child

CPU = torch.device("cpu")
CONFIG = BenchConfig(
    widths=(16,), depths=(1,), microbatches=(1, 2), tokens=64, context=16, vocab_size=32, device="cpu", threads=1
)


def case(dtype="fp32", part="step", microbatches=1):
    return Case(part, dtype, 16, 1, microbatches, 64)


def test_the_stock_recipe_is_adamw_on_fp32_masters():
    torch.manual_seed(0)
    start = torch.randn(6, 5).bfloat16()
    low, high = nn.Parameter(start.clone()), nn.Parameter(start.float())
    ours, theirs = MasterAdamW([low], lr=0.1, weight_decay=0.3), torch.optim.AdamW([high], lr=0.1, weight_decay=0.3)
    for _ in range(4):
        low.grad = torch.randn(6, 5).bfloat16()
        high.grad = low.grad.float() * min(1.0, 1.0 / (float(low.grad.float().norm()) + 1e-6))
        ours.step()
        theirs.step()
        torch.testing.assert_close(ours.masters[0], high.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(low.detach(), ours.masters[0].bfloat16())
    assert ours.masters[0].grad is None  # the upcast gradients live only during the step


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_variants_are_the_same_model(dtype):
    tokens = torch.arange(16).reshape(1, 16)
    logits = {}
    for name in BASELINES["step", dtype]:
        model, _, autocast = build_variant(name, CONFIG, case(dtype), CPU)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits[name] = model(tokens).float()
        low = dtype == "bf16" and not autocast
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16 if low else torch.float32}
        assert any(isinstance(m, sel.SELLinear) for m in model.modules()) == (name == "module")
    first = next(iter(logits.values()))
    for found in logits.values():
        torch.testing.assert_close(found, first, rtol=0, atol=1e-5 if dtype == "fp32" else 2e-2)


@pytest.fixture
def built(monkeypatch):
    """The variants that were built."""
    found = []

    def keep(*arguments):
        found.append(build_variant(*arguments))
        return found[-1]

    monkeypatch.setattr(module, "build_variant", keep)
    return found


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for d in ("fp32", "bf16") for n in BASELINES["step", d]])
@pytest.mark.parametrize("part", ["optimizer", "step"])
def test_work_moves_every_parameter(built, name, dtype, part):
    work = make_work(name, CONFIG, case(dtype, part), CPU)
    (model, *_) = built[0]
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for _ in range(3):
        work.prepare()
        work.run()
    frozen = {key for key, p in model.named_parameters() if torch.equal(p, before[key])}
    # A step of 3e-4 does not move a bf16 norm weight of 1.
    assert all("norm" in key for key in frozen)
    assert not frozen or dtype == "bf16"


def test_microbatches_share_the_tokens(built, monkeypatch):
    monkeypatch.setattr(module, "_MAX_NORM", 1e9)
    for count in (1, 2):
        make_work("adamw", CONFIG, case(microbatches=count), CPU).run()
    one, two = (dict(model.named_parameters()) for model, *_ in built)
    for key, parameter in one.items():
        torch.testing.assert_close(parameter.grad, two[key].grad, rtol=1e-4, atol=1e-7)


def test_a_step_adds_up_its_phases(monkeypatch):
    """The clock shows the square of its readings: 0, 1, 4, ..."""
    work, readings = make_work("sel", CONFIG, case(microbatches=2), CPU), iter(range(100))
    monkeypatch.setattr(module, "timer", lambda: next(readings) ** 2)
    work.run()
    assert work.phases == {"forward": 1 + 5, "backward": 3 + 7, "optimizer": 9}


def test_gradients_are_above_the_clipping_threshold():
    model = build_variant("adamw", CONFIG, case(), CPU)[0]
    _fill_gradients(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    count = sum(p.numel() for p in model.parameters())
    assert float(norm) == pytest.approx(0.01 * (count / 3) ** 0.5, rel=0.05)


HOLES = """
import torch
from symexplin.lab.bench.work import _high_water
kept = []
before = _high_water()
for _ in range(8):  # each small tensor stays in the hole of a large one, which must then go elsewhere
    large = torch.ones(16 << 18)
    del large
    kept.append(torch.ones(1 << 18))
print((_high_water() - before) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_childs_peak_is_what_it_holds_at_once(monkeypatch):
    monkeypatch.setattr(module, "_SCRIPT", HOLES)
    assert peak_in_child("adamw", CONFIG, case()) <= 16 + 8 + 2  # MiB


def test_a_childs_memory_is_its_own_and_grows_with_the_model():
    held = torch.ones(2**26)  # 256 MiB, which getrusage would hand on to the child
    small = peak_in_child("adamw", CONFIG, case())
    assert small < module._high_water() - 0.5 * held.nbytes
    # 2 x 2^21 parameters more, with gradients and moments 16 bytes each.
    large = peak_in_child("adamw", dataclasses.replace(CONFIG, vocab_size=2**17), case())
    assert large - small > 0.9 * 16 * 2**22


def test_a_child_that_fails_says_why_in_a_line(capfd):
    with pytest.raises(ChildProcessError, match=r"^KeyError: 'fp8'$"):
        peak_in_child("adamw", CONFIG, case("fp8"))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="kills")
def test_a_child_that_the_system_ends_says_so(monkeypatch):
    monkeypatch.setattr(module, "_SCRIPT", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ChildProcessError, match=r"ended with -9.*--no-memory"):
        peak_in_child("adamw", CONFIG, case())
