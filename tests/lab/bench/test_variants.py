import pytest
import torch
from torch import nn

import symexplin as sel
from symexplin.lab.bench import work as work_module
from symexplin.lab.bench.config import BenchConfig, Case
from symexplin.lab.bench.variants import BASELINES, MasterAdamW, build_variant, fill_gradients
from symexplin.lab.bench.work import make_work, shapes
from symexplin.lab.model import ModelConfig, Transformer

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
    assert ours.masters[0].grad is None  # the upcast gradients live no longer than the step


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


def test_which_is_held_against_which():
    for (part, _), baselines in BASELINES.items():
        assert set(baselines.values()) <= set(baselines)
        first = next(iter(baselines))
        assert baselines[first] == first
        assert part == "map" or {"sel"} < set(baselines)


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for d in ("fp32", "bf16") for n in BASELINES["step", d]])
@pytest.mark.parametrize("part", ["optimizer", "step"])
def test_work_moves_every_parameter(monkeypatch, name, dtype, part):
    built = []

    def keep(*arguments):
        built.append(build_variant(*arguments))
        return built[0]

    monkeypatch.setattr(work_module, "build_variant", keep)
    work = make_work(name, CONFIG, case(dtype, part), CPU)
    model = built[0].model
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for _ in range(3):
        work.prepare()
        work.run()
    frozen = {key for key, p in model.named_parameters() if torch.equal(p, before[key])}
    # A step of 3e-4 does not move a bf16 norm weight of 1.
    assert all("norm" in key for key in frozen)
    assert not frozen or dtype == "bf16"


def test_microbatches_share_the_tokens(monkeypatch):
    built = []

    def keep(*arguments):
        built.append(build_variant(*arguments))
        return built[-1]

    monkeypatch.setattr(work_module, "build_variant", keep)
    monkeypatch.setattr("symexplin.lab.bench.variants._MAX_NORM", 1e9)
    for count in (1, 2):
        make_work("adamw", CONFIG, case(microbatches=count), CPU).run()
    one, two = (dict(variant.model.named_parameters()) for variant in built)
    for key, parameter in one.items():
        torch.testing.assert_close(parameter.grad, two[key].grad, rtol=1e-4, atol=1e-7)


def test_a_step_says_where_its_phases_end():
    work = make_work("sel", CONFIG, case(microbatches=2), CPU)
    phases = []
    work.marks.end = phases.append
    work.run()
    assert phases == ["forward", "backward", "forward", "backward", "optimizer"]


def test_gradients_are_clipped_in_earnest():
    model = build_variant("adamw", CONFIG, case(), CPU).model
    fill_gradients(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    count = sum(p.numel() for p in model.parameters())
    assert float(norm) == pytest.approx(0.01 * (count / 3) ** 0.5, rel=0.05)


def test_shapes_are_those_of_the_models_matrices():
    model = Transformer(ModelConfig(width=96, depth=1, heads=2))
    found = {tuple(m.weight.shape) for m in model.blocks.modules() if isinstance(m, nn.Linear)}
    assert set(shapes(96)) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_map_alone_is_that_of_a_curved_layer(dtype):
    case = Case("map", "bf16" if dtype == torch.bfloat16 else "fp32", 16)
    torch.manual_seed(CONFIG.seed)
    layer = sel.SELLinear(16, 64, bias=False, config=sel.preset("paper"))
    grad = torch.rand(64, 16, dtype=dtype)  # drawn next, as there
    assert torch.equal(make_work("forward", CONFIG, case, CPU, (64, 16)).run(), layer.weight.to(dtype))
    raw, *_ = torch.autograd.grad(layer.weight, list(layer.parameters()), grad.float())
    pulled = make_work("backward", CONFIG, case, CPU, (64, 16)).run()
    torch.testing.assert_close(pulled.raw, raw, rtol=1e-5, atol=1e-7)
    assert all(vector.abs().max() > 0 for vector in (pulled.panel0, pulled.panel1))
