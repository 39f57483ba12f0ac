"""Moments in 8 bits: the nearest codes, and runs as with 32; test_state has their round trips and bytes."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import symexplin as sel
from symexplin.optim import moments8
from symexplin.optim.moments8 import decode, encode, scale_shape

quant_utils = pytest.importorskip("torchao.optim.quant_utils")


@pytest.mark.parametrize("shape", [(3, 16), (2, 600), (5, 3, 3, 3), (0, 4)])
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_of_their_block(shape, signed):
    """By comparing each entry with all 256 values, in float64; a positive average of squares stays positive."""
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
        size = -(-len(flat) // blocks)
        for block, got in zip(flat.split(size), back.split(size), strict=True):
            largest = block.abs().max()
            nearest = (block[:, None] / largest - levels).abs().amin(1) * largest
            assert bool(((got - block).abs() <= nearest + 1e-6 * largest).all())
            assert signed or bool(((got > 0) == (block > 0)).all())
    zeros = torch.zeros(4, 300)
    assert torch.equal(decode(*encode(zeros, signed), signed), zeros)


def train(bits, steps, scale=1.0, kind=sel.SELAdamW):
    """Regression on noisy products of inputs, some of which are off in a batch: gradients of zero beside others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer, losses = kind(model, lr=1e-3, moment_bits=bits), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(64, 32, generator=generator)
        y = x[:, :4] * x[:, 4:8] + 0.1 * torch.randn(64, 4, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        (scale * loss).backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize("kind", [sel.SELAdamW, sel.SELMuon])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_a_run_is_that_of_32_bits_whatever_the_scale_of_the_loss(scale, kind):
    """Second moments far below others of their block must not become 0, or weights jump."""
    (full, losses), (small, found) = (train(bits, 40, scale, kind) for bits in (32, 8))
    start, full, small = (parameters_to_vector(m.parameters()) for m in (train(32, 0)[0], full, small))
    assert float((small - full).norm()) < 0.25 * float((full - start).norm())
    assert found == pytest.approx(losses, rel=1e-2)
    assert losses[-1] < losses[0]


def test_without_torchao_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    moments8._map.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"moment_bits=8 needs torchao: pip install 'symexplin\[small\]'"):
        train(8, 1)
    moments8._map.cache_clear()
