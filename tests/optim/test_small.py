"""Moments in 8 bits: the nearest codes, what they take and cost, and where they are refused."""

import copy

import pytest
import torch
from torch import nn

import symexplin as sel
from symexplin.optim import small
from symexplin.optim.small import decode, encode, scale_shape

quant_utils = pytest.importorskip("torchao.optim.quant_utils")

SHAPES = [(3, 16), (2, 600), (5, 3, 3, 3), (0, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_of_their_block(shape, signed):
    """By comparing each entry with all 256 values, in float64."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) ** (3 if signed else 12)
    codes, scale = encode(values, signed)
    assert (codes.dtype, codes.shape) == (torch.uint8, values.shape)
    assert (scale.dtype, scale.shape) == (torch.float32, scale_shape(shape))
    found = decode(codes, scale, signed)
    assert found.shape == values.shape
    levels = torch.tensor(quant_utils.create_dynamic_map(signed), dtype=torch.float64)
    rows, blocks = scale_shape(shape)
    for row in range(rows):
        flat, back = values[row].flatten().double(), found[row].flatten().double()
        size = -(-len(flat) // max(1, blocks))
        for start in range(0, len(flat), max(1, size)):
            block, got = flat[start : start + size], back[start : start + size]
            largest = block.abs().max()
            nearest = (block[:, None] / largest - levels).abs().amin(1) * largest
            assert bool(((got - block).abs() <= nearest + 1e-6 * largest).all())
            assert signed or bool(((got > 0) == (block > 0)).all())


@pytest.mark.parametrize("scale", [1.0, 32.0, 1000.0])
def test_the_scale_of_the_loss_does_not_matter(scale):
    """Inputs that are off in a batch have gradients of zero, with second moments far below others of their block."""
    ends = {}
    for bits in (32, 8):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
        optimizer = sel.SELAdamW(model, lr=1e-3, moment_bits=bits)
        for step in range(60):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (scale * nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))).backward()
            optimizer.step()
        ends[bits] = max(float(p.detach().abs().max()) for p in model.parameters())
    assert ends[8] < 1.2 * ends[32]


def test_zeros_stay_zeros():
    zeros = torch.zeros(4, 300)
    for signed in (True, False):
        assert torch.equal(decode(*encode(zeros, signed), signed), zeros)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4)).to(dtype)


def train(model, optimizer, steps, seed=0, start=0):
    """Regression on noisy products; return the losses."""
    losses = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(64, 32, generator=generator)
        y = x[:, :4] * x[:, 4:8] + 0.1 * torch.randn(64, 4, generator=generator)
        optimizer.zero_grad()
        loss = (model(x.to(next(model.parameters()).dtype)).float() - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses)


@pytest.mark.parametrize("kind", [sel.SELAdamW, sel.SELMuon])
def test_bytes_per_parameter(kind):
    """256 x 256 in bfloat16: raw weight 4, moments 2 (Muon 1) and their scales; vectors and counts."""
    model = network(torch.bfloat16)
    optimizer = kind(model, lr=1e-3, config=sel.preset("frozen", start="matched"), moment_bits=8)
    train(model, optimizer, 1)
    state = optimizer.state[model[2].weight]
    count = 2 if kind is sel.SELAdamW else 1
    found = sum(value.nbytes for value in state.values()) / 256**2
    assert found == pytest.approx(4 + count * (1 + 4 / 256), abs=1e-3)
    assert {str(v.dtype) for v in optimizer.state[model[0].bias].values()} == {"torch.float32"}  # too small to gain


def test_a_run_resumes_with_the_same_bits():
    models = [network(), network()]
    optimizers = [sel.SELAdamW(model, lr=1e-3, moment_bits=8) for model in models]
    train(models[0], optimizers[0], 5)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 5, start=5)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.slow
def test_the_loss_falls_as_with_32_bits():
    """Over 1,000 steps: the means of a hundred steps differ by less than those of another order of the data."""
    curves = {}
    for bits, seed in ((32, 0), (32, 1), (8, 0)):
        model = network()
        optimizer = sel.SELAdamW(model, lr=1e-3, moment_bits=bits)
        curves[bits, seed] = train(model, optimizer, 1000, seed).unflatten(0, (10, 100)).mean(1)
    noise = (curves[32, 1] - curves[32, 0]).abs().max()
    assert float((curves[8, 0] - curves[32, 0]).abs().max()) < float(noise)
    assert float(curves[8, 0][-1]) < 0.2 * float(curves[8, 0][0])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="moment_bits must be 32 or 8, got 4"):
        sel.SELAdamW(network(), moment_bits=4)
    model = network()
    optimizer = sel.SELAdamW(model)
    train(model, optimizer, 1)
    other = sel.SELAdamW(network(), moment_bits=8)
    with pytest.raises(ValueError, match="has moments of 32 bits: build the optimizer with moment_bits=32"):
        other.load_state_dict(optimizer.state_dict())


def test_without_torchao_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    small._map.cache_clear()
    model = network()
    optimizer = sel.SELAdamW(model, moment_bits=8)
    with pytest.raises(ModuleNotFoundError, match=r"moment_bits=8 needs torchao: pip install 'symexplin\[small\]'"):
        train(model, optimizer, 1)
    small._map.cache_clear()
