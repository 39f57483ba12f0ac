"""The places of scales as kernels read them: which maps are products, and what the factors and their gradients are."""

import pytest
import torch

import symexplin as sel
from symexplin.coordinates import Coordinates
from symexplin.kernels import FactoredMap, Panels, terms_of
from symexplin.kernels.factors import Sums
from symexplin.layout import VECTORS, Layout

PRODUCTS = ("fixed", "global", "row", "column", "row_col_mult")
SUMS = ("fixed", "global", "row", "column", "row_col_add")


def expand(place, panels, summed=False):
    """Return `place.value` times (plus) its learned parts, whatever they are."""
    parts = []
    for panel, column in zip(VECTORS, place.columns, strict=True):
        if column >= 0:
            values = {"panel0": lambda p, c: p[:, c], "panel1": lambda p, c: p[c], "scalar": lambda p, c: p[c]}
            part = values[panel](panels[panel], column)
            parts.append(part[:, None] if panel == "panel0" and panels["raw"].dim() == 2 else part)
    total = torch.tensor(place.value, dtype=torch.float64)
    for part in parts:
        total = total + part if summed else total * (part.exp() if place.log else part)
    return total


@pytest.mark.parametrize(("curvature", "transform"), [("fixed", "none"), ("fixed", "exp"), ("absorbed", "none")])
@pytest.mark.parametrize("mode", ["mismatch", "exp_only"])
@pytest.mark.parametrize(("axes", "shape"), [("oi", (3, 5)), ("io", (3, 5)), ("o", (4,))])
def test_places_expand_to_the_scales(curvature, transform, mode, axes, shape):
    for pattern, offset in zip(PRODUCTS, SUMS, strict=True):
        scale, n = sel.Scale(pattern, start=1.3, transform=transform), sel.Scale(offset, start=0.2)
        config = sel.SELConfig(beta=7.5, mode=mode, curvature=curvature, e=scale, l=scale, m=scale, n=n)
        layout = Layout(shape, axes, config)
        generator = torch.Generator().manual_seed(0)
        panels = {
            name: torch.rand(panel.shape, generator=generator, dtype=torch.float64) + 0.5
            for name, panel in layout.start_panels(torch.float64, torch.device("cpu"), 0).items()
        }
        raw = torch.zeros(shape, dtype=torch.float64)
        scales, terms = Coordinates(layout, raw, **panels).scales(), terms_of(layout)
        panels["raw"] = raw
        found = {role: expand(getattr(terms, role), panels) for role in ("e", "l")}
        found["kappa"] = expand(terms.kappa, panels)
        found["n"] = expand(terms.n, panels, summed=True)
        for role in (role for role in found if {"kappa": "m"}.get(role, role) in config.roles):
            theirs = torch.as_tensor(getattr(scales, role), dtype=torch.float64)
            torch.testing.assert_close(found[role].expand(shape), theirs.expand(shape))


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "linear"},
        {"mode": "sinh"},
        {"mode": "damped"},
        {"e": sel.Scale("lora")},
        {"e": sel.Scale("lora", transform="exp")},
        {"l": sel.Scale("elementwise")},
        {"m": sel.Scale("elementwise", transform="exp")},
        {"l": sel.Scale("row_col_add")},
        {"m": sel.Scale("row_col_add")},
        {"n": sel.Scale("row_col_mult", start=1.0)},
        {"s": sel.Scale("global")},
        {"delta": sel.Scale("lora", start=0.0)},
    ],
    ids=str,
)
def test_what_is_no_product_is_left_to_the_readable_formulas(changes):
    assert terms_of(Layout((3, 5), "oi", sel.SELConfig(beta=7.5, **changes))) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"curvature": "absorbed", "m": sel.Scale("row_col_add")},
        {"e": sel.Scale("row_col_add", transform="exp")},
    ],
    ids=str,
)
def test_a_sum_of_logarithms_is_a_product(changes):
    assert terms_of(Layout((3, 5), "oi", sel.SELConfig(beta=7.5, **changes))) is not None


def test_the_factors_of_several_tensors_are_those_of_each():
    """End to end: rows, columns and numbers of three matrices, and the gradients that follow from sums."""
    config = sel.preset("paper", e=sel.Scale("global", k=1), m=sel.Scale("row"), n=sel.Scale("global", start=0.1))
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in ((3, 5), (4, 2), (1, 7)):
        layout = Layout(shape, "oi"[: len(shape)], config)
        start = layout.start_panels(torch.float64, torch.device("cpu"), 0).values()
        panels = [panel + torch.rand(panel.shape, generator=generator, dtype=torch.float64) for panel in start]
        found.append((terms_of(layout), Panels(panels[0], panels[1], panels[2][None], [shape[0]])))
    panel0, panel1, scalar, sizes = zip(*(panels for _, panels in found), strict=True)
    together = Panels(torch.cat(panel0), torch.cat(panel1, 1), torch.cat(scalar), [size for (size,) in sizes])
    sums = Sums(
        *(torch.rand(3, n, generator=generator, dtype=torch.float64) for n in (8, 14)),
        torch.zeros(3, dtype=torch.float64),
    )
    whole = FactoredMap(found[0][0], together)
    pieces = zip(sums.rows.split([3, 4, 1], 1), sums.columns.split([5, 2, 7], 1), strict=True)
    alone = [FactoredMap(terms, panels) for terms, panels in found]
    grads = [one.gradients(Sums(*own, sums.squares)) for one, own in zip(alone, pieces, strict=True)]
    for ours, theirs, dim in zip(
        whole.factors(), zip(*(one.factors() for one in alone), strict=True), (1, 1), strict=True
    ):
        assert torch.equal(ours, torch.cat(theirs, dim))
    for ours, theirs, dim in zip(whole.gradients(sums), zip(*grads, strict=True), (0, 1, 0), strict=True):
        torch.testing.assert_close(ours, torch.cat(theirs, dim), rtol=1e-15, atol=0.0)
