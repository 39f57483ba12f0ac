import pytest
import torch

from symexplin.lab.norm import RMSNorm

EPS = 1e-3  # large, so that it matters


def drawn(shape=(3, 5, 8), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, *shape, generator=generator, dtype=dtype)
    norm = RMSNorm(shape[-1], eps=EPS, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(shape[-1], generator=generator, dtype=dtype))
    return norm, x.requires_grad_(), grad


def formula(x, weight):
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32_by_torch(dtype):
    """The squares of 512 entries of 20 leave float16."""
    norm = RMSNorm(512, eps=EPS, dtype=dtype)
    x = torch.full((2, 512), 20.0, dtype=dtype, requires_grad=True)
    assert torch.equal(norm(x), torch.nn.functional.rms_norm(x, (512,), norm.weight, EPS))
    assert float(norm(x)[0, 0]) == pytest.approx(1.0, abs=1e-2)


def test_a_single_row_and_a_backward_pass_under_autocast():
    norm, x, grad = drawn((8,), torch.float32)
    (expected,) = torch.autograd.grad(formula(x, norm.weight), x, grad)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(norm(x), x, grad)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strided", [False, True])
def test_value_and_gradients_are_the_formulas(strided):
    norm, x, grad = drawn()
    given = x.transpose(0, 1) if strided else x
    grad = grad.transpose(0, 1) if strided else grad
    found, expected = norm(given), formula(given, norm.weight)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    for mine, theirs in zip(
        torch.autograd.grad(found, (x, norm.weight), grad),
        torch.autograd.grad(expected, (x, norm.weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [0.0, 1e-12, 1e12])
def test_float32_rounds_as_torchs_layer_does(factor):
    norm, x, grad = drawn(dtype=torch.float32)
    x = (x.detach() * factor).requires_grad_()
    theirs = torch.nn.functional.rms_norm(x, (8,), norm.weight, EPS)
    torch.testing.assert_close(norm(x), theirs)
    first, second = (torch.autograd.grad(y, x, grad)[0] for y in (norm(x), theirs))
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6 * float(second.abs().max()))


def test_no_gradient_keeps_nothing_and_changes_no_bit():
    norm, x, _ = drawn()
    with torch.no_grad():
        found = norm(x)
    assert not found.requires_grad
    assert torch.equal(found, norm(x))
