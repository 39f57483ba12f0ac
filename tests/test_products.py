"""Factors of rows and columns, and the gradients from kernels' sums, against the map of all entries in float64."""

import pytest
import torch

import symexplin as sel
from networks import strong
from symexplin.curve import Curved, Map, sides
from symexplin.products import (
    fixed_factors,
    is_product,
    kernel_factors,
    learned_factors,
    number_gradients,
    side_names,
)

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
}


@pytest.mark.parametrize(("shape", "axes"), [((4, 3), "oi"), ((3, 4), "io"), ((5,), "o")], ids=["oi", "io", "bias"])
@pytest.mark.parametrize("name", CONFIGS)
def test_factors_and_their_gradients_are_those_of_the_map(name, shape, axes):
    generator = torch.Generator().manual_seed(0)
    spec = Map.of(shape, axes, CONFIGS[name])
    assert is_product(spec)

    def drawn(*size):
        return torch.randn(size, dtype=torch.float64, generator=generator)

    learned = {name: x + 0.2 * drawn(*x.shape) for name, x in spec.start(torch.float64, torch.device("cpu"), 0).items()}
    counts = dict(zip((True, False), sides(axes, shape), strict=True))

    def matrix(tensor):
        """Outputs by inputs."""
        return (tensor.mT if axes == "io" else tensor).reshape(*counts.values())

    curved, gradient = Curved(spec, 0.1 * drawn(*shape), learned), drawn(*shape)
    value, (_, exact) = matrix(curved.effective()), curved.pullback(gradient)
    w, g = matrix(curved.raw), matrix(gradient)

    names, fixed, own, factors = {}, {}, {}, {}
    for side, count in counts.items():
        names[side] = side_names(spec, side)
        own[side] = {role: learned[name].expand(count) for role, name in names[side].items()}
        own[side] = learned_factors(spec, own[side])
        fixed[side] = torch.tensor(fixed_factors(spec, side), dtype=torch.float64).view(3, 1).expand(3, count)
        factors[side] = kernel_factors(spec, fixed[side], own[side])
    kappa, c, linear = (torch.outer(*pair) for pair in zip(*factors.values(), strict=True))
    x, sign = kappa * w.abs(), torch.sign(w)
    u = w.abs() if spec.config.mode == "mismatch" else w
    torch.testing.assert_close(sign * c * torch.expm1(x) + linear * u, value, rtol=1e-12, atol=0)

    by_c, by_kappa = g * sign * torch.expm1(x), g * sign * (x * torch.exp(x) - torch.expm1(x))
    found = {}
    for side, dim in ((True, 1), (False, 0)):
        _, c, slope = (line.view((1, -1) if dim else (-1, 1)) for line in factors[not side])
        sums = torch.stack([(part * by).sum(dim) for part, by in ((by_c, c), (by_kappa, c), (g * u, slope))])
        grads = number_gradients(spec, fixed[side], own[side], factors[side], sums)
        for role, name in names[side].items():
            found[name] = grads[role].sum().view(exact[name].shape) if exact[name].numel() == 1 else grads[role]
    assert found.keys() == exact.keys()
    for name, grad in exact.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-12)


def test_a_linear_map_has_no_exponential():
    """One would be infinite for large weights, or for a tiny kappa made of slow denormal numbers."""
    kappa, c, _ = fixed_factors(Map.of((4, 3), "oi", CONFIGS["linear"]), True)
    assert (kappa, c) == (0.0, 0.0)
