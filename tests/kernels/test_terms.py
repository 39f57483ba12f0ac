"""The places of scales as kernels read them expand to the scales of the definition."""

import pytest
import torch

import symexplin as sel
from symexplin.coordinates import Coordinates
from symexplin.kernels import terms_of
from symexplin.layout import PANELS, Layout

PRODUCTS = ("fixed", "global", "row", "column", "row_col_mult")
SUMS = ("fixed", "global", "row", "column", "row_col_add")


def expand(place, panels, absorbed=False, summed=False):
    """Return `place.value` times (plus) its learned parts, whatever they are."""
    parts = []
    for panel, column in zip(PANELS, place.columns, strict=True):
        if column >= 0:
            values = {"panel0": lambda p, c: p[:, c], "panel1": lambda p, c: p[c], "scalar": lambda p, c: p[c]}
            part = values[panel](panels[panel], column)
            parts.append(part[:, None] if panel == "panel0" and panels["raw"].dim() == 2 else part)
    total = torch.tensor(place.value, dtype=torch.float64)
    for part in parts:
        total = total + part if summed else total * (part.exp() if absorbed else part)
    return total


@pytest.mark.parametrize("curvature", ["fixed", "absorbed"])
@pytest.mark.parametrize("mode", ["mismatch", "exp_only", "sinh"])
@pytest.mark.parametrize(("out_dim", "shape"), [(0, (3, 5)), (1, (3, 5)), (0, (4,))])
def test_places_expand_to_the_scales(curvature, mode, out_dim, shape):
    for pattern, offset in zip(PRODUCTS, SUMS, strict=True):
        scale, n = sel.Scale(pattern, start=1.3), sel.Scale(offset, start=0.2)
        config = sel.SELConfig(beta=7.5, mode=mode, curvature=curvature, e=scale, l=scale, m=scale, n=n)
        layout = Layout(shape, out_dim, 7.5, config)
        generator = torch.Generator().manual_seed(0)
        panels = {
            name: torch.rand(panel.shape, generator=generator, dtype=torch.float64) + 0.5
            for name, panel in layout.start_panels(torch.float64, torch.device("cpu"), 0).items()
        }
        raw = torch.zeros(shape, dtype=torch.float64)
        scales, terms = Coordinates(layout, raw, **panels).scales(), terms_of(layout)
        panels["raw"] = raw
        found = {role: expand(getattr(terms, role), panels) for role in ("e", "l")}
        found["kappa"] = expand(terms.kappa, panels, absorbed=terms.absorbed)
        found["n"] = expand(terms.n, panels, summed=True)
        for role in (role for role in found if {"kappa": "m"}.get(role, role) in config.roles):
            theirs = torch.as_tensor(getattr(scales, role), dtype=torch.float64)
            torch.testing.assert_close(found[role].expand(shape), theirs.expand(shape))


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "linear"},
        {"mode": "damped"},
        {"e": sel.Scale("lora")},
        {"l": sel.Scale("row_col_add")},
        {"m": sel.Scale("row_col_add")},
        {"n": sel.Scale("row_col_mult", start=1.0)},
        {"s": sel.Scale("global")},
        {"delta": sel.Scale("lora", start=0.0)},
    ],
    ids=str,
)
def test_what_is_no_product_is_left_to_the_readable_formulas(changes):
    assert terms_of(Layout((3, 5), 0, 7.5, sel.SELConfig(beta=7.5, **changes))) is None


def test_a_sum_of_logarithms_is_a_product():
    config = sel.SELConfig(beta=7.5, curvature="absorbed", m=sel.Scale("row_col_add"))
    assert terms_of(Layout((3, 5), 0, 7.5, config)) is not None
