"""Figures of both homes agree with a direct computation."""

import pytest
import torch
from torch import nn

import symexplin as sel


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_stats_against_direct_computation(home):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    nn.init.uniform_(model[0].weight, -2, 2)
    scale = sel.Scale("elementwise", start=1.5, k=(1, 1), transform="exp")
    config = sel.preset("paper", e=scale, beta=2.0, start="matched")
    optimizer = None
    if home == "module":
        sel.convert(model, config)
        layers = [(layer.raw_weight, 1.5, 2.0) for layer in model]
    else:
        optimizer = sel.SELAdamW(model, config=config, total_steps=3)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        assert sel.stats(model, optimizer) == {}
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        layers = [(optimizer.state[layer.weight]["raw"], 1.5, 2.0) for layer in model]
    found = sel.stats(model, optimizer)
    x = torch.cat([(2.0 * raw.detach().abs()).flatten() for raw, *_ in layers])
    assert found["e/mean"] == pytest.approx(1.5, rel=1e-6)
    assert found["e/std"] == pytest.approx(0.0, abs=1e-3)
    assert found["kappa/mean"] == pytest.approx(2.0, rel=1e-6)
    assert found["kappa_w/max"] == pytest.approx(float(x.max()), rel=1e-6)
    assert found["tail/fraction"] == pytest.approx(float((x > 1).double().mean()))
    slopes = []
    for raw, e, beta in layers:
        w = raw.detach().clone().requires_grad_()
        sel.functional.effective(w, beta=beta, e=e).sum().backward()
        slopes.append(w.grad.flatten())
    slope = torch.cat(slopes).abs()
    assert found["slope/mean"] == pytest.approx(float(slope.mean()), rel=1e-5)
    assert found["slope/std"] == pytest.approx(float(slope.std(correction=0)), rel=1e-4)
