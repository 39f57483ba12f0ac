"""Checks of the Triton kernels against float64: in Triton's interpreter (triton_interpreter.py) or on a device."""

import itertools
import math
from unittest import mock

import pytest
import torch
from triton_cases import (
    WHOLE,
    as_tensors,
    class_mix,
    compare,
    configs,
    copied,
    double,
    drawn,
    error,
    growth_of,
    make_part,
    marks,
    near,
    owed,
)

import symexplin as sel
from symexplin import kernels as dispatch
from symexplin.config import Scale, SELConfig, preset
from symexplin.coordinates import Coordinates
from symexplin.kernels import KERNEL_MODES, terms_of, triton_backend, triton_sent, triton_tables, using
from symexplin.kernels.triton_backend import CudaKernels
from symexplin.layout import Layout


def check_effective(device, tiles):
    """Effective weights of all maps lie within the tolerance; in half precision they are those rounded."""
    several, whole = CudaKernels(tiles), CudaKernels(tiles and WHOLE)
    worst = 0.0
    for i, config in enumerate(configs()):
        kernels = several if i < 3 else whole
        layout = Layout((21, 37), i % 2, 7.5, config) if i % 3 else Layout((37,), 0, 7.5, config)
        raw, panels = drawn(layout, device, i)
        found = kernels.effective(terms_of(layout), raw, panels, torch.float32)
        worst = max(worst, error(found, double(layout, raw, panels).effective(), owed(layout, raw, panels)))
        if i < 3:
            for dtype in (torch.bfloat16, torch.float16):
                half = kernels.effective(terms_of(layout), raw, panels, dtype)
                assert torch.equal(half, found.to(dtype)), (config, dtype)
    assert worst <= 1.0, worst


def check_range(device, tiles):
    """The map holds from denormal weights to those that overflow, and says NaN and infinity as the formulas do."""
    kernels = CudaKernels(tiles and WHOLE)
    special = torch.tensor([0.0, -0.0, 1e-42, -1e-40, 11.8, -11.8, 12.0, -12.0, 20.0, math.inf, -math.inf, math.nan])
    some = torch.cat([torch.logspace(-30, math.log10(4.0), 80), torch.linspace(0.01, 11.5, 60)])
    w = torch.cat([special, some, -some])
    for mode, sign in itertools.product(KERNEL_MODES, (1.0, -1.0)):
        config = SELConfig(beta=7.5, mode=mode, m=Scale("global"), e=Scale("row"))
        layout = Layout((1, len(w)), 0, 7.5, config)
        panels = list(layout.start_panels(torch.float32, torch.device(device), 0).values())
        panels[2] *= sign  # m is learned without a constraint
        found = kernels.effective(terms_of(layout), w[None].to(device), panels, torch.float32).cpu()
        wanted = double(layout, w[None], panels).effective()
        plain = Coordinates(layout, w[None], *(panel.cpu() for panel in panels)).effective()
        finite = plain.isfinite()
        assert torch.equal(found[~finite].nan_to_num(7.0), plain[~finite].nan_to_num(7.0)), (mode, sign)
        bound = owed(layout, w[None], panels)
        assert error(found[finite], wanted[finite], bound[finite]) <= 1.0, (mode, sign)


def check_pullback(device, tiles):
    """Gradients by raw weight and every factor of all maps are those of float64."""
    several, whole = CudaKernels(tiles), CudaKernels(tiles and WHOLE)
    shapes = ((37,), (1, 5), (33, 7), (1, 1), (0, 5), (5, 0), (0,))
    chosen = [*zip(itertools.cycle([(21, 37), (40,)]), configs()), *((shape, preset("paper")) for shape in shapes)]
    for i, (shape, config) in enumerate(chosen):
        layout = Layout(shape, i // 2 % 2 if len(shape) == 2 else 0, 7.5, config)
        raw, panels = drawn(layout, device, i)
        g = torch.randn(shape, generator=torch.Generator().manual_seed(i))
        kernels = several if i < 1 or shape == (33, 7) else whole
        found = kernels.pullback(terms_of(layout), raw, panels, g.to(device))
        assert [f.shape for f in found] == [raw.shape, *(p.shape for p in panels)]
        near(layout, raw, panels, found, g.double(), growth_of(layout, raw, panels))
        half = g.to(torch.bfloat16)
        if i < 2:
            found = kernels.pullback(terms_of(layout), raw, panels, half.to(device))
            near(layout, raw, panels, found, half.double(), growth_of(layout, raw, panels))


def check_step(device, tiles, factor=None, state=None, runs=2):
    """A pull and an update of parts of all kinds at once are those of float64, twice alike; marks are exact."""
    finals = []
    for _ in range(runs):
        kernels, mix = CudaKernels(tiles), class_mix(device)
        parts = [part for _, part in mix]
        for part in parts:
            part.rates = part.rates if state is None else state(part.rates, device)
        by = None if factor is None else torch.tensor(factor, device=device)
        for _ in range(runs):
            before = [copied(part) for part in parts]
            norms = kernels.pull(parts)
            found = kernels.update(parts, by)
            for (config, part), (values, moments), norm, mark in zip(mix, before, norms, found, strict=True):
                compare(config, part, values, moments, float(norm), 1.0 if factor is None else factor)
                written = part.raw if part.weight is None else part.weight
                assert mark.tolist() == marks(written)
                if config is not None:
                    again = kernels.effective(part.terms, part.raw, part.panels, part.weight.dtype)
                    assert torch.equal(again, part.weight)
                part.grad = (part.grad.float() * 0.5).to(part.grad.dtype)
        finals.append([t.clone() for p in parts for t in (p.raw, *p.panels, *itertools.chain(*p.moments))])
    assert all(torch.equal(one, other) for one, other in zip(finals[0], finals[-1], strict=True))


def check_step_on_tensors(device, tiles):
    """Rates as tensors on the device and a factor give the same step."""
    with mock.patch.object(triton_tables, "_SCRATCH", 1):  # and a launch for every matrix
        check_step(device, tiles, factor=0.37, state=as_tensors, runs=1 if device == "cpu" else 2)


def check_kept(device, tiles):
    """At learning rate 0 and under the flag `keep` weights hold their bits and marks are theirs; moments advance."""
    kernels, paper = CudaKernels(tiles), preset("paper")
    flag = torch.tensor(True, device=device)
    for dtype in (torch.bfloat16, torch.float32):
        parts = [
            make_part((20, 33), paper, dtype, device, 1, keep=True),
            make_part((20, 33), paper, dtype, device, 2, keep=flag),
            make_part((20, 33), paper, dtype, device, 3, keep=~flag),
            make_part((9, 40), None, torch.bfloat16, device, 4, keep=True),
            make_part((20, 33), paper, dtype, device, 5),
        ]
        for part in parts:
            part.weight.fill_(0.25)
        parts[4].rates = parts[4].rates._replace(lr=0.0, panel_lr=((0.0,) * 3, (0.0,) * 3, ()))
        raws, firsts = [p.raw.clone() for p in parts], [p.moments[0][0].clone() for p in parts]
        kernels.pull(parts)
        found = kernels.update(parts, None)
        held = [bool((p.weight == 0.25).all()) for p in parts]
        assert held == [True, True, False, True, True]
        assert [torch.equal(p.raw, raw) for p, raw in zip(parts, raws, strict=True)] == [
            False,
            False,
            False,
            False,
            True,
        ]
        assert not any(torch.equal(p.moments[0][0], m) for p, m in zip(parts, firsts, strict=True))
        assert found.tolist() == [marks(p.weight) for p in parts]


def check_marks(device, tiles):
    """Marks are exact for every shape and type, also those of tensors that have changed or moved."""
    kernels = CudaKernels(tiles)
    shapes = ((20, 33), (50,), (2, 3, 11), (0, 4), (), (1, 1), (32, 48))
    draw = torch.Generator().manual_seed(0)
    types = (torch.float32, torch.bfloat16, torch.float16)
    tensors = [(torch.randn(s, generator=draw) * 100).to(device, t) for s, t in itertools.product(shapes, types)]
    assert kernels.marks(tensors).tolist() == [marks(t) for t in tensors]
    tensors[0] = tensors[0].clone()
    tensors[1].view(-1)[5] = math.nan
    assert kernels.marks(tensors).tolist() == [marks(t) for t in tensors]


def check_not_finite(device, tiles):
    """A gradient that is not finite reaches the norm and the panels of its own part, and no other."""
    kernels, paper = CudaKernels(tiles), preset("paper")
    parts = [make_part((20, 33), paper, torch.bfloat16, device, i) for i in range(2)]
    parts += [make_part((9, 40), None, torch.bfloat16, device, 3), make_part((33,), paper, torch.bfloat16, device, 4)]
    parts[0].grad[3, 4] = math.nan
    parts[2].grad[0, 0] = math.inf
    norms = kernels.pull(parts)
    assert norms.isnan().tolist() == [True, False, False, False]
    assert norms.isinf().tolist() == [False, False, True, False]
    assert parts[0].gradients[0].isnan().any(dim=1).nonzero().tolist() == [[3]]
    assert parts[0].gradients[1].isnan().any(dim=0).nonzero().tolist() == [[4]]


def check_replaced(device, tiles):
    """A new list with tensors that have been replaced, and a shorter one, are what the next step takes."""
    paper = preset("paper")
    one, two = ([make_part((20, 33), paper, torch.bfloat16, device, i) for i in range(2)] for _ in range(2))
    kernels, fresh = CudaKernels(tiles), CudaKernels(tiles)
    kernels.pull(one)
    kernels.update(one, None)
    fresh.pull(two)
    fresh.update(two, None)
    kept = one[0].raw
    for part in one:
        part.raw, part.weight = part.raw.clone(), part.weight.clone()
        part.moments = tuple((m.clone(), v.clone()) for m, v in part.moments)
    kept.fill_(math.nan)
    one = list(one)
    for parts in (one, two):
        other = CudaKernels(tiles) if parts is two else kernels
        other.pull(parts[:1])
        other.update(parts[:1], None)
        other.pull(parts)
        other.update(parts, None)
    for part, same in zip(one, two, strict=True):
        assert torch.equal(part.raw, same.raw)
        assert torch.equal(part.weight, same.weight)
    with pytest.raises(ValueError, match="part 1"):
        kernels.pull([one[0], make_part((20, 33), paper, torch.bfloat16, device, 2, grad=None)])


def check_capture(device, tiles):
    """Under capture, which only a device can do, every call has tables of its own; they are those of a plain step.

    Here the calls are made as in a capture; test_cuda.py replays a true one.
    """
    paper = preset("paper")
    mixes = [[make_part((20, 33), paper, torch.bfloat16, device, i) for i in range(2)] for _ in range(2)]
    backends = [CudaKernels(tiles) for _ in mixes]
    for kernels, parts in zip(backends, mixes, strict=True):
        kernels.pull(parts)
        kernels.update(parts, None)
    kernels, parts = backends[0], mixes[0]
    for part in (*mixes[0], *mixes[1]):
        part.grad = part.grad.clone()
    plan = next(iter(kernels._plans.values()))
    before = plan.grads.table.clone()
    with mock.patch.object(triton_sent, "capturing", return_value=True):
        kernels.pull(parts)
        kernels.update(parts, None)
        with pytest.raises(RuntimeError, match="take one step before"):
            kernels.update(parts, None)
    assert torch.equal(plan.grads.table, before)
    backends[1].pull(mixes[1])
    backends[1].update(mixes[1], None)
    for one, other in zip(*mixes, strict=True):
        assert torch.equal(one.raw, other.raw)
        assert torch.equal(one.weight, other.weight)
    kernels.update(parts, None)  # outside, all is as before
    with (
        mock.patch.object(triton_backend, "capturing", return_value=True),
        pytest.raises(RuntimeError, match="capture"),
    ):
        kernels.pull(parts[:1])


def check_rounding(device, tiles):
    """Weights are their masters rounded to nearest even, also where that overflows, underflows or is no number."""
    kernels = CudaKernels(tiles)
    ties = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0x7F7FFFFF, 0x7F800000, 0x00008000, 0x00018000, 0x7FC00000]
    ties += [0x7F800001, 0x7FFFFFFF, 0x3F801000, 0x3F803000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0]
    raw = torch.tensor(ties + [i - 2**31 for i in ties]).to(torch.int32).view(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        part = make_part(tuple(raw.shape), None, dtype, device, 0)
        part.raw.copy_(raw)
        for tensor in (part.grad, *part.moments[0]):
            tensor.zero_()
        part.rates = part.rates._replace(decay=0.0)
        kernels.update([part], None)
        wanted = part.raw.cpu().to(dtype)
        assert torch.equal(part.raw.cpu().nan_to_num(7.0), raw.nan_to_num(7.0))
        assert torch.equal(part.weight.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert torch.equal(part.weight.cpu().isnan(), raw.isnan())


def check_full_tiles(device, _):
    """The very tiles that a device gets, whole and cut, in a whole step."""
    config = preset("absorbed")
    layout = Layout((66, 257), 0, 7.5, config)
    kernels, part = CudaKernels(), make_part((66, 257), config, torch.bfloat16, device, 1)
    found = kernels.effective(part.terms, part.raw, part.panels, torch.float32)
    values, moments = copied(part)
    wanted = double(layout, part.raw, part.panels).effective()
    assert error(found, wanted, owed(layout, part.raw, part.panels)) <= 1.0
    norm = kernels.pull([part])
    mark = kernels.update([part], None)
    compare(config, part, values, moments, float(norm), 1.0)
    assert mark.tolist() == [marks(part.weight)]


def check_optimizer(device, tiles):
    """SELAdamW through these kernels trains as it does through the readable formulas, with clipping and writes."""
    finals = []
    for choice in ("auto", "readable"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)).to(device)
        model = model.to(torch.bfloat16) if device == "cuda" else model
        groups = sel.param_groups(model, lr=1e-3, config=sel.preset("paper"))
        optimizer = sel.SELAdamW(groups, total_steps=10, max_grad_norm=0.5)
        kernels = CudaKernels(tiles)
        with mock.patch.object(dispatch, "_load", lambda _, kernels=kernels: kernels), using(choice):
            for step in range(3):
                optimizer.zero_grad()
                inputs = torch.randn(7, 6, generator=torch.Generator().manual_seed(step))
                model(inputs.to(device, model[0].weight.dtype)).float().square().sum().backward()
                if step == 2:
                    model[0].weight.data[0] *= 0.9
                optimizer.step()
        assert bool(kernels._plans) == (choice == "auto")
        finals.append([p.detach().float().cpu() for p in model.parameters()])
    for one, other in zip(*finals, strict=True):
        tolerance = {"rtol": 2e-5, "atol": 2e-6} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-3}
        torch.testing.assert_close(one, other, **tolerance)


CHECKS = {name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")}
