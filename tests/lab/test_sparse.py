"""L1, gradual pruning and held zeros: ten steps against float64 references, with and without a map."""

import pytest
import torch

import symexplin as sel
from symexplin.lab.config import TrainConfig
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.sparse import Sparsifier, matrices, prune_, soft_threshold_, sparsity_at

LR, L1, STEPS = 0.02, 0.4, 10


def weights_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * 0.1 for size in ((6, 8), (5, 6))]


def adamw(weights, grads, after, lr=LR):
    """AdamW without decay in float64; `after` (step, weights) changes the weights after each step."""
    weights = [w.double() for w in weights]
    m, v = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    for t, step in enumerate(grads, start=1):
        before = [w.clone() for w in weights]
        for i, grad in enumerate(step):
            g = grad.double()
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
            weights[i] = weights[i] - lr * (m[i] / (1 - 0.9**t)) / ((v[i] / (1 - 0.999**t)).sqrt() + 1e-8)
        weights = after(t, before, weights)
    return weights


def gradients(weights, steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(w.shape, generator=generator) for w in weights] for _ in range(steps)]


def trained(weights, grads, train, **options):
    weights = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=0.0)
    sparsifier = Sparsifier([w.detach() for w in weights], train, **options)
    for t, step in enumerate(grads, start=1):
        for weight, grad in zip(weights, step, strict=True):
            weight.grad = grad.clone()
        sparsifier.before_step()
        optimizer.step()
        sparsifier.after_step(t, LR)
    return [w.detach() for w in weights]


@pytest.mark.parametrize("falloff", [0.0, 20.0])
def test_l1_moves_by_the_rate_towards_zero_and_no_further(falloff):
    """With a falloff it is the gradient of the log-sum penalty, l1/falloff log(1 + falloff |w|)."""
    weights, grads = weights_of(), gradients(weights_of())

    def after(_, __, found):
        pulls = []
        for w in found:
            size = w.abs().requires_grad_()
            penalty = L1 * size if falloff == 0.0 else L1 / falloff * torch.log1p(falloff * size)
            pulls += torch.autograd.grad(penalty.sum(), size)
        return [w.sign() * (w.abs() - LR * pull).clamp(min=0) for w, pull in zip(found, pulls, strict=True)]

    got = trained(weights, grads, TrainConfig(steps=STEPS, l1=L1, l1_falloff=falloff))
    for a, b in zip(got, adamw(weights, grads, after), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
        assert bool((a == 0).any())


def test_gradual_pruning_follows_its_schedule_and_zeros_stay():
    """Zhu and Gupta's Eq. 1 with n dt the span from a tenth to three quarters of the steps: a share of all entries."""
    weights, grads = weights_of(), gradients(weights_of())
    shares = []

    def after(step, before, found):
        found = [w * (b != 0) for w, b in zip(found, before, strict=True)]
        x = min(1.0, max(0.0, (step / STEPS - 0.1) / 0.65))
        count = round((0.8 - 0.8 * (1 - x) ** 3) * sum(w.numel() for w in found))
        flat = torch.cat([w.flatten() for w in found])
        flat[flat.abs().argsort()[:count]] = 0.0
        shares.append(float((flat == 0).float().mean()))
        return [part.view_as(w) for part, w in zip(flat.split([w.numel() for w in found]), found, strict=True)]

    reference = adamw(weights, grads, after)
    got = trained(weights, grads, TrainConfig(steps=STEPS, sparsity=0.8))
    for a, b in zip(got, reference, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(0.8, abs=0.01)


def test_held_zeros_stay_and_the_others_move():
    weights = weights_of()
    prune_(weights, 0.5)
    got = trained(weights, gradients(weights), TrainConfig(steps=STEPS), hold=True)
    for a, b in zip(got, weights, strict=True):
        assert torch.equal(a == 0, b == 0)
        assert not torch.equal(a, b)


def test_pruning_takes_the_smallest_of_all_weights_together():
    weights = [torch.tensor([[0.1, -0.2], [3.0, 4.0]]), torch.tensor([[-5.0, 0.3, 6.0, 7.0]])]
    prune_(weights, 0.375)
    assert [w.tolist() for w in weights] == [[[0.0, 0.0], [3.0, 4.0]], [[-5.0, 0.0, 6.0, 7.0]]]


def test_the_schedule_ends_at_its_share():
    assert sparsity_at(0.05, 0.9) == 0.0
    assert sparsity_at(0.75, 0.9) == sparsity_at(1.0, 0.9) == 0.9


@pytest.mark.parametrize("mode", ["congruent", "mismatch"])
def test_stored_raw_weights_follow_what_is_set_to_zero(mode):
    """L1 acts on effective weights; the optimizer adopts them, so that the next step starts from them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    config = sel.SELConfig(mode=mode, beta=3.0)
    optimizer = sel.SELAdamW(model, LR, weight_decay=0.0, config=config)
    weight = model[0].weight
    for _ in range(5):
        weight.grad = torch.full_like(weight, 1e-3)
        optimizer.step()
        soft_threshold_([weight.detach()], 0.05)
    assert bool((weight == 0).any())
    optimizer.take_over_writes()
    raw = optimizer.state[weight]["raw"]
    torch.testing.assert_close(sel.functional.effective(raw, mode=mode, beta=3.0, l=0.4), weight.detach())


def test_only_matrices_of_the_blocks_become_sparse():
    model = Transformer(ModelConfig(width=16, depth=1, heads=2, context=8))
    found = {w.data_ptr() for w in matrices(model)}
    named = {name for name, p in model.named_parameters() if p.data_ptr() in found}
    kinds = {"attention.q", "attention.k", "attention.v", "attention.o", "ffn.gate", "ffn.up", "ffn.down"}
    assert named == {f"blocks.0.{kind}.weight" for kind in kinds}
