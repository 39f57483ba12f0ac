"""Statistics of both homes agree with a direct computation."""

import statistics

import pytest
import torch
from torch import nn

import symexplin as sel
from training import backward, build, network


def made(home, model, config):
    """The statistics' arguments, and the raw weights and scales of each tensor by name."""
    if home == "module":
        sel.convert(model, config)
        maps = {f"{n}.{w}": layer.curved(w) for n, layer in model.named_children() for w in layer.specs}
        return (model, None), maps
    optimizer = sel.SELAdamW(model, lr=1e-3, config=config, total_steps=3)
    assert sel.stats(model, optimizer) == {}
    optimizer.create_state()
    return (model, optimizer), dict(optimizer.curved())


@pytest.mark.parametrize("home", ["optimizer", "module"])
@pytest.mark.parametrize("mode", ["mismatch", "exp_only"])
def test_stats_against_direct_computation(home, mode):
    """Each tensor counts once in the mean of a scale, whatever its size (section 5.4.2); slopes are of all entries."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 3, bias=False))
    nn.init.uniform_(model[0].weight, -2, 2)
    learned = {"e": sel.Scale("row_col_mult"), "m": sel.Scale("global")}
    arguments, maps = made(home, model, sel.SELConfig(beta=2.0, mode=mode, l=sel.Scale(start=0.5), **learned))
    with torch.no_grad():
        for i, curved in enumerate(maps.values()):
            for name, tensor in curved.tensors.items():
                tensor.fill_(1.0 + i) if name == "m" else tensor.copy_(torch.rand_like(tensor) + 0.5)
    found, scales = sel.stats(*arguments), {name: c.scales() for name, c in maps.items()}
    e = [torch.as_tensor(scales[name].e).expand_as(c.raw).detach() for name, c in maps.items()]
    mean = statistics.fmean(float(values.mean()) for values in e)
    assert found["e/mean"] == pytest.approx(mean, rel=1e-6)
    assert found["e/std"] == pytest.approx(statistics.fmean(float(((v - mean) ** 2).mean()) for v in e) ** 0.5)
    assert found["kappa/mean"] == pytest.approx(2.0 * 2.0)
    assert "l/mean" not in found
    matrices = {name: c for name, c in maps.items() if c.raw.dim() == 2}
    x = torch.cat([(scales[name].kappa * c.raw).detach().abs().flatten() for name, c in matrices.items()])
    assert found["kappa_w/max"] == pytest.approx(float(x.max()), rel=1e-6)
    assert found["tail/fraction"] == pytest.approx(float((x > 1).double().mean()))
    slope = torch.cat([c.slope().detach().abs().flatten() for c in matrices.values()])
    assert found["slope/mean"] == pytest.approx(float(slope.mean()), rel=1e-5)
    assert found["slope/std"] == pytest.approx(float(slope.std(correction=0)), rel=1e-4)


def test_the_default_map_has_slopes_without_scales():
    """f' = 1 + beta |w|; nothing to say of ordinary weights."""
    model = network()
    optimizer = build(model, sel.SELConfig(beta=7.5))
    assert sel.stats(model) == sel.stats(model, optimizer) == {}
    backward(model, 0)
    optimizer.step()
    found = sel.stats(model, optimizer)
    weights = torch.cat([model[i].weight.detach().flatten() for i in (0, 3)]).abs()
    assert set(found) == {"slope/mean", "slope/std", "kappa_w/max", "tail/fraction"}
    assert found["slope/mean"] == pytest.approx(float((1 + 7.5 * weights).mean()), rel=1e-5)
    assert found["kappa_w/max"] == pytest.approx(float(torch.log1p(7.5 * weights.max())), rel=1e-5)
