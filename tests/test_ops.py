"""The map as operators: what torch demands of them, and the module home through them."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import symexplin as sel
from networks import ELEMENTWISE, EXP
from symexplin.kernels import using
from symexplin.layout import Layout
from symexplin.ops import effective_op, key_of, pullback_op


def operands(dtype=torch.float32):
    layout = Layout((6, 5), "oi", sel.preset("paper"))
    panels = layout.start_panels(dtype, torch.device("cpu"), 0)
    raw = torch.linspace(-0.4, 0.4, 30, dtype=dtype).reshape(6, 5)
    return (raw, *panels.values()), key_of(layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_keep_torchs_rules(dtype):
    """Schema, no aliasing, shapes and dtypes under fake tensors, tracing (torch.library.opcheck)."""
    tensors, key = operands()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(effective_op, (*tensors, *key, dtype), test_utils=checks)
    torch.library.opcheck(pullback_op, (*tensors, tensors[0].to(dtype), *key), test_utils=checks)


def test_a_map_that_no_kernel_computes_is_traced():
    assert key_of(Layout((6, 5), "oi", sel.preset("paper+offset"))) is None


def test_a_model_fresh_from_conversion_compiles_whole():
    """Nothing is left to be worked out while torch.compile traces: two layers of operators, two traced ones."""
    torch.manual_seed(0)
    configs = (EXP, sel.preset("absorbed"), ELEMENTWISE, sel.preset("structured_linear"))
    model = nn.Sequential(*(sel.convert(nn.Linear(9, 9), config) for config in configs))
    inputs, ends = torch.randn(3, 9), []
    for run in (torch.compile(model, fullgraph=True, backend="aot_eager"), model):
        model.zero_grad()
        output = run(inputs)
        output.square().sum().backward()
        ends.append([output.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_fake_tensors_and_traces_go_through_the_formulas():
    torch.manual_seed(0)
    model = sel.convert(nn.Sequential(nn.Linear(9, 7)), sel.preset("paper"))
    inputs = torch.randn(3, 9)
    traced = make_fx(lambda x: model(x))(inputs)
    torch.testing.assert_close(traced(inputs), model(inputs), rtol=1e-5, atol=1e-6)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(inputs)).shape == (3, 7)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_converted_model_gives_the_same_through_kernels(autocast):
    """Values and all gradients, against the readable formulas; in bfloat16 the products round what differs."""
    torch.manual_seed(0)
    model = sel.convert(nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7)), sel.preset("paper"))
    inputs, ends = torch.randn(9, 33), []
    for kernels in ("auto", "readable"):
        model.zero_grad()
        with using(kernels):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = model(inputs)
            output.float().square().mean().backward()
        ends.append([output.detach().float(), *(p.grad.clone() for p in model.parameters())])
    for ours, theirs in zip(*ends, strict=True):
        scale = float(theirs.abs().max())
        assert float((ours - theirs).abs().max()) <= (2e-2 if autocast else 5e-6) * scale
