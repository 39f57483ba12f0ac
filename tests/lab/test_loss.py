import pytest
import torch
from torch.nn import functional

from symexplin.lab.model import chunked_loss, cross_entropy


def drawn(dtype=torch.float64, ignored=(3, 9)):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 8, generator=generator, dtype=dtype)
    weight = torch.randn(5, 8, generator=generator, dtype=dtype)
    targets = torch.randint(5, (11,), generator=generator)
    targets[list(ignored)] = -100
    return x.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("chunk", [1, 4, 11, 50])
def test_chunks_give_the_loss_and_the_gradients_of_all_at_once(chunk):
    x, weight, targets = drawn()
    kept = targets >= 0
    expected = -(x @ weight.T).log_softmax(-1)[kept].gather(1, targets[kept, None]).mean()
    found = chunked_loss(x, weight, targets, chunk)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0.0)
    for mine, theirs in zip(
        torch.autograd.grad(3.0 * found, (x, weight)), torch.autograd.grad(3.0 * expected, (x, weight)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        torch.testing.assert_close(chunked_loss(x, weight, targets, chunk), expected, rtol=1e-13, atol=0.0)


def test_logits_exist_a_chunk_at_a_time(monkeypatch):
    sizes, linear = [], functional.linear
    monkeypatch.setattr(functional, "linear", lambda a, b: sizes.append(len(a)) or linear(a, b))
    chunked_loss(*drawn(), 4)
    assert sizes == [4, 4, 3]


def test_autocast_is_close_and_the_loss_and_gradients_keep_float32():
    x, weight, targets = drawn(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_loss(x, weight, targets, 4)
        whole = cross_entropy(functional.linear(x, weight), targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=0.0)
    grads = torch.autograd.grad(found, (x, weight))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    for mine, theirs in zip(grads, torch.autograd.grad(whole, (x, weight)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.002)


def test_nothing_to_predict_is_not_a_number_as_in_torch():
    x, weight, targets = drawn(ignored=range(11))
    loss = chunked_loss(x.requires_grad_(), weight.requires_grad_(), targets, 4)
    assert loss.isnan()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, (x, weight)))
    assert cross_entropy(x @ weight.T, targets).isnan()
