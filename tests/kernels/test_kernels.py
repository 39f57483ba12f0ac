"""The kernels in C and in Triton against mpmath, float64 and autograd."""

import functools
import itertools
import math
import platform
from contextlib import nullcontext
from typing import NamedTuple

import mpmath
import numpy as np
import pytest
import torch

from builds import CAPABILITIES, TRITON, kernels
from states import STATES, entered
from symexplin.closed import Closed
from symexplin.kernels import cpu
from symexplin.kernels.interface import Delta, Matrices, Rates, Tensors

EPS = 2.0**-24
RATES = Rates(1e-2, 0.1, 0.9, 0.99, 1e-2, 1 - 0.9**5, 1 - 0.99**5)
CLOSED, SCALED = Closed("exp_only", 7.5, 1 / 7.5), Closed("exp_only", 30.0, 0.4)
SIZES = (1, 100, 256, 20_000, 0)  # C has tasks of 2^14 entries, Triton programs of 2^11
WAYS = pytest.mark.parametrize("way", ["update", "push"])
MAPS = pytest.mark.parametrize("closed", [CLOSED, None], ids=["curved", "plain"])


@pytest.fixture(params=[*CAPABILITIES, TRITON])
def build(request, monkeypatch):
    if request.param == TRITON:  # whose interpreter is slow
        monkeypatch.setitem(globals(), "SIZES", (1, 100, 256, 3000, 0))
        monkeypatch.setitem(globals(), "SHAPES", ((70, 37), (90,), (1, 300)))
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield kernels(request.param)
    torch.set_num_threads(threads)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere there is one library")
def test_the_library_is_the_one_for_the_processor():
    levels = dict(zip(CAPABILITIES, ("v2", "v3", "v4"), strict=True))
    assert {name: cpu.path_of(name).stem for name in levels} == {k: f"cpu-x86-64-{v}" for k, v in levels.items()}
    loaded = cpu.load()
    assert loaded is None or loaded.name.endswith(levels[torch.backends.cpu.get_cpu_capability()])


def norm(build, v, g, masters, closed):
    plan = build.elementwise(closed, Tensors(v, masters=masters))
    plan.take(g)
    return plan.norm()


def update(build, v, g, m, s, masters, closed, rates, clip):
    build.elementwise(closed, Tensors(v, m, s, masters, g)).update(rates, torch.tensor(clip))


def push(build, v, g, masters, closed, steps=None, clip=1.0):
    """Add steps (or minus the gradients) to raw weights; return the old and new ones and the gradients, joined."""
    plan = build.elementwise(closed, Tensors(v, masters=masters))
    plan.take(g)
    values, grads = plan.pull(torch.tensor(clip))
    new = values + (-grads if steps is None else steps)
    plan.push(new)
    return [values, new, grads]


def same_bits(a, b):
    return all(
        x.reshape(-1).view(torch.int16).equal(y.reshape(-1).view(torch.int16)) for x, y in zip(a, b, strict=True)
    )


def stepped(build, way, v, x, c):
    """Return weights whose raw ones, of curvature 1, moved by x times their sign, and the exact x."""
    weight, zero, sign = v.clone(), torch.zeros_like(v), torch.where(v < 0, -1.0, 1.0)
    if way == "push":
        before, after, _ = push(build, [weight], [zero], None, Closed("exp_only", 1.0, c), x * sign)
        return weight, (after - before) * sign
    # With betas and second moments 1, Adam's direction is the first moment.
    moments, rates = (-x * sign, torch.ones_like(v)), Rates(1.0, 0.0, 1.0, 1.0, 1e-30, 1.0, 1.0)
    update(build, [weight], [zero], *([y] for y in moments), None, Closed("exp_only", 1.0, c), rates, 1.0)
    return weight, x


@WAYS
@pytest.mark.parametrize("largest", [0.29, 80.0], ids=["small", "large"])
def test_one_step_is_exact_to_two_units_of_the_terms_that_are_added(build, largest, way):
    mpmath.mp.prec = 160
    for _ in range(3):
        c = float(torch.empty(()).uniform_(-4, 2).exp2())
        v = torch.cat([10 ** torch.empty(150).uniform_(-30, 20), 3 * c * torch.rand(150), torch.zeros(2)])
        v = v * torch.randn(v.shape).sign()  # the zeros have both signs, too
        x = 10 ** torch.empty(v.shape).uniform_(-8, math.log10(largest)) * torch.randn(v.shape).sign()
        weight, x = stepped(build, way, v, x, c)
        near = x.abs() < 0.29
        if way == "update":  # the neighbors' steps change no bit
            assert same_bits(stepped(build, way, v[near], x[near], c)[:1], [weight[near]])
        for start, step, got in zip(v.tolist(), x.tolist(), weight.tolist(), strict=True):
            size, e, f = abs(mpmath.mpf(start)), mpmath.exp(step), mpmath.expm1(step)
            t = size * e + c * f
            share = 1 if t >= 0 else c / (e * (c + size))
            exact = mpmath.sign(start or 1) * t * share
            terms = (size + (c + size) * abs(f) if abs(step) < 0.3 else size * e + c * abs(f)) * share
            if abs(exact) < 3e38:
                assert abs(got - exact) <= 5 * EPS * terms, (start, step, c, got, float(exact))


def reference(v, g, m, s, rates, clip, closed):
    """One step in float64 by the formulas: weight, moments and the size of the step."""
    kappa, c = (closed.kappa, closed.c) if closed else (1.0, 1.0)
    raw = clip * g * (kappa * (c + v.abs()) if closed else 1)
    m, s = m + (raw - m) * (1 - rates.beta1), s * rates.beta2 + (1 - rates.beta2) * raw**2
    u = m / rates.correction1 / ((s / rates.correction2).sqrt() + rates.eps)
    if closed is None:
        return v * (1 - rates.lr * rates.decay) - rates.lr * u, m, s, rates.lr * u.abs()
    sign = torch.where(v < 0, -1.0, 1.0)
    x = -kappa * rates.lr * u * sign - rates.lr * rates.decay * torch.log1p(v.abs() / c)
    return moved(v, x, c), m, s, x.abs()


def moved(v, x, c):
    """The weight when c + |v| is multiplied by exp(x)."""
    t = v.abs() + (c + v.abs()) * torch.expm1(x)
    other = (v.abs() - c * torch.expm1(-x)) * c / (c + v.abs())
    return torch.where(v < 0, -1.0, 1.0) * torch.where(t >= 0, t, other)


def start(dtype=torch.float32):
    """Return weights, gradients and moments; some weights are outliers."""
    v = [(torch.randn(n) * torch.tensor([0.02, 0.02, 3.0])[torch.arange(n) % 3]).to(dtype) for n in SIZES]
    g = [torch.randn(n).to(dtype) for n in SIZES]
    return v, g, [0.1 * torch.randn(n) for n in SIZES], [0.01 + torch.rand(n) for n in SIZES]


@pytest.mark.parametrize(
    ("closed", "change"),
    [
        *((CLOSED, change) for change in ({}, {"decay": 30.0})),
        (SCALED, {"lr": 0.3, "beta1": 0.2}),
        *((None, change) for change in ({"decay": 0.0}, {"lr": 0.3, "beta1": 0.2})),
    ],
    ids=str,
)
def test_updates_follow_float64(build, closed, change):
    (v, g, m, s), rates = start(), RATES._replace(**change)
    v[1][:2] = torch.tensor([0.0, -0.0])
    exact = [[x.double() for x in line] for line in zip(v, g, m, s, strict=True)]
    kappa, c = (closed.kappa, closed.c) if closed else (1.0, 1.0)
    raw = torch.cat([g * (kappa * (c + v.abs()) if closed else 1) for v, g, *_ in exact])
    torch.testing.assert_close(norm(build, v, g, None, closed).double(), raw.norm(), rtol=1e-6, atol=0)
    update(build, v, g, m, s, None, closed, rates, 0.7)
    for got_v, got_m, got_s, line in zip(v, m, s, exact, strict=True):
        new, new_m, new_s, size = reference(*line, rates, 0.7, closed)
        torch.testing.assert_close(got_m.double(), new_m, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got_s.double(), new_s, rtol=1e-6, atol=0)
        assert ((got_v - new).abs() <= 3e-6 * (c * size.clamp(max=1) + line[0].abs() + new.abs()) * (1 + size)).all()


@pytest.mark.parametrize("closed", [CLOSED, SCALED], ids=["default", "scaled"])
def test_pull_and_push_follow_float64(build, closed):
    (v, g, *_), (kappa, c) = start(), closed[1:]
    old, flat_g = torch.cat(v).double(), torch.cat(g).double()
    steps = 7.5 / kappa * torch.randn(len(old)) * torch.tensor([1e-4, 0.1, 2.0])[torch.arange(len(old)) % 3]
    before, after, grads = push(build, v, g, None, closed, steps, 0.7)
    exact = old.sign() * torch.log1p(old.abs() / c) / kappa
    torch.testing.assert_close(before.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(grads.double(), 0.7 * flat_g * kappa * (c + old.abs()), rtol=1e-6, atol=0)
    x = kappa * (after - before).double() * torch.where(old < 0, -1.0, 1.0)
    new, got, size = moved(old, x, c), torch.cat(v), x.abs()
    assert ((got - new).abs() <= 1e-6 * (c * size.clamp(max=1) + old.abs() + new.abs()) * (1 + size)).all()
    assert (got.sign() != old.sign()).sum() > len(old) / 10  # large steps cross zero


@WAYS
@MAPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_zero_keeps_every_bit(build, closed, dtype, way):
    """Of weights and masters; AdamW's moments move at a rate of zero."""
    v, g, m, s = start(dtype)
    v[1][0] = -0.0
    masters = None if dtype == torch.float32 else [x.float() for x in v]
    before, before_m = [x.clone() for x in (*v, *(masters or ()))], [x.clone() for x in m]
    if way == "update":
        update(build, v, g, m, s, masters, closed, RATES._replace(lr=0.0), 1.0)
        assert [x.equal(y) for x, y in zip(before_m, m, strict=True)] == [False] * 4 + [True]  # the last is empty
    elif closed is not None:
        push(build, v, g, masters, closed, torch.zeros(sum(SIZES)))
    assert same_bits(before, [*v, *(masters or ())])


@WAYS
def test_bfloat16_follows_its_master_and_adopts_writes(build, way):
    v, g, m, s = start(torch.bfloat16)
    masters = [x.float() + 1e-5 * torch.randn(x.shape) for x in v]
    for weight, master in zip(v, masters, strict=True):
        weight.copy_(master)
    masters[3][100:].view(torch.int32).bitwise_and_(-0x8000).bitwise_or_(0x8000)  # halfway between two numbers
    v[3].copy_(masters[3])
    v[3][5:70] = 1.5  # written from outside
    expected = [torch.where(w == x.bfloat16(), x, w.float()) for w, x in zip(v, masters, strict=True)]
    moments = [[x.clone() for x in xs] for xs in (m, s)]
    exact = norm(build, expected, [x.float() for x in g], None, CLOSED)
    torch.testing.assert_close(norm(build, v, g, masters, CLOSED), exact, rtol=1e-6, atol=0)
    if way == "update":
        update(build, v, g, m, s, masters, CLOSED, RATES, 0.5)
        update(build, expected, [x.float() for x in g], *moments, None, CLOSED, RATES, 0.5)
    else:
        moves = push(build, v, g, masters, CLOSED, clip=0.01)
        assert same_bits(moves, push(build, expected, [x.float() for x in g], None, CLOSED, clip=0.01))
    assert same_bits(masters, expected)
    assert same_bits(v, [x.bfloat16() for x in expected])


@pytest.mark.parametrize(
    ("closed", "way", "bad"),
    [(CLOSED, "update", math.inf), (None, "update", math.nan), (CLOSED, "push", math.nan), (CLOSED, "push", -math.inf)],
)
def test_what_is_not_finite_shows(build, closed, way, bad):
    for place in (0, 1):  # the weight, the gradient
        lists = start()
        lists[place][3][77] = bad
        assert norm(build, *lists[:2], None, closed).isfinite() == (closed is None and place == 0)
        if way == "update":
            update(build, *lists, None, closed, RATES, 1.0)
        else:
            push(build, *lists[:2], None, closed, clip=1e-3)
        wrong = [(~x.isfinite()).nonzero().flatten().tolist() for x in lists[0]]
        assert wrong == [[], [], [], [77], []]


class Products(NamedTuple):
    """Matrices with all that a plan is made of, and their gradients."""

    raws: list
    weights: list
    moments: list
    deltas: list | None
    factors: tuple
    grads: list

    @property
    def matrices(self):
        shapes = [(1 if w.dim() == 1 else len(w), w.shape[-1]) for w in self.weights]
        return list(zip(shapes, *(itertools.accumulate(n, initial=0) for n in zip(*shapes, strict=True)), strict=False))

    def plan(self, build, **kind):
        _, rows, columns = zip(*self.matrices, strict=True)
        counts = tuple(side.shape[1] for side in self.factors)
        kind = {"bfloat16": self.weights[0].dtype == BF16, "mismatch": True, "device": self.raws[0].device, **kind}
        kind |= {"deltas": self.deltas, "moments": self.moments}
        return build.products(Matrices(self.weights, self.raws, rows, columns, counts, **kind))

    def each(self, sides, *lists):
        """Yield of every matrix its part of the sides and its tensors in float64."""
        sides = tuple(sides)
        for i, ((rows, columns), row, column) in enumerate(self.matrices):
            lines = sides[0][:, row : row + rows], sides[1][:, column : column + columns]
            yield lines, *(line[i].double().view(rows, columns) for line in lists)

    def step(self, plan, factors, clip):
        """Take every way through a step; return the results but for those in the tensors."""
        plan.take(self.grads)
        total, sums = plan.norm(self.factors)
        pulled = plan.pull(clip, self.factors)
        plan.push(factors)
        weights = [w.clone() for w in self.weights]
        plan.update(RATES, clip, self.factors, factors)
        return total, sums, pulled, weights

    @property
    def tensors(self):
        gradients = [x for delta in self.deltas or () for x in (delta.by_a, delta.by_b)]
        return [*self.raws, *self.weights, *gradients, *itertools.chain(*self.moments)]


SHAPES = ((37, 70), (150, 3), (90,), (1, 200), (70, 320))
SIDES = {"kappa": (7.5, 1.0), "c": (1 / 7.5, 1.0), "lam": (1 / 7.5, 1.0)}  # means of rows' and columns' factors


def products(shapes=None, dtype=torch.float32, rank=2, **means):
    shapes = shapes or SHAPES
    raws = [0.05 * torch.randn(shape) for shape in shapes]
    raws[0].view(-1)[:3] = torch.tensor([0.0, -0.0, 1.5])
    sizes = [(1 if len(shape) == 1 else shape[0], shape[-1]) for shape in shapes]
    factors = [
        torch.stack([mean[side] * (1 + 0.2 * torch.randn(count)) for mean in (SIDES | means).values()])
        for side, count in enumerate(map(sum, zip(*sizes, strict=True)))
    ]
    factors[0][1, 4] = 0.0  # a scale of zero has a gradient
    pairs = [(0.1 * torch.randn(rows, rank), 0.1 * torch.randn(rank, columns)) for rows, columns in sizes]
    deltas = [Delta(a, b, torch.zeros_like(a), torch.zeros_like(b)) for a, b in pairs] if rank else None
    moments = [[0.1 * torch.randn(s) for s in shapes], [0.5 + torch.rand(s) for s in shapes]]
    grads = [torch.randn(shape).to(dtype) for shape in shapes]
    return Products(raws, [torch.empty(s, dtype=dtype) for s in shapes], moments, deltas, tuple(factors), grads)


FLOAT, BF16 = torch.float32, torch.bfloat16
CASES = {  # dtype, whether the linear pathway multiplies |w|, the rank of the delta, and means of the factors
    "mismatch, half": (BF16, True, 2, {}),
    "mismatch, steep linear": (FLOAT, True, 0, {"lam": (1e4, 1.0)}),
    "congruent": (BF16, False, 0, {}),
    "oppose": (FLOAT, False, 3, {"kappa": (4.0, 1.0), "lam": (-0.1, 2.0)}),
    "exp_only": (BF16, True, 0, {"kappa": (2.0, 3.0), "lam": (0.0, 0.0)}),
    "linear": (FLOAT, False, 1, {"kappa": (1e-20, 1e-20), "c": (0.0, 0.0), "lam": (2.0, 0.5)}),
}


def pathways(raw, rows, columns, mismatch):
    """The curved and the linear pathway from kappa, p and lambda of both sides, and kappa |w|."""
    kappa, p, lam = (torch.outer(*pair) for pair in zip(rows, columns, strict=True))
    x = kappa * raw
    curved = torch.where(x >= 0, torch.expm1(x), -torch.expm1(-x))  # has the slope of both sides at 0
    return p / kappa * curved, lam * (raw.abs() if mismatch else raw), x.abs()


# Triton's kernels meet the other choices with these; one that is not normalized they meet before their first use.
WITH_TRITON = ("mismatch, half", "oppose", "linear")


@pytest.mark.parametrize(
    ("build", "case"),
    [*itertools.product(CAPABILITIES, CASES), *((TRITON, case) for case in WITH_TRITON)],
    indirect=["build"],
)
def test_products_follow_autograd(build, case):
    dtype, mismatch, rank, means = CASES[case]
    normalized = case in ("mismatch, half", "oppose")
    # Without the interpreter also a matrix whose sums several tasks find, and rows of more than one strip.
    shapes = SHAPES if build.name.startswith("Triton") else (*SHAPES, (1000, 300), (5, 2500))
    given = products(shapes, dtype, rank, **means)
    new_factors = tuple(1.1 * side for side in given.factors)
    before = [[x.double() for x in xs] for xs in (given.raws, *given.moments)]
    plan = given.plan(build, mismatch=mismatch, normalized=normalized, exponential=case != "linear")
    clip = torch.tensor(0.3)
    total, sums, pulled, pushed = given.step(plan, new_factors, clip)

    sides = [of_kernel(side).requires_grad_() for side in given.factors]
    raws = [x.requires_grad_() for x in before[0]]
    pairs = [x.double().requires_grad_() for delta in given.deltas or () for x in delta[:2]]
    loss, bounds = 0.0, []
    for i, (lines, raw, grad) in enumerate(given.each(sides, raws, given.grads)):
        curved, linear, x = pathways(raw, *lines, mismatch)
        loss += (grad * (curved + linear + (pairs[2 * i] @ pairs[2 * i + 1] if rank else 0.0))).sum()
        _, steep, lam = (torch.outer(*pair).abs() for pair in zip(*lines, strict=True))
        bounds.append(grad.abs() * (steep * torch.exp(x) * (8 + 8 * x) + 4 * lam))
    raw_grads, side_grads, delta_grads = (
        torch.autograd.grad(loss, leaves, retain_graph=True) if leaves else () for leaves in (raws, sides, pairs)
    )

    exact = joined(raw_grads)
    torch.testing.assert_close(total.double(), exact.norm(), rtol=1e-5, atol=0)
    assert ((pulled - clip.double() * exact).abs() <= clip * EPS * joined(bounds)).all()
    ours = []
    for (kappa, p, _), by in zip([side.detach() for side in sides], sums, strict=True):
        by_c, by_kappa, by_linear = by.double()
        # With p constant, c = p/kappa changes as kappa does.
        ours += [(by_kappa if normalized else by_kappa * kappa - by_c) * p / kappa**2, by_c / kappa, by_linear]
    ours += [x.double() for delta in given.deltas or () for x in delta[2:]]
    for got, line in zip(ours, (*side_grads[0], *side_grads[1], *delta_grads), strict=True):
        torch.testing.assert_close(got, line, rtol=1e-4, atol=3e-6 * float(line.abs().max() + 1e-3))

    line = [joined(x) for x in before]
    raw, m, s, _ = reference(line[0].detach(), exact, *line[1:], RATES, 0.3, None)
    for got, expected in zip((given.raws, *given.moments), (raw, m, s), strict=True):
        torch.testing.assert_close(joined(got).double(), expected, rtol=1e-4, atol=1e-5)
    written = [(before[0], pushed), (given.raws, given.weights)]
    for values, weights in written:
        values = [x.detach() for x in values]
        for i, (lines, raw, got) in enumerate(given.each(map(of_kernel, new_factors), values, weights)):
            curved, linear, x = pathways(raw, *lines, mismatch)
            a, b = (y.double() for y in given.deltas[i][:2]) if rank else (raw[:, :1] * 0, raw[:1] * 0)
            unit = EPS * (8 + 4 * x) + (2.0**-8 if dtype == BF16 else 0)
            terms = curved.abs() + linear.abs() + a.abs() @ b.abs()
            assert ((got - (curved + linear + a @ b)).abs() <= unit * terms).all()


def of_kernel(side):
    """Kappa, p and lambda in float64 from the factors that kernels get."""
    kappa, c, lam = side.double()
    return torch.stack([kappa, c * kappa, lam])


def joined(tensors):
    return torch.cat([x.flatten() for x in tensors])


def test_matrices_without_entries_and_a_rate_of_zero(build):
    given = products((*SHAPES, (0, 5), (4, 0)))
    plan = given.plan(build)
    plan.take(given.grads)
    _, sums = plan.norm(given.factors)
    assert not sums[0][:, -4:].any()
    assert not sums[1][:, -5:].any()
    assert not any(x.any() for delta in given.deltas[-2:] for x in (delta.by_a, delta.by_b))
    before, moments = [x.clone() for x in (*given.raws, *given.weights)], [x.clone() for x in given.moments[0]]
    plan.update(RATES._replace(lr=0.0), None, given.factors, given.factors)
    assert same_bits(before, [*given.raws, *given.weights])
    assert not any(x.equal(y) for x, y in zip(moments[:-2], given.moments[0], strict=False))
    assert float(norm(build, [torch.empty(0)], [torch.empty(0)], None, CLOSED)) == 0
    plan = build.products(Matrices([], [], [], [], (0, 0), bfloat16=False, mismatch=True))
    plan.take([])
    assert float(plan.norm((torch.empty(3, 0), torch.empty(3, 0)))[0]) == 0


def everything(build, sizes=(100, 5), shapes=((9, 40), (3, 40)), planning=nullcontext, stepping=nullcontext):
    """Return all results of steps from one start."""
    torch.manual_seed(0)
    lists = [[torch.rand(n) for n in sizes] for _ in range(4)]
    others = [x.clone() for x in lists[0]]
    given, clip = products(shapes), torch.tensor(0.3)
    new = tuple(1.1 * side for side in given.factors)
    with planning():
        plans = build.elementwise(CLOSED, Tensors(lists[0], *lists[2:])), build.elementwise(CLOSED, Tensors(others))
        plan = given.plan(build)
    with stepping():
        for each in plans:
            each.take(lists[1])
        norms = [each.norm() for each in plans]
        plans[0].update(RATES, clip)
        values, grads = plans[1].pull(clip)
        plans[1].push(values - grads)
        total, sums, pulled, pushed = given.step(plan, new, clip)
    ours = [*norms, *lists[0], *lists[2], *lists[3], *others, values, grads]
    return [*ours, total, *sums, pulled, *pushed, *given.tensors]


def test_the_number_of_threads_changes_no_bit(build):
    if build.name.startswith("Triton"):
        pytest.skip("Triton has no threads")
    ends = []
    for count in (1, 2):
        torch.set_num_threads(count)
        ends.append(everything(build, (300_000, 5, 70_001), ((700, 600), (300, 30))))
    assert same_bits(*ends)


def test_the_state_of_the_process_changes_no_bit(build):
    """Half of the states when a plan is made, the others when it steps, and the other way round."""
    usual = everything(build)
    some, others = (functools.partial(entered, list(STATES)[start::2]) for start in (0, 1))
    for planning, stepping in ((some, others), (others, some)):
        assert same_bits(usual, everything(build, planning=planning, stepping=stepping))


def test_denormals_survive_the_library(build):
    """A library linked with -ffast-math makes torch and numpy flush them to zero."""
    assert norm(build, [torch.ones(4)], [torch.ones(4)], None, None) == 2
    assert float(torch.tensor([1e-40]) * 0.5) > 0
    assert float(np.float32(1e-40) * np.float32(0.5)) > 0
