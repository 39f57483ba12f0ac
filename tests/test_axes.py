"""The matrix form of weights, element by element against their indices."""

import itertools
import math

import pytest
import torch

import symexplin as sel
from symexplin.axes import axes_of
from symexplin.coordinates import Coordinates
from symexplin.layout import PANELS, Layout

SHAPES = {
    **{"o": (3,), "oi": (3, 2), "io": (2, 3), "oiii": (3, 2, 2, 4), "ioii": (2, 3, 2, 4), "oii": (3, 2, 4)},
    **{"ioi": (2, 3, 4), "eoi": (5, 3, 2), "eio": (5, 2, 3), "eo": (5, 3)},
}


def places(letters, shape):
    """Every index of a tensor, with those of its matrix, output and input: all "i" together, the last fastest."""
    inputs = [dim for dim, letter in enumerate(letters) if letter == "i"]
    for index in itertools.product(*map(range, shape)):
        i = 0
        for dim in inputs:
            i = i * shape[dim] + index[dim]
        yield index, index[0] if letters[0] == "e" else 0, index[letters.index("o")], i


@pytest.mark.parametrize("letters", SHAPES)
def test_a_matrix_has_outputs_and_inputs_where_its_letters_say(letters):
    axes, shape = axes_of(letters), SHAPES[letters]
    tensor = torch.arange(float(math.prod(shape))).reshape(shape)
    found = axes.matrices(tensor)
    stack = found if axes.stacked else found[None]
    for index, e, o, i in places(letters, shape):
        at = (o,) if not axes.columns else (o, i) if axes.matrix_letters == "oi" else (i, o)
        assert stack[(e, *at)] == tensor[index], index
    assert torch.equal(axes.tensor(found, shape), tensor)
    pair = torch.stack([tensor, -tensor])
    assert torch.equal(axes.tensor(axes.matrices(pair), pair.shape), pair)
    if axes.in_order:
        assert torch.equal(torch.stack(axes.separate(tensor)).flatten(), tensor.flatten())
        assert axes.separate(tensor)[0].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("letters", SHAPES)
def test_scales_belong_to_outputs_and_inputs(letters):
    """Every matrix of a stack has scales of its own; a panel has the dimensions along which it is split."""
    shape, scale = SHAPES[letters], sel.Scale("row_col_add")
    layout = Layout(shape, letters, sel.SELConfig(beta=7.5, e=scale, l=sel.Scale("global"), m=sel.Scale("elementwise")))
    panels = layout.start_panels(torch.float64, torch.device("cpu"), position=0)
    for panel in panels.values():
        panel.copy_(torch.rand_like(panel) + 0.5)
    coordinates = Coordinates(layout, torch.randn(shape, dtype=torch.float64), **panels)
    slots = {slot.name: layout.view(slot, panels[slot.panel]) for slot in layout.slots}
    count = shape[0] if letters[0] == "e" else 1
    rows = slots["e_row"].reshape(count, -1)
    columns = slots["e_column"].reshape(count, -1) if layout.axes.columns else None
    elementwise = slots["m_full"] if layout.axes.columns else slots["m_row"]  # every pattern of a bias is "row"
    scales = coordinates.scales()
    e, l, kappa = (torch.as_tensor(getattr(scales, role)).broadcast_to(shape) for role in ("e", "l", "kappa"))
    for index, number, o, i in places(letters, shape):
        expected = rows[number, o] + (0.0 if columns is None else columns[number, i])
        assert float(e[index]) == pytest.approx(float(expected), rel=1e-14)
        assert float(l[index]) == float(slots["l"].reshape(-1)[number])
        assert float(kappa[index]) == pytest.approx(7.5 * float(elementwise[index]), rel=1e-14)
    if layout.axes.columns:
        for panel, dim in itertools.product(PANELS, range(len(shape))):
            own = layout.axes.panel_dim(panel, dim)
            assert own is None or layout.panel_shape(panel)[own] == shape[dim]


@pytest.mark.parametrize("letters", [letters for letters in SHAPES if len(letters) > 2 or letters == "eo"])
@pytest.mark.parametrize("batched", [False, True])
def test_the_map_is_elementwise(letters, batched):
    """Values, inverse and gradients are those of the scales at each element."""
    shape = SHAPES[letters]
    layout = Layout(shape, letters, sel.preset("paper+offset"))
    panels = layout.start_panels(torch.float64, torch.device("cpu"), position=0)
    w = 0.3 * torch.randn(shape, dtype=torch.float64)
    if batched:
        w, panels = torch.stack([w, -w]), {name: torch.stack([panel, panel]) for name, panel in panels.items()}
    start = Coordinates(layout, w, **panels)
    raw = start.matched(w)
    coordinates = start._replace(raw=raw)
    torch.testing.assert_close(coordinates.effective(), w, rtol=1e-13, atol=1e-15)
    mask = w > 0.1
    assert torch.equal(start._replace(raw=torch.zeros_like(w)).matched(w, where=mask)[mask], raw[mask])
    g = torch.randn_like(w)
    pulled = coordinates.pullback(g)
    h = 1e-6
    slope = (coordinates._replace(raw=raw + h).effective() - coordinates._replace(raw=raw - h).effective()) / (2 * h)
    torch.testing.assert_close(pulled.raw, g * slope, rtol=1e-6, atol=1e-9)
    assert [part.shape for part in pulled[1:]] == [part.shape for part in coordinates[1:]]


def test_large_stacks_are_computed_matrix_by_matrix_with_the_same_result():
    """In float32, where kernels compute each matrix."""
    layout = Layout((3, 160, 160), "eoi", sel.preset("paper"))
    panels = layout.start_panels(torch.float32, torch.device("cpu"), position=0)
    w = 0.1 * torch.randn(3, 160, 160)
    start = Coordinates(layout, w, **panels)
    assert start.matrices()._is_large_stack()
    one = [Coordinates(layout.matrix, *(part[i] for part in start[1:])) for i in range(3)]
    assert torch.equal(start.effective(), torch.stack([c.effective() for c in one]))
    assert torch.equal(start.matched(w), torch.stack([c.matched(v) for c, v in zip(one, w, strict=True)]))
    pulled, each = start.pullback(w), [c.pullback(v) for c, v in zip(one, w, strict=True)]
    for panel in ("raw", *PANELS):
        assert torch.equal(getattr(pulled, panel), torch.stack([getattr(c, panel) for c in each]))


@pytest.mark.parametrize("letters", ["", "e", "i", "ii", "eei", "ooi", "oie", "x", "oio"])
def test_other_letters_are_refused(letters):
    with pytest.raises(ValueError, match="axes must be one letter per dimension"):
        axes_of(letters)
