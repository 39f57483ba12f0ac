"""Checks of the Triton kernels against float64: in Triton's interpreter (triton_interpreter.py) or on a device."""

import itertools
import math
import warnings
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from formulas import Formulas
from symexplin import kernels as dispatch
from symexplin.config import Scale, SELConfig
from symexplin.coordinates import Coordinates
from symexplin.kernels import Factors, Matrices, Rates, Terms, triton_launch, using
from symexplin.kernels.factors import Place
from symexplin.kernels.triton_launch import Shape, Tiles, TritonKernels
from symexplin.layout import Layout
from symexplin.presets import preset
from symexplin.transform import Form, Scales, forward, tolerance

UNIT = 2.0**-24
# The interpreter takes some milliseconds per program: few of them, of several tiles.
SMALL = Tiles(Shape(16, 8, 32, 4), Shape(16, 16, 32, 4), Shape(1, 1, 64, 4))
HALF = torch.bfloat16
# Whole and cut tiles, a matrix between two of another shape, empty ones, one row, 1-D; True: off by an entry.
SHAPES = (((21, 37), False), ((16, 48), True), ((21, 37), False), ((0, 5), False), ((5, 0), False), ((16, 48), False),
          ((1, 70), False), ((80,), False), ((7, 1), False))  # fmt: skip


class Case(NamedTuple):
    """A kind of map, the dtype of weights and gradients, and a step."""

    linear: float
    magnitude: bool
    normalize: bool
    dtype: torch.dtype
    clip: float | None
    lr: float


CASES = (
    Case(1.0, True, False, HALF, 0.37, 0.01),
    Case(1.0, True, True, torch.float32, None, 0.01),
    Case(1.0, False, True, HALF, None, 0.0),
    Case(-1.0, False, False, torch.float16, 0.37, 0.01),
    Case(0.0, True, False, torch.float32, None, 0.0),
    Case(0.0, True, True, torch.float16, 2.0, 0.01),
)


def terms_of(case):
    return Terms(case.linear, case.magnitude, case.normalize, False, 7.5, 1.0, *[Place(1.0)] * 4)


def factors_of(matrices, linear, draw, device):
    """Return factors whose products are around kappa = 7.5, c = 0.15 and lambda = 0.1."""
    lengths = [sum(shape[dim] for shape in matrices.shapes) for dim in (0, 1)]
    axes = []
    for length, sign in zip(lengths, (linear, abs(linear)), strict=True):
        kappa, c, lam = (x * (1.0 + 0.1 * draw(length)) for x in (7.5**0.5, 0.15**0.5, 0.1**0.5))
        axes.append(torch.stack([kappa, c, sign * lam, c * kappa]).to(device))
    return Factors(*axes)


def make(case, device, seed=0):
    """Return matrices in the middle of training, old and new factors, and gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    def put(value, off, dtype=torch.float32):
        buffer = torch.zeros(value.numel() + 16, dtype=dtype, device=device)
        return buffer[int(off) : int(off) + value.numel()].view(value.shape).copy_(value)

    raw = [put(0.3 * draw(*shape), off) for shape, off in SHAPES]
    for tensor in raw:
        tensor.view(-1)[1::7] = 0.0
    exp_avg = [put(0.1 * draw(*shape), off) for shape, off in SHAPES]
    exp_avg_sq = [put(0.01 + 0.01 * draw(*shape).square(), off) for shape, off in SHAPES]
    weight = [put(torch.full(shape, 0.25), off, case.dtype) for shape, off in SHAPES]
    grads = [put(draw(*shape), off, case.dtype) for shape, off in SHAPES]
    matrices = Matrices(raw, weight, exp_avg, exp_avg_sq)
    old, new = (factors_of(matrices, case.linear, draw, device) for _ in range(2))
    return matrices, old, new, grads


def double(tensors):
    return [tensor.cpu().double() for tensor in tensors]


def exact(matrices):
    """Return the matrices in float64 on the CPU, weights too."""
    return Matrices(*map(double, (matrices.raw, matrices.weight, matrices.exp_avg, matrices.exp_avg_sq)))


def error(found, wanted, bound):
    """Return the largest error in units of the bound; entries under the smallest normal number count as right."""
    distance = ((found.double().cpu() - wanted).abs() - 2.0**-126).clamp(min=0.0)
    return float((distance / bound.clamp(min=1e-300)).max()) if distance.numel() else 0.0


def owed(case, matrices, factors):
    """Return the accuracy owed to each weight, and the largest kappa |w|."""
    form, found, x = Form("mismatch" if case.magnitude else "congruent", 1.0), [], 0.0
    for (row, column), (d0, d1), raw in zip(matrices.offsets, matrices.shapes, double(matrices.raw), strict=True):
        rows, columns = factors.rows[:, row : row + d0, None], factors.columns[:, None, column : column + d1]
        kappa, c, lam, _ = rows.double().cpu() * columns.double().cpu()
        bound = tolerance(form, raw.view(d0, d1), Scales(e=c, l=lam, kappa=kappa)) * (UNIT / 2.0**-53)
        found.append(bound.view_as(raw))
        x = max(x, float((kappa * raw.view(d0, d1).abs()).max()) if raw.numel() else 0.0)
    return found, x


def check_write(device, kernels):
    """Weights of all kinds of map lie within the tolerance; in half precision they are those rounded."""
    for case in CASES:
        matrices, factors, _, _ = make(case, device)
        single = Matrices(matrices.raw, [torch.zeros_like(raw) for raw in matrices.raw])
        for some in (single, matrices):
            kernels.write(terms_of(case), some, factors)
        wanted = exact(matrices)
        Formulas().write(terms_of(case), wanted, Factors(*double(factors)))
        for one, half, other, bound in zip(
            single.weight, matrices.weight, wanted.weight, owed(case, matrices, factors)[0], strict=True
        ):
            assert error(one, other, bound) <= 1.0, case
            assert torch.equal(half, one.to(case.dtype)), case


def check_pull(device, kernels):
    """Sums, squares and raw gradients are those of float64, twice alike, with a launch for each matrix too."""
    for case in CASES:
        matrices, factors, _, grads = make(case, device)
        terms, (_, x) = terms_of(case), owed(case, matrices, factors)
        out = [torch.full_like(raw, math.nan) for raw in matrices.raw]
        sums = kernels.pull(terms, matrices, factors, grads, out)
        with mock.patch.object(triton_launch, "_SCRATCH", 1):
            assert all(map(torch.equal, kernels.pull(terms, matrices, factors, grads), sums)), case
        assert [part.shape for part in sums] == [(3, factors.rows.shape[1]), (3, factors.columns.shape[1]), (9,)]
        wanted, terms = exact(matrices), terms._replace(linear=1.0)
        pulled = exact(Matrices(out, out)).raw
        right = Formulas().pull(terms, wanted, Factors(*double(factors)), double(grads), pulled)
        sizes = exact(Matrices(out, out)).raw  # of the absolute terms, which do not cancel
        absolute = Matrices([raw.abs() for raw in wanted.raw], wanted.weight)
        positive = Factors(*(axis.abs() for axis in double(factors)))
        size = Formulas().pull(terms, absolute, positive, [grad.abs() for grad in double(grads)], sizes)
        bound = 2.0 * (8.0 + 4.0 * x) * UNIT
        for one, other, total in zip((*sums, *out), (*right, *pulled), (*size, *sizes), strict=True):
            assert error(one, other, bound * total) <= 1.0, case


def check_update(device, kernels):
    """Raw weights and moments follow AdamW in float64, twice alike; weights are those of the new factors.

    At learning rate 0 raw weights and weights keep their bits.
    """
    for case in CASES:
        rates = Rates(case.lr, 0.1, 0.9 if case.normalize else 0.3, 0.99, 1e-8, (0.19, 0.0199))
        by, runs = None if case.clip is None else torch.tensor(case.clip, device=device), []
        for _ in range(2):
            matrices, old, new, grads = make(case, device)
            matrices.raw[0][2, 3] = -0.0
            wanted = exact(matrices)
            kernels.update(terms_of(case), matrices, old, new, grads, rates, by)
            runs.append([*matrices.raw, *matrices.exp_avg, *matrices.exp_avg_sq, *matrices.weight])
        assert all(map(torch.equal, *runs)), case
        written = Matrices(matrices.raw, [weight.clone() for weight in matrices.weight])
        kernels.write(terms_of(case), written, new)
        for weight, other in zip(matrices.weight, written.weight, strict=True):
            assert torch.equal(weight, other if case.lr else torch.full_like(weight, 0.25)), case
        assert case.lr or math.copysign(1.0, float(matrices.raw[0][2, 3])) == -1.0
        clip, factors = None if by is None else by.double().cpu(), [Factors(*double(axes)) for axes in (old, new)]
        Formulas().update(terms_of(case), wanted, *factors, double(grads), rates, clip)
        right = [*wanted.raw, *wanted.exp_avg, *wanted.exp_avg_sq]
        for one, other in zip(double(runs[0][: len(right)]), right, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
        assert case.lr or all(map(torch.equal, double(matrices.raw), wanted.raw))


def check_range(device, kernels):
    """The map holds from denormal weights to those that overflow, and says NaN and infinity as the formulas do."""
    special = torch.tensor([0.0, 1e-42, 1e-40, 11.8, 12.0, 20.0, math.inf, math.nan])
    w = torch.cat([special, torch.logspace(-30, math.log10(4.0), 80), torch.linspace(0.01, 11.5, 60)])
    w = torch.cat([w, -w])[None]
    ones = torch.ones(4, w.shape[1], device=device)
    for case, sign in itertools.product(CASES, (1.0, -1.0)):
        kappa, c, lam = 7.5 * sign, 1.0 / 7.5, case.linear / 7.5
        factors = Factors(torch.tensor([[kappa], [c], [lam], [c * kappa]], device=device), ones)
        matrices = Matrices([w.to(device)], [torch.empty_like(w, device=device)])
        kernels.write(terms_of(case), matrices, factors)
        form, scales = Form("mismatch" if case.magnitude else "congruent", 1.0), Scales(e=c, l=lam, kappa=kappa)
        plain, found = forward(form, w, scales), matrices.weight[0].cpu()
        finite = plain.isfinite()
        assert torch.equal(found[~finite].nan_to_num(7.0), plain[~finite].nan_to_num(7.0)), (case, sign)
        rounded = Scales(*(float(torch.tensor(x)) for x in (c, lam, kappa)))
        wanted, bound = forward(form, w.double(), rounded), tolerance(form, w.double(), rounded) * (UNIT / 2.0**-53)
        assert error(found[finite], wanted[finite], bound[finite]) <= 1.0, (case, sign)


def check_rounding(device, kernels):
    """Half-precision weights are rounded to nearest even, also where that overflows, underflows or is no number."""
    ties = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0x7F7FFFFF, 0x00008000, 0x00018000, 0x7FC00000, 0x7F800001]
    ties += [0x7FFFFFFF, 0x3F801000, 0x3F803000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0]
    raw = torch.tensor([ties + [i - 2**31 for i in ties]]).to(torch.int32).view(torch.float32).to(device)
    identity = torch.tensor([[0.0], [0.0], [1.0], [0.0]], device=device)
    factors = Factors(identity, identity.expand(4, raw.shape[1]).contiguous())
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.empty_like(raw, dtype=dtype)
        kernels.write(terms_of(CASES[3]), Matrices([raw], [weight]), factors)
        assert torch.equal(weight.cpu().nan_to_num(7.0), raw.cpu().to(dtype).nan_to_num(7.0)), dtype
        assert torch.equal(weight.isnan(), raw.isnan()), dtype


def check_not_finite(device, kernels):
    """A gradient that is not finite reaches the sums of its row, its column and its matrix, and no other."""
    matrices, factors, _, grads = make(CASES[0], device)
    grads[2][3, 4] = math.nan
    row, column = matrices.offsets[2]
    sums = kernels.pull(terms_of(CASES[0]), matrices, factors, grads)
    assert sums.squares.isnan().nonzero().tolist() == [[2]]
    assert sums.rows.isnan().nonzero().tolist() == [[k, row + 3] for k in range(3)]
    assert sums.columns.isnan().nonzero().tolist() == [[k, column + 4] for k in range(3)]


def check_coordinates(device, kernels):
    """Weights and all gradients of a layout are those of float64."""
    patterns = {"e": Scale("row", 1.25), "l": Scale("column"), "m": Scale("global"), "n": Scale("row_col_add", 0.1)}
    configs = (preset("paper"), preset("absorbed"), SELConfig(beta=7.5, mode="oppose", normalize=True, **patterns))
    for config, shape in itertools.product(configs, ((21, 37), (40,))):
        layout = Layout(shape, "oi"[: len(shape)], config)
        generator = torch.Generator().manual_seed(0)
        raw, g = (0.1 * torch.randn(shape, generator=generator) for _ in range(2))
        panels = layout.start_panels(torch.float32, torch.device("cpu"), 0).values()
        panels = [panel * (1.0 + 0.1 * torch.rand(panel.shape, generator=generator)) for panel in panels]
        right = Coordinates(layout, raw.double(), *(panel.double() for panel in panels))
        ours = Coordinates(layout, raw.to(device), *(panel.to(device) for panel in panels))
        with mock.patch.object(dispatch, "_load", return_value=kernels), using("auto"), torch.no_grad():
            assert ours._kernels(ours.raw)[0] is kernels
            found = [ours.effective(), *ours.pullback(g.to(device))[1:]]
        for one, other in zip(found, [right.effective(), *right.pullback(g.double())[1:]], strict=True):
            torch.testing.assert_close(one.cpu().double(), other, rtol=2e-5, atol=1e-6)


def check_first_use(device, kernels):
    """A wrong kernel is found at its first use; one warning names it, and nothing is covered any more."""
    case, right = CASES[0], triton_launch.launch

    def breaking(name):
        def launch(kernel, programs, *arguments, **constants):
            if name == "none":
                raise RuntimeError("no compiler")
            if kernel.fn.__name__ == "pull" and name == "pull":
                constants["NORMALIZE"] = True
            if kernel.fn.__name__ == "update" and name == ("write" if constants["WRITE"] else "update"):
                constants["MAGNITUDE"] = False
            right(kernel, programs, *arguments, **constants)

        return launch

    for name in ("pull", "update", "write", "none"):
        broken = TritonKernels(kernels.tiles)
        matrices, *_ = make(case, device)
        said = "RuntimeError: no compiler" if name == "none" else f"the kernel `{name}` gives wrong results"
        with mock.patch.object(triton_launch, "launch", breaking(name)):
            with pytest.warns(UserWarning, match=said):
                assert not broken.covers(terms_of(case), matrices.raw[0], matrices.weight[0])
            with warnings.catch_warnings(action="error"):
                assert not broken.covers(terms_of(case), matrices.raw[0], matrices.weight[0])
    good = TritonKernels(kernels.tiles)
    for case, flat in zip(CASES[:3], (False, True, False), strict=True):
        matrices, *_ = make(case, device)
        with warnings.catch_warnings(action="error"):
            assert good.covers(terms_of(case)._replace(flat=flat), matrices.raw[0], matrices.weight[0])


def check_covers(device, kernels):
    """Contiguous float32 raw weights, with weights of three dtypes; not others."""
    raw = torch.zeros(3, 5, device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert kernels.covers(terms_of(CASES[0]), raw, raw.to(dtype))
    others = (raw.double(), raw), (raw, raw.double()), (raw.mT, raw), (raw, raw[:, :3]), (raw, raw.to("meta"))
    assert not any(kernels.covers(terms_of(CASES[0]), *pair) for pair in others)


CHECKS = {name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")}
