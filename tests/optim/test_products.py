"""Packed scales: factors of rows and columns, and the gradients from kernels' sums, against the map of all entries."""

import itertools

import pytest
import torch
from torch import nn

import symexplin as sel
from builds import NEEDS_C
from networks import Experts, strong
from symexplin.kernels import cpu
from symexplin.optim.products import PackedScales, is_product

pytestmark = NEEDS_C
CONFIGS = {
    "paper": strong("paper"),
    "absorbed": strong("absorbed"),
    "absorbed, not normalized": strong("absorbed", normalize=False, n=sel.Scale("column")),
    "offset": strong("paper+offset", delta=sel.Scale()),
    "offsets, normalized": strong("congruent", n=sel.Scale("row_col_add", start=0.3), normalize=True),
    "signed": strong("paper", l=sel.Scale("column"), s=sel.Scale("row", start=1.3)),
    "numbers": strong("paper", mode="oppose", e=sel.Scale(start=1.5), l=sel.Scale("global"), s=sel.Scale(start=1.3)),
    "exp_only": strong("exp_only"),
    "linear": strong("structured_linear", s=sel.Scale("global")),
    "one number": strong("one_number"),
}
MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
    "experts": lambda: Experts(3, 4),
    "turned": lambda: nn.ModuleList([Experts(3, 4, is_transposed=True)]),
}


def entries_of(model, config):
    """Return the parameters of one orientation, weights first, with scales that are moved a little."""
    optimizer = sel.SELAdamW(model, config=config, total_steps=9)
    optimizer.create_state()
    entries = sorted(optimizer.entries(), key=lambda entry: "i" not in entry.axes)
    if any("io" in entry.axes for entry in entries):  # biases lie along the outputs of the others
        entries = [entry for entry in entries if "io" in entry.axes]
    generator = torch.Generator().manual_seed(0)
    for entry in entries:
        for name in entry.scales:
            entry.local_state(name).add_(0.2 * torch.randn(entry.local_state(name).shape, generator=generator))
    return entries


def matrices(entry, tensor):
    """Return the matrices of a tensor in the order of memory; a bias is one row."""
    parts = tensor.unbind() if "e" in entry.axes else [tensor]
    return [part.reshape(-1, part.shape[-1]) for part in parts]


# Each map in one order of memory, and the paper's in all.
@pytest.mark.parametrize(
    ("name", "model"), [*zip(CONFIGS, itertools.cycle(MODELS), strict=False), ("paper", "experts"), ("paper", "turned")]
)
def test_factors_and_their_gradients_are_those_of_the_map(name, model):
    torch.manual_seed(0)
    entries = entries_of(MODELS[model](), CONFIGS[name])
    assert all(is_product(entry.spec) for entry in entries)
    before = [{name: entry.local_state(name).clone() for name in entry.scales} for entry in entries]
    scales = PackedScales(entries, ("exp_avg", "exp_avg_sq"), cpu.load())
    for entry, old in zip(entries, before, strict=True):
        for key, value in old.items():
            assert torch.equal(entry.local_state(key), value)
            assert entry.local_state(key).untyped_storage().data_ptr() == scales.values.untyped_storage().data_ptr()

    rows, columns = scales.factors()
    sums = torch.zeros(rows.shape, dtype=torch.float64), torch.zeros(columns.shape, dtype=torch.float64)
    chosen = set(map(id, entries))
    starts = iter(zip(scales.starts(0, chosen), scales.starts(1, chosen), strict=True))
    exact = []
    for entry in entries:
        curved = entry.curved_weight()
        gradient = torch.randn(curved.raw.shape)
        exact.append(curved.vjp()[1](gradient)[1])
        parts = (matrices(entry, x.double()) for x in (curved.effective(), curved.raw, gradient))
        for value, w, g in zip(*parts, strict=True):
            i, j = next(starts)
            of = rows[:, i : i + len(w)].double(), columns[:, j : j + w.shape[1]].double()
            kappa, c, linear = (torch.outer(*pair) for pair in zip(*of, strict=True))
            x, sign = kappa * w.abs(), torch.sign(w)
            u = w.abs() if entry.spec.config.mode == "mismatch" else w
            torch.testing.assert_close(sign * c * torch.expm1(x) + linear * u, value, rtol=1e-5, atol=1e-7)
            is_normalized = entry.spec.config.normalize
            difference = x * torch.exp(x) - torch.expm1(x)
            by = [g * sign * torch.expm1(x), g * sign * difference if is_normalized else g * w * torch.exp(x), g * u]
            for side, dim in ((0, 1), (1, 0)):
                other = [line.unsqueeze(1 - dim) for line in of[1 - side]]
                times = [other[1], other[1] if is_normalized else other[1] * other[0], other[2]]
                at = slice(i, i + len(w)) if side == 0 else slice(j, j + w.shape[1])
                sums[side][:, at] += torch.stack([(part * t).sum(dim) for part, t in zip(by, times, strict=True)])
    norm = scales.pull(sums, None)
    for entry, grads in zip(entries, exact, strict=True):
        for key, grad in grads.items():
            torch.testing.assert_close(entry.grads[key], grad, rtol=2e-4, atol=1e-5 * float(grad.abs().max()) + 1e-7)
    every = torch.cat([grad.flatten() for grads in exact for grad in grads.values()])
    torch.testing.assert_close(norm, every.norm(), rtol=1e-4, atol=0)


def test_scales_that_are_no_products_have_the_formulas():
    for pattern in ("row_col_add", "lora"):
        entry = entries_of(nn.Sequential(nn.Linear(3, 4)), strong("paper", e=sel.Scale(pattern)))[0]
        assert not is_product(entry.spec)
