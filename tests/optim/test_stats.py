"""Statistics of both homes agree with a direct computation."""

import statistics

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
        sel.functional.effective(w, beta=beta, e=e, l=beta / 7.5).sum().backward()
        slopes.append(w.grad.flatten())
    slope = torch.cat(slopes).abs()
    assert found["slope/mean"] == pytest.approx(float(slope.mean()), rel=1e-5)
    assert found["slope/std"] == pytest.approx(float(slope.std(correction=0)), rel=1e-4)


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_each_tensor_counts_once_whatever_its_size_biases_included(home):
    """The paper averages "across tracked effective-scale tensors" (section 5.4.2)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 3, bias=False))
    learned = {"e": sel.Scale("row_col_mult"), "l": sel.Scale(), "m": sel.Scale("global")}
    config = sel.preset("paper", beta=2.0, start="matched", **learned)
    optimizer = None
    if home == "module":
        sel.convert(model, config)
        sides = [(model[0], ""), (model[0], "bias_"), (model[1], "")]
        e = [(getattr(layer, f"{side}e_row"), getattr(layer, f"{side}e_column", None)) for layer, side in sides]
        m = [getattr(layer, f"{side}m") for layer, side in sides]
    else:
        optimizer = sel.SELAdamW(model, lr=1e-3, config=config, total_steps=3)
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        states = [optimizer.state[p] for p in (model[0].weight, model[0].bias, model[1].weight)]
        e = [(state["panel0"].flatten(), state["panel1"].flatten() if "panel1" in state else None) for state in states]
        m = [state["scalar"] for state in states]
    with torch.no_grad():
        for vector in (v for pair in e for v in pair if v is not None):
            vector.copy_(torch.rand_like(vector) + 0.5)
        for number, size in zip(m, (1.0, 2.0, 6.0), strict=True):
            number.fill_(size)
    found = sel.stats(model, optimizer)
    full = [row.detach() if column is None else torch.outer(row, column).detach() for row, column in e]
    mean = statistics.fmean(float(values.mean()) for values in full)
    assert found["e/mean"] == pytest.approx(mean, rel=1e-6)
    assert found["e/std"] == pytest.approx(statistics.fmean(float(((v - mean) ** 2).mean()) for v in full) ** 0.5)
    assert found["kappa/mean"] == pytest.approx(2.0 * 3.0)
    assert "l/mean" not in found
