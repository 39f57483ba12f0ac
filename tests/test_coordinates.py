"""Structured scales: what each pattern expands to, its gradients against autograd, where things are packed."""

import dataclasses
import math

import pytest
import torch

import symexplin as sel
from pairwise import every_pair
from symexplin import transform
from symexplin.config import PATTERNS
from symexplin.coordinates import Coordinates
from symexplin.layout import PANELS, Layout

MODES = tuple(transform.MODES)
# Curvature, and transform of e, l and m.
WAYS = [("fixed", "none"), ("absorbed", "none"), ("fixed", "exp")]


def make(config, shape=(5, 3), axes="oi", seed=0):
    """Coordinates in float64 with every panel moved away from its start."""
    generator = torch.Generator().manual_seed(seed)
    layout = Layout(shape, axes, config)
    panels = layout.start_panels(torch.float64, torch.device("cpu"), position=3)
    for panel in panels.values():
        panel += 0.1 * torch.randn(panel.shape, generator=generator, dtype=torch.float64)
    raw = 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return Coordinates(layout, raw, **panels)


def rows_and_columns(coordinates, stem):
    """The learned vectors of one scale as (rows along outputs, columns along inputs)."""
    layout = coordinates.layout
    slots = {s.name: layout.view(s, getattr(coordinates, s.panel)) for s in layout.slots}
    return {name.removeprefix(stem + "_"): v for name, v in slots.items() if name.startswith(stem + "_")}


def reference_scale(pattern, vectors, base, axes, log):
    """The scale matrix (outputs x inputs) as section 4.4 writes it."""
    r = vectors["row"].reshape(-1) if "row" in vectors else None
    c = vectors["column"].reshape(-1) if "column" in vectors else None
    if pattern == "row":
        value = r[:, None]
    elif pattern == "column":
        value = c[None, :]
    elif pattern == "row_col_mult":
        value = (torch.add if log else torch.mul)(r[:, None], c[None, :])
    elif pattern == "elementwise":
        value = vectors["full"] if axes == "oi" else vectors["full"].mT
    elif pattern == "row_col_add":
        value = r[:, None] + c[None, :]
    else:
        a = vectors["A"] if axes == "oi" else vectors["A"].mT
        b = vectors["B"] if axes == "oi" else vectors["B"].mT
        value = (math.log(base) if log else base) + a @ b
    return value.exp() if log else value


@pytest.mark.parametrize("axes", ["oi", "io"])
@pytest.mark.parametrize(("curvature", "transform"), WAYS)
@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p not in ("fixed", "global")])
def test_patterns_expand_as_the_paper_writes_them(pattern, curvature, transform, axes):
    scale = sel.Scale(pattern, rank=2)
    learned = dataclasses.replace(scale, transform=transform)
    log, log_kappa = transform == "exp", transform == "exp" or curvature == "absorbed"
    n_pattern = "row_col_add" if pattern == "row_col_mult" else pattern
    config = sel.SELConfig(
        beta=7.5,
        curvature=curvature,
        e=learned,
        l=learned,
        m=learned,
        n=sel.Scale(n_pattern, start=0.0, rank=2),
        s=scale,
    )
    coordinates = make(config, axes=axes)
    scales = coordinates.scales()
    stem = "log_" if log else ""
    expected = {
        role: reference_scale(p, rows_and_columns(coordinates, name), base, axes, log)
        for role, name, p, base, log in (
            ("e", f"{stem}e", pattern, 1.0, log),
            ("l", f"{stem}l", pattern, 1.0, log),
            ("s", "s", pattern, 1.0, False),
            ("n", "n", n_pattern, 0.0, False),
            (
                "kappa",
                "a" if curvature == "absorbed" else f"{stem}m",
                pattern,
                7.5 if curvature == "absorbed" else 1.0,
                log_kappa,
            ),
        )
    }
    if curvature == "fixed":
        expected["kappa"] = 7.5 * expected["kappa"]
    raw = coordinates.raw if axes == "oi" else coordinates.raw.mT
    for role, value in expected.items():
        found = getattr(scales, role).broadcast_to(coordinates.raw.shape)
        found = found if axes == "oi" else found.mT
        torch.testing.assert_close(found, value.broadcast_to(raw.shape), rtol=1e-13, atol=1e-13)
    direct = sel.functional.effective(raw, beta=7.5, curvature="absorbed", beta_tilde=expected.pop("kappa"), **expected)
    found = coordinates.effective() if axes == "oi" else coordinates.effective().mT
    torch.testing.assert_close(found, direct, rtol=1e-12, atol=1e-14)


def read(mode, way, normalize, **_):
    """Whether a mode reads how its curvature is given and normalized, or these are the first ways."""
    return "kappa" in transform.MODES[mode] or (way[0], normalize) == ("fixed", False)


@every_pair(read, mode=MODES, pattern=PATTERNS, way=WAYS, normalize=[False, True])
def test_pullback_is_the_gradient_of_effective(mode, pattern, way, normalize):
    """Central differences in float64 of <g, effective> along a random direction of every part."""
    curvature, learned_as = way
    scale = sel.Scale(pattern, rank=2, transform=learned_as)
    n = sel.Scale(pattern if pattern != "row_col_mult" else "row_col_add", start=0.0, rank=2)
    config = sel.SELConfig(
        *(7.5, mode, curvature, normalize, "matched", scale, scale, scale, n),
        *(dataclasses.replace(scale, transform="none"), sel.Scale("lora", rank=2)),
    )
    for shape, axes in (((5, 3), "oi"), ((5, 3), "io"), ((5,), "o"), ((2, 3, 2), "ioi"), ((2, 3, 2), "eoi")):
        coordinates = make(config, shape, axes)
        generator = torch.Generator().manual_seed(7)
        g = torch.randn(shape, generator=generator, dtype=torch.float64)
        pulled = coordinates.pullback(g)
        for name in ("raw", *PANELS):
            part, gradient = getattr(coordinates, name), getattr(pulled, name)
            assert gradient.shape == part.shape
            if part.numel() == 0:
                continue
            direction = torch.randn(part.shape, generator=generator, dtype=torch.float64)
            h = 1e-6
            moved = [coordinates._replace(**{name: part + step * direction}) for step in (h, -h)]
            numeric = float((g * (moved[0].effective() - moved[1].effective())).sum()) / (2 * h)
            found = float((gradient * direction).sum())
            assert found == pytest.approx(numeric, rel=1e-6, abs=1e-8), (shape, axes, name)


def plain_map(mode, w, beta, normalize, e, l, m, n):
    """The paper's formulas, with exp(x - n) - exp(-n) for the exponential pathway."""
    kappa = beta * m
    d = kappa if normalize else beta
    if mode == "linear":
        return l * w
    if mode == "sinh":
        return torch.sinh(kappa * w) / d
    linear = l / d * (w.abs() if mode == "mismatch" else w)
    return torch.sign(w) * (e / d) * (torch.exp(kappa * w.abs() - n) - torch.exp(-n)) + linear


@every_pair(
    lambda mode, role, transform, **_: (
        role in {"linear": "l", "sinh": "m"}.get(mode, "elmn") and (role != "n" or transform == "none")
    ),
    mode=["mismatch", "congruent", "sinh", "linear"],
    role=["e", "l", "m", "n"],
    pattern=["elementwise", "row_col_mult", "global"],
    transform=["none", "exp"],
    normalize=[False, True],
)
def test_pullback_equals_autograd_of_the_papers_formula(mode, role, pattern, transform, normalize):
    scale = sel.Scale(pattern, start=0.9, transform=transform)
    coordinates = make(sel.SELConfig(beta=7.5, mode=mode, normalize=normalize, **{role: scale}))
    layout = coordinates.layout
    leaves = {
        slot: layout.view(slot, getattr(coordinates, slot.panel)).clone().requires_grad_() for slot in layout.slots
    }
    w = coordinates.raw.clone().requires_grad_()
    parts = [leaf.exp() if transform == "exp" else leaf for leaf in leaves.values()]
    scales = {"e": 1.0, "l": 1.0, "m": 1.0, "n": 0.0, role: math.prod(parts)}
    value = plain_map(mode, w, 7.5, normalize, **{key: torch.as_tensor(v).double() for key, v in scales.items()})
    torch.testing.assert_close(coordinates.effective(), value.detach(), rtol=1e-12, atol=1e-14)
    g = torch.randn(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    value.backward(g)
    pulled = coordinates.pullback(g)
    torch.testing.assert_close(pulled.raw, w.grad, rtol=1e-11, atol=1e-14)
    for slot, leaf in leaves.items():
        found = layout.view(slot, getattr(pulled, slot.panel))
        torch.testing.assert_close(found, leaf.grad, rtol=1e-11, atol=1e-14)


def test_the_start_of_logarithms_and_elementwise_scales_is_exact():
    """The inverse is that of the scales as rounded, and elementwise scales may start at 0 where the map has one."""
    w = 0.1 * torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    config = sel.SELConfig(
        beta=7.5,
        e=sel.Scale("row_col_mult", start=1.3, transform="exp"),
        l=sel.Scale("elementwise", start=0.0),
        m=sel.Scale("elementwise", start=0.7, transform="exp"),
    )
    layout = Layout((6, 4), "oi", config)
    panels = layout.start_panels(torch.float64, w.device, 0)
    coordinates = Coordinates(layout, w, **panels)
    scales = coordinates.scales()
    torch.testing.assert_close(scales.e, torch.full_like(w, 1.3), rtol=1e-15, atol=0.0)
    torch.testing.assert_close(scales.kappa, torch.full_like(w, 7.5 * 0.7), rtol=1e-15, atol=0.0)
    coordinates = coordinates._replace(raw=coordinates.matched(w))
    torch.testing.assert_close(coordinates.effective(), w, rtol=1e-14, atol=1e-16)
    assert bool((coordinates.pullback(torch.ones_like(w)).full[..., 0] != 0).all())  # l at 0 can move
    none = dataclasses.replace(config, mode="exp_only", e=sel.Scale("elementwise", start=0.0))
    layout = Layout((6, 4), "oi", none)
    with pytest.raises(ValueError, match="e > 0"):
        Coordinates(layout, w, **layout.start_panels(w.dtype, w.device, 0)).matched(w)


@pytest.mark.parametrize("mode", MODES)
def test_matched_inverts_the_map_with_its_present_scales_and_residual(mode):
    config = sel.SELConfig(7.5, mode, n=sel.Scale("column", start=0.5), delta=sel.Scale("lora", start=0.0))
    coordinates = make(config, (6, 4))
    coordinates.panel0.clamp_(min=0.02)  # a positive offset and scales: invertible in every mode
    coordinates.panel1.clamp_(min=0.02)
    w = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    try:
        raw = coordinates.matched(w)
    except ValueError:
        scales = coordinates.scales()
        assert bool((scales.e * scales.kappa * torch.exp(-scales.n) <= scales.l).any())
        pytest.fail("the scales drawn are not invertible: change the test's start")
    torch.testing.assert_close(coordinates._replace(raw=raw).effective(), w, rtol=1e-12, atol=1e-13)


def test_panels_start_at_the_scales_values():
    config = sel.SELConfig(
        beta=9.0,
        e=sel.Scale("row_col_mult", start=4.0),
        l=sel.Scale("row_col_mult", start=-4.0),
        m=sel.Scale("row_col_add", start=3.0),
        n=sel.Scale("global", start=0.25),
        delta=sel.Scale("lora", start=0.0, rank=3),
    )
    layout = Layout((5, 3), "oi", config)
    panels = layout.start_panels(torch.float64, torch.device("cpu"), 0)
    scales = Coordinates(layout, torch.zeros(5, 3, dtype=torch.float64), **panels).scales()
    for role, value in (("e", 4.0), ("l", -4.0), ("kappa", 27.0), ("n", 0.25), ("delta", 0.0)):
        assert torch.all(getattr(scales, role) == value), role
    e_row = next(slot for slot in layout.slots if slot.name == "e_row")
    assert torch.all(layout.view(e_row, panels[e_row.panel]) == 2.0)


def test_lora_factors_depend_on_seed_and_position_and_leave_the_global_generator_alone():
    def factor(seed, position):
        config = sel.SELConfig(seed=seed, delta=sel.Scale("lora", start=0.0, rank=4))
        layout = Layout((50, 30), "oi", config)
        slot = next(s for s in layout.slots if s.name == "delta_A")
        return layout.view(slot, layout.start_panels(torch.float32, torch.device("cpu"), position)[slot.panel])

    state = torch.random.get_rng_state()
    first = factor(0, 0)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first, factor(0, 0))
    assert not torch.equal(first, factor(1, 0))
    assert not torch.equal(first, factor(0, 1))
    assert first.abs().max() <= 0.5 < 1.1 * first.abs().max()  # uniform on +-1/sqrt(4)


def test_a_bias_keeps_the_pattern_row_and_no_residual():
    layout = Layout((4,), "o", sel.preset("paper+offset"))
    assert [(s.name, s.panel) for s in layout.slots] == [
        ("e_row", "panel0"),
        ("l_row", "panel0"),
        ("m_row", "panel0"),
        ("n_row", "panel0"),
    ]
    panels = layout.start_panels(torch.float64, torch.device("cpu"), 0)
    assert torch.all(panels["panel0"] == torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64))


def test_decay_and_rates_follow_the_paper():
    layout = Layout((4, 4), "oi", sel.preset("paper+offset", beta=10.0, s=sel.Scale("global")))
    decays = {slot.name: slot.decay for slot in layout.slots}
    assert {name for name, decay in decays.items() if decay} == {
        "e_row",
        "e_column",
        "l_row",
        "l_column",
        "s",
    }
    assert {slot.name: slot.lr_scale for slot in layout.slots if slot.lr_scale != 1.0} == {
        "delta_A": 0.1,
        "delta_B": 0.1,
    }


def test_a_logarithm_does_not_decay():
    config = sel.preset("paper", **{role: sel.Scale("row_col_mult", transform="exp") for role in "elm"})
    slots = Layout((4, 3), "oi", config).slots
    assert [slot.name for slot in slots[:2]] == ["log_e_row", "log_e_column"]
    assert not any(slot.decay for slot in slots)


def test_a_mode_creates_only_the_scales_it_uses():
    def names(mode):
        return {slot.role for slot in Layout((4, 4), "oi", sel.preset("paper", start="matched", mode=mode)).slots}

    assert names("mismatch") == names("congruent") == names("oppose") == {"e", "l", "m"}
    assert names("exp_only") == {"e", "m"}
    assert names("sinh") == {"m"}
    assert names("linear") == {"l"}
    assert names("damped") == set()
