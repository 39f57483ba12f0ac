"""The kernels in C and in Triton against mpmath, float64 and autograd."""

import contextlib
import math

import mpmath
import numpy as np
import pytest
import torch

from builds import BUILDS, TRITON, kernels
from reference import noise
from states import STATES
from symexplin.kernels.interface import FactoredMap, Rates, Tensors

EPS = 2.0**-24
RATES = Rates(1e-2, 0.1, 0.9, 0.99, 1e-2, 1 - 0.9**5, 1 - 0.99**5)
CURVE = (7.5, 1 / 7.5)
PAPER = FactoredMap("mismatch", False, False, 7.5)
SIZES = (1, 100, 256, 20_000, 0)


@pytest.fixture(params=[*BUILDS, TRITON], ids=lambda build: "-".join(filter(None, build)))
def build(request):
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield kernels(*request.param)
    torch.set_num_threads(threads)


def norm(build, v, g, masters, curve):
    moments = [torch.zeros_like(x, dtype=torch.float32) for x in v]
    return build.plan(curve, Tensors(v, moments, moments, masters)).pull(g)


def update(build, v, g, m, s, masters, curve, rates, clip, noise=None):
    build.plan(curve, Tensors(v, m, s, masters)).update(g, rates, torch.tensor(clip), noise)


@pytest.mark.parametrize("largest", [0.29, 80.0], ids=["small", "large"])
def test_one_step_is_exact_to_two_units_of_the_terms_that_are_added(build, largest):
    mpmath.mp.prec = 160
    for _ in range(8):
        c = float(torch.empty(()).uniform_(-4, 2).exp2())
        v = torch.cat([10 ** torch.empty(150).uniform_(-30, 20), 3 * c * torch.rand(150), torch.zeros(2)])
        v = v * torch.randn(v.shape).sign()  # the zeros have both signs, too
        x = 10 ** torch.empty(v.shape).uniform_(-8, math.log10(largest)) * torch.randn(v.shape).sign()
        # Exact exponents: with betas and second moments 1, Adam's direction is the first moment.
        weight, m, rates = v.clone(), -x * torch.where(v < 0, -1.0, 1.0), Rates(1.0, 0.0, 1.0, 1.0, 1e-30, 1.0, 1.0)
        update(build, [weight], [torch.zeros_like(v)], [m], [torch.ones_like(v)], None, (1.0, c), rates, 1.0)
        near, again = x.abs() < 0.29, v[x.abs() < 0.29]  # the neighbors' steps change no bit
        lists = torch.zeros_like(again), -x[near] * torch.where(again < 0, -1.0, 1.0), torch.ones_like(again)
        update(build, [again], *([y] for y in lists), None, (1.0, c), rates, 1.0)
        assert same_bits([again], [weight[near]])
        for start, step, got in zip(v.tolist(), x.tolist(), weight.tolist(), strict=True):
            size, e, f = abs(mpmath.mpf(start)), mpmath.exp(step), mpmath.expm1(step)
            t = size * e + c * f
            share = 1 if t >= 0 else c / (e * (c + size))
            exact = mpmath.sign(start or 1) * t * share
            terms = (size + (c + size) * abs(f) if abs(step) < 0.3 else size * e + c * abs(f)) * share
            if abs(exact) < 3e38:
                assert abs(got - exact) <= 5 * EPS * terms, (start, step, c, got, float(exact))


def reference(v, g, m, s, rates, clip, curve):
    """One step in float64 by the formulas: weight, moments and the size of the step."""
    kappa, c = curve or (1.0, 1.0)
    raw = clip * g * (kappa * (c + v.abs()) if curve else 1)
    m, s = m + (raw - m) * (1 - rates.beta1), s * rates.beta2 + (1 - rates.beta2) * raw**2
    u = m / rates.correction1 / ((s / rates.correction2).sqrt() + rates.eps)
    if curve is None:
        return v * (1 - rates.lr * rates.decay) - rates.lr * u, m, s, rates.lr * u.abs()
    sign = torch.where(v < 0, -1.0, 1.0)
    x = -kappa * rates.lr * u * sign - rates.lr * rates.decay * torch.log1p(v.abs() / c)
    t = v.abs() + (c + v.abs()) * torch.expm1(x)
    other = (v.abs() - c * torch.expm1(-x)) * c / (c + v.abs())
    return sign * torch.where(t >= 0, t, other), m, s, x.abs()


def start(dtype=torch.float32):
    """Return weights, gradients and moments; some weights are outliers."""
    v = [(torch.randn(n) * torch.tensor([0.02, 0.02, 3.0])[torch.arange(n) % 3]).to(dtype) for n in SIZES]
    g = [torch.randn(n).to(dtype) for n in SIZES]
    return v, g, [0.1 * torch.randn(n) for n in SIZES], [0.01 + torch.rand(n) for n in SIZES]


@pytest.mark.parametrize("curve", [CURVE, (30.0, 0.4), None], ids=["default", "scaled", "plain"])
@pytest.mark.parametrize("change", [{}, {"lr": 0.3, "beta1": 0.2}, {"decay": 30.0}, {"decay": 0.0}], ids=str)
def test_steps_follow_float64(build, curve, change):
    (v, g, m, s), rates = start(), RATES._replace(**change)
    v[1][:2] = torch.tensor([0.0, -0.0])
    exact = [[x.double() for x in line] for line in zip(v, g, m, s, strict=True)]
    kappa, c = curve or (1.0, 1.0)
    raw = torch.cat([g * (kappa * (c + v.abs()) if curve else 1) for v, g, *_ in exact])
    torch.testing.assert_close(norm(build, v, g, None, curve), (raw**2).sum().sqrt(), rtol=1e-6, atol=0)
    update(build, v, g, m, s, None, curve, rates, 0.7)
    for got_v, got_m, got_s, line in zip(v, m, s, exact, strict=True):
        new, new_m, new_s, size = reference(*line, rates, 0.7, curve)
        torch.testing.assert_close(got_m.double(), new_m, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got_s.double(), new_s, rtol=1e-6, atol=0)
        assert ((got_v - new).abs() <= 3e-6 * (c * size.clamp(max=1) + line[0].abs() + new.abs()) * (1 + size)).all()


def same_bits(a, b):
    return all(
        x.reshape(-1).view(torch.int16).equal(y.reshape(-1).view(torch.int16)) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("curve", [CURVE, None], ids=["curved", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rate_of_zero_changes_the_moments_alone(build, curve, dtype):
    v, g, m, s = start(dtype)
    v[1][0] = -0.0
    masters = None if dtype == torch.float32 else [x.float() for x in v]
    before, before_m = [x.clone() for x in (*v, *(masters or ()))], [x.clone() for x in m]
    update(build, v, g, m, s, masters, curve, RATES._replace(lr=0.0), 1.0)
    assert same_bits(before, [*v, *(masters or ())])
    assert [x.equal(y) for x, y in zip(before_m, m, strict=True)] == [False] * 4 + [True]  # the last is empty


def test_bfloat16_follows_its_master_and_adopts_writes(build):
    v, g, m, s = start(torch.bfloat16)
    masters = [x.float() + 1e-5 * torch.randn(x.shape) for x in v]
    for weight, master in zip(v, masters, strict=True):
        weight.copy_(master)
    masters[3][100:].view(torch.int32).bitwise_and_(-0x8000).bitwise_or_(0x8000)  # halfway between two numbers
    v[3].copy_(masters[3])
    v[3][5:70] = 1.5  # written from outside
    expected = [torch.where(w == x.bfloat16(), x, w.float()) for w, x in zip(v, masters, strict=True)]
    moments = [[x.clone() for x in xs] for xs in (m, s)]
    exact = norm(build, expected, [x.float() for x in g], None, CURVE)
    torch.testing.assert_close(norm(build, v, g, masters, CURVE), exact, rtol=1e-6, atol=0)
    update(build, v, g, m, s, masters, CURVE, RATES, 0.5)
    update(build, expected, [x.float() for x in g], *moments, None, CURVE, RATES, 0.5)
    assert same_bits(masters, expected)
    assert same_bits(v, [x.bfloat16() for x in expected])


@pytest.mark.parametrize("curve", [CURVE, None], ids=["curved", "plain"])
def test_stochastic_rounding_depends_on_the_whole_tensors_indices_alone(build, curve):
    """A tensor of 37 x 50 whose first index is near 2^32, whole and in shards of rows and of columns."""
    rows, cols, offset, key = 37, 50, 2**32 - 900, 0x9ABCDEF0
    v, g = (0.02 * torch.randn(rows, cols)).bfloat16(), torch.randn(rows, cols).bfloat16()
    v[3, 4] = float("inf")
    rates = RATES._replace(lr=0.05)  # some exponents are large, others small

    def step(part, *, at, stride):
        weight = v[part].clone(memory_format=torch.contiguous_format)
        moments = torch.zeros(weight.shape), torch.zeros(weight.shape)
        line = [(key, offset + at, weight.shape[1], stride)]
        update(build, [weight], [g[part].contiguous()], *([x] for x in moments), None, curve, rates, 1.0, line)
        return weight

    whole = step((slice(None), slice(None)), at=0, stride=cols)
    parts = [step((slice(a, b), slice(None)), at=a * cols, stride=cols) for a, b in ((0, 1), (1, 20), (20, 37))]
    assert same_bits([whole], [torch.cat(parts)])
    parts = [step((slice(None), slice(a, b)), at=a, stride=cols) for a, b in ((0, 7), (7, 50))]
    assert same_bits([whole], [torch.cat(parts, 1)])
    exact, zeros = v.float(), torch.zeros(rows, cols)
    update(build, [exact], [g.float()], [zeros], [zeros.clone()], None, curve, rates, 1.0)
    bits = exact.view(torch.int32).flatten().tolist()
    rounded = [(bit + noise(key, offset + i) >> 16) & 0xFFFF for i, bit in enumerate(bits)]
    finite = exact.isfinite().flatten()
    assert whole.view(torch.uint16).flatten()[finite].tolist() == torch.tensor(rounded)[finite].tolist()
    assert whole.isfinite().flatten().equal(finite)


@pytest.mark.parametrize("curve", [CURVE, None], ids=["curved", "plain"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(build, curve, bad):
    for place in (0, 1):  # the weight, the gradient
        lists = start()
        lists[place][3][77] = bad
        assert norm(build, *lists[:2], None, curve).isfinite() == (curve is None and place == 0)
        update(build, *lists, None, curve, RATES, 1.0)
        wrong = [(~x.isfinite()).nonzero().flatten().tolist() for x in lists[0]]
        assert wrong == [[], [], [], [77], []]


def test_the_number_of_threads_changes_no_bit(build):
    if build.name.startswith("Triton"):
        pytest.skip("Triton has no threads")

    def run(count):
        torch.manual_seed(0)
        torch.set_num_threads(count)
        lists = [[torch.rand(n) for n in (300_000, 5, 70_001)] for _ in range(4)]
        found = [norm(build, lists[0], lists[1], None, CURVE)]
        update(build, *lists, None, CURVE, RATES, 1.0)
        raws, weights, *others = matrices(PAPER, ((700, 600), (300, 30)), torch.float32)
        plan, gradients = plan_of(build, PAPER, raws, weights, *others)
        grads = [torch.randn(x.shape) for x in raws]
        total = plan.pull(grads)
        plan.update(grads, RATES, None)
        learned = [x for line in gradients for x in line if x is not None]
        return [*found, total, *lists[0], *lists[2], *learned, *raws, *weights]

    assert same_bits(run(1), run(2))


def steps_of_both(build, planning=contextlib.nullcontext, stepping=contextlib.nullcontext):
    torch.manual_seed(0)
    lists = [[x[1]] for x in start()]
    raws, weights, *others = matrices(PAPER, ((9, 40),), torch.float32)
    grads, clip = [torch.randn(x.shape) for x in raws], torch.tensor(0.3)
    with planning():
        closed = build.plan(CURVE, Tensors(lists[0], *lists[2:]))
        factored, gradients = plan_of(build, PAPER, raws, weights, *others)
    with stepping():
        norms = [closed.pull(lists[1]), factored.pull(grads)]
        closed.update(lists[1], RATES, clip)
        factored.update(grads, RATES, clip)
    learned = [x for line in gradients for x in line if x is not None]
    return [*norms, *lists[0], *lists[2], *raws, *weights, *learned]


def test_the_state_of_the_process_changes_no_bit(build):
    usual = steps_of_both(build)
    for name, state in (STATES | {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)}).items():
        assert same_bits(usual, steps_of_both(build, planning=state)), name
        assert same_bits(usual, steps_of_both(build, stepping=state)), name


def terms(map, raw, vectors):
    """The curved and the linear pathway in float64, and kappa |w|."""

    def total(role, start, combine):
        row, column = vectors[2 * role : 2 * role + 2]
        out = torch.tensor(start, dtype=torch.float64)
        out = out if row is None else combine(out, row[:, None])
        return out if column is None else combine(out, column)

    kappa = total(2, map.m, lambda a, b: a * (b.exp() if map.absorbed else b)) * (1 if map.absorbed else map.beta)
    share = map.s / (kappa if map.normalize else map.beta)
    c = share * total(0, map.e, torch.mul) * torch.exp(-total(3, map.n, torch.add))
    lam = share * total(1, map.l, torch.mul) * {"exp_only": 0, "oppose": -1}.get(map.mode, 1)
    x = kappa * raw
    curved = torch.where(x >= 0, torch.expm1(x), -torch.expm1(-x))  # has the slope of both sides at 0
    return c * curved, lam * (raw.abs() if map.mode == "mismatch" else raw), x.abs()


def effective(map, raw, vectors):
    return sum(terms(map, raw, vectors)[:2])


def matrices(map, shapes, dtype, learned=range(6)):
    """Return raw weights, weights, moments and learned vectors."""
    raws, vectors = [0.05 * torch.randn(shape) for shape in shapes], []
    raws[0].view(-1)[:3] = torch.tensor([0.0, -0.0, 1.5])
    for shape in shapes:
        sizes = [None if len(shape) == 1 else shape[0], shape[-1]] * 4
        line = [torch.randn(size) if size is not None and i in learned else None for i, size in enumerate(sizes)]
        ranges = [(1, 0.3)] * 4 + [(0.3, 0.1) if map.absorbed else (1, 0.2)] * 2 + [(0, 0.3)] * 2
        vectors.append(tuple(x if x is None else a + b * x for x, (a, b) in zip(line, ranges, strict=True)))
    weights = [effective(map, *double(raw, line)).to(dtype) for raw, line in zip(raws, vectors, strict=True)]
    return raws, weights, [0.1 * torch.randn(s) for s in shapes], [0.5 + torch.rand(s) for s in shapes], vectors


def plan_of(build, map, raws, weights, exp_avgs, exp_avg_sqs, vectors):
    gradients = [tuple(None if x is None else torch.empty_like(x) for x in line) for line in vectors]
    return build.plan(map, Tensors(weights, exp_avgs, exp_avg_sqs, raws), vectors, gradients), gradients


def double(raw, vectors):
    return raw.double(), tuple(None if x is None else x.double() for x in vectors)


MAPS = {
    "paper": (PAPER, range(6)),
    "paper, steep linear": (PAPER._replace(l=1e5), range(6)),  # the weight says little of the exponential
    "congruent with n and s": (FactoredMap("congruent", False, False, 7.5, s=1.3), range(8)),
    "oppose, some fixed": (FactoredMap("oppose", False, False, 4.0, e=2.0, l=0.4, n=0.2), (4, 7)),
    "exp_only": (FactoredMap("exp_only", False, False, 7.5), (0, 1, 4, 5)),
    "no exponential": (FactoredMap("congruent", False, False, 1.0, e=0.0, m=0.0, s=1.3), (2, 3)),
    "normalized": (FactoredMap("mismatch", True, False, 7.5), range(8)),
    "absorbed": (FactoredMap("mismatch", True, True, 7.5), range(6)),
    "absorbed, not normalized": (FactoredMap("congruent", False, True, 7.5), range(6)),
}
SHAPES = ((37, 70), (600, 3), (90,), (1, 200), (5, 64))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factored_maps_follow_autograd(build, name, dtype):
    map, learned = MAPS[name]
    raws, weights, exp_avgs, exp_avg_sqs, vectors = matrices(map, SHAPES, dtype, learned)
    if vectors[0][0] is not None:
        vectors[0][0][4] = 0.0  # a scale of zero has a gradient
    weights[0].copy_(effective(map, *double(raws[0], vectors[0])))
    grads = [torch.randn(shape).to(dtype) for shape in SHAPES]
    plan, gradients = plan_of(build, map, raws, weights, exp_avgs, exp_avg_sqs, vectors)
    norm = plan.pull(grads)
    exact_raw, total = [], 0.0
    for raw, g, line, got in zip(raws, grads, vectors, gradients, strict=True):
        leaves = [x.requires_grad_() for x in (raw.double(), *(x.double() for x in line if x is not None))]
        parts = iter(leaves[1:])
        value = effective(map, leaves[0], tuple(None if x is None else next(parts) for x in line))
        first, *rest = torch.autograd.grad(value, leaves, g.double())
        exact_raw.append(first)
        total += float((first**2).sum())
        for ours, exact in zip([x for x in got if x is not None], rest, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=3e-6 * float(exact.abs().max() + 1))
    torch.testing.assert_close(float(norm), total**0.5, rtol=1e-5, atol=0)
    before = [[x.double() for x in xs] for xs in (raws, exp_avgs, exp_avg_sqs)]
    torch._foreach_mul_([x for line in vectors for x in line if x is not None], 1.1)  # the caller's step of the scales
    plan.update(grads, RATES, torch.tensor(0.3))
    for i, g in enumerate(exact_raw):
        raw, m, *_ = reference(before[0][i], g, before[1][i], before[2][i], RATES, 0.3, None)
        torch.testing.assert_close(exp_avgs[i].double(), m, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(raws[i].double(), raw, rtol=1e-6, atol=1e-6)
        curved, linear, x = terms(map, *double(raws[i], vectors[i]))
        unit = EPS * (8 + 4 * x) + (2.0**-8 if dtype == torch.bfloat16 else 0)
        assert ((weights[i].double() - (curved + linear)).abs() <= unit * (curved.abs() + linear.abs())).all()


def test_empty_shards_and_a_rate_of_zero(build):
    raws, weights, exp_avgs, *others = matrices(PAPER, (*SHAPES, (0, 5), (4, 0)), torch.float32)
    before, moments = [x.clone() for x in (*raws, *weights)], [x.clone() for x in exp_avgs]
    plan, gradients = plan_of(build, PAPER, raws, weights, exp_avgs, *others)
    grads = [torch.randn(x.shape) for x in raws]
    plan.pull(grads)
    assert gradients[-2][1].equal(torch.zeros(5))
    assert gradients[-1][0].equal(torch.zeros(4))
    plan.update(grads, RATES._replace(lr=0.0), None)
    assert same_bits(before, [*raws, *weights])
    assert not any(x.equal(y) for x, y in zip(moments[:-2], exp_avgs, strict=False))
    if not build.name.startswith("Triton"):
        assert float(norm(build, [], [], None, CURVE)) == 0


def test_denormals_survive_the_library(build):
    """A library linked with -ffast-math makes torch and numpy flush them to zero."""
    assert norm(build, [torch.ones(4)], [torch.ones(4)], None, None) == 2
    assert float(torch.tensor([1e-40]) * 0.5) > 0
    assert float(np.float32(1e-40) * np.float32(0.5)) > 0
