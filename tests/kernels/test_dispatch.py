"""Which path computes the map: the choice by variable and by block, and what every path must give."""

import pytest
import torch

import symexplin as sel
from networks import ELEMENTWISE
from symexplin.coordinates import Coordinates
from symexplin.kernels import backend_for, describe, using
from symexplin.layout import Layout


def test_a_block_goes_before_the_variable(monkeypatch):
    monkeypatch.setenv("SYMEXPLIN_KERNELS", "readable")
    assert backend_for("cpu") is None
    assert describe("cpu") == "readable formulas"
    with using("auto"):
        found = backend_for("cpu")
        with using("readable"):
            assert backend_for("cpu") is None
        assert backend_for("cpu") is found
    monkeypatch.delenv("SYMEXPLIN_KERNELS")
    assert backend_for("cpu") is found


def test_a_wrong_choice_is_named(monkeypatch):
    with pytest.raises(ValueError, match="choice must be one of 'auto', 'readable', got 'fast'"), using("fast"):
        pass
    monkeypatch.setenv("SYMEXPLIN_KERNELS", "fast")
    with pytest.raises(ValueError, match="SYMEXPLIN_KERNELS must be one of 'auto', 'readable', got 'fast'"):
        backend_for("cpu")


def test_a_device_without_kernels_has_the_readable_formulas():
    assert backend_for("meta") is None


@pytest.mark.parametrize("config", [sel.preset("paper"), ELEMENTWISE, sel.preset("structured_linear")])
def test_rows_at_a_time_is_the_whole(config):
    """The readable formulas go through a CPU's cache a few rows at a time: each entry as if computed at once."""
    layout = Layout((333, 257), "oi", config)
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(layout.shape, generator=generator, dtype=torch.float64) / 10
    g = torch.randn(layout.shape, generator=generator, dtype=torch.float64)
    panels = layout.start_panels(torch.float64, raw.device, 0)
    panels = {k: p + 0.1 * torch.rand(p.shape, generator=generator, dtype=p.dtype) for k, p in panels.items()}
    leaves = [t.requires_grad_() for t in (raw, *panels.values())]
    whole = Coordinates(layout, *leaves).effective()  # autograd records it: not cut up, and no kernel
    grads = torch.autograd.grad(whole, leaves, g, allow_unused=True)
    with using("readable"), torch.no_grad():
        coordinates = Coordinates(layout, *leaves)
        value, pulled = coordinates.effective(), coordinates.pullback(g)
    torch.testing.assert_close(value, whole, rtol=1e-14, atol=1e-15)
    for ours, theirs in zip(pulled[1:], grads, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_tensors_that_autograd_watches_are_recorded():
    layout = Layout((3, 5), "oi", sel.preset("paper"))
    panels = layout.start_panels(torch.float32, torch.device("cpu"), 0)
    raw = torch.full((3, 5), 0.1, requires_grad=True)
    assert Coordinates(layout, raw, **panels).effective().requires_grad
