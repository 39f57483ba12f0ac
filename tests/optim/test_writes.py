"""Writes from outside the optimizer are noticed, and what was not written keeps its raw bits."""

import copy

import pytest
import torch
from torch import nn

import symexplin as sel
from networks import ELEMENTWISE
from symexplin import transform
from symexplin.optim import writes

PRESET = sel.preset("fixed_curvature")


def setup(dtype=torch.float32, width=64, config=PRESET):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 4)).to(dtype)
    groups = sel.param_groups(model, lr=1e-3, config=config)
    optimizer = sel.SELAdamW(groups, total_steps=50)
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    weight = model[0].weight
    generator = torch.Generator().manual_seed(0)
    model(torch.randn(8, weight.shape[1], generator=generator).to(weight.dtype)).float().square().mean().backward()
    optimizer.step()


def values_before_step(model, optimizer):
    """What the optimizer believes the weight to be when a step begins: its raw weight at lr = 0."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(model, optimizer)
    return next(c for name, c in optimizer.coordinates() if name == "0.weight")


WRITES = {
    "in place": lambda p, new: p.copy_(new),
    "through data": lambda p, new: p.data.copy_(new),
    "swapped data": lambda p, new: setattr(p, "data", new.clone()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", WRITES)
def test_a_whole_write_is_taken_over(how, dtype):
    model, optimizer = setup(dtype)
    new = (0.1 * torch.randn(64, 64, generator=torch.Generator().manual_seed(5))).to(dtype)
    with torch.no_grad():
        WRITES[how](model[0].weight, new)
    coordinates = values_before_step(model, optimizer)
    assert torch.equal(model[0].weight, new)
    # The inverse is within (8 + 4 kappa |w|) units of rounding, here 8 + 4 * 2. A bf16 entry that happens to have
    # kept its bits keeps its raw weight, anywhere within half a bf16 ulp.
    rtol = 16 * 2**-24 + (2.0**-8 if dtype == torch.bfloat16 else 0.0)
    torch.testing.assert_close(coordinates.effective(), new.float(), rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("config", [PRESET, ELEMENTWISE], ids=["vectors", "elementwise"])
def test_only_the_written_entries_are_inverted_anew(config):
    model, optimizer = setup(config=config)
    raw = optimizer.state[model[0].weight]["raw"].clone()
    with torch.no_grad():
        model[0].weight[3, 5] = 0.25
        model[0].weight[7] *= -1.0
    found = values_before_step(model, optimizer)
    same = torch.ones(64, 64, dtype=torch.bool)
    same[3, 5] = False
    same[7] = False
    assert torch.equal(found.raw[same], raw[same])
    torch.testing.assert_close(found.effective(), model[0].weight.detach(), rtol=1e-6, atol=1e-9)
    assert float(found.effective()[3, 5]) == pytest.approx(0.25, rel=1e-6)


def test_a_model_checkpoint_loaded_alone_is_taken_over():
    model, optimizer = setup()
    other = copy.deepcopy(model).requires_grad_(False)
    for parameter in other.parameters():
        parameter *= 1.5
    model.load_state_dict(other.state_dict())
    found = values_before_step(model, optimizer)
    torch.testing.assert_close(found.effective(), other[0].weight, rtol=1e-6, atol=1e-9)


def test_an_exponential_moving_average_swapped_in_and_out_changes_nothing():
    straight, straight_optimizer = setup()
    model, optimizer = setup()
    kept = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(0.9)
    for p, old in zip(model.parameters(), kept, strict=True):
        p.data.copy_(old)
    step(model, optimizer)
    step(straight, straight_optimizer)
    for p, q in zip(model.parameters(), straight.parameters(), strict=True):
        assert torch.equal(p, q)


def test_steps_without_writes_never_invert(monkeypatch):
    model, optimizer = setup()
    monkeypatch.setattr("symexplin.optim.writes._differing", lambda *_: pytest.fail("compared without a write"))
    step(model, optimizer)
    step(model, optimizer)


def test_a_nan_written_from_outside_is_refused_by_name():
    model, optimizer = setup()
    with torch.no_grad():
        model[1].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"1\.weight: 1 of 256 elements written from outside are not finite"):
        optimizer.step()


@pytest.mark.parametrize("how", ["model first", "optimizer first"])
def test_order_of_loading_does_not_matter(how):
    model, optimizer = setup()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(model, optimizer)
    twin, resumed = setup()
    step(twin, resumed)
    if how == "model first":
        twin.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
    else:
        resumed.load_state_dict(saved[1])
        twin.load_state_dict(saved[0])
    step(twin, resumed)
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.data[5].zero_(),
        lambda p: p.data[3, 4].fill_(0.7),
        lambda p: p.data.copy_(p.data.flip(0).clone()),
        lambda p: p.data.mul_(1.006),
        lambda p: p.data.clamp_(-0.01, 0.01),
    ],
    ids=["a row", "one entry", "permuted", "nudged within 2 bf16 ulp", "clamped"],
)
def test_partial_and_small_writes_through_data_are_kept_where_the_optimizer_is_told(write, dtype):
    model, optimizer = setup(dtype)
    write(model[0].weight)
    optimizer.take_over_writes()
    expected = model[0].weight.detach().clone()
    coordinates = values_before_step(model, optimizer)
    assert torch.equal(model[0].weight, expected)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 16 * 2**-24
    torch.testing.assert_close(coordinates.effective(), expected.float(), rtol=rounding, atol=1e-9)


SHAPES = {"square": (96, 96), "wide": (3, 500), "tall": (500, 3), "small": (5, 7), "transposed": (40, 60)}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sample_of_64_values_lies_all_over_the_parameter(shape):
    """Through `.data`, without a trace in `_version`: what touches every value is seen, as is a third of them."""
    weight = nn.Parameter(torch.randn(SHAPES[shape], generator=torch.Generator().manual_seed(0)))
    if shape == "transposed":
        weight = nn.Parameter(weight.detach().t().contiguous().t())
    sample = writes._sample(weight.data)
    assert len(sample) == min(64, weight.numel())
    parts = [weight.data[: weight.shape[0] // 3], weight.data[-(weight.shape[0] // 3) :], weight.data]
    for part in (*parts, weight.data[:, : weight.shape[1] // 3]):
        before = sample.clone()
        part.mul_(-1.5)
        assert not torch.equal(before, sample)


def test_what_no_sample_shows_is_written_over_unless_the_optimizer_is_told():
    """The documented limit: few entries through `.data`. In place, the same write is noticed."""
    for how, kept in (("data", False), ("told", True), ("in place", True)):
        model, optimizer = setup(width=256)
        weight = model[0].weight
        with torch.no_grad():
            (weight if how == "in place" else weight.data)[100, 101] = 0.75
        if how == "told":
            optimizer.take_over_writes()
        step(model, optimizer)
        assert (abs(float(weight[100, 101]) - 0.75) < 0.05) == kept, how


def test_writes_into_plain_parameters_reach_their_master_copies():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
    optimizer = sel.SELAdamW(sel.param_groups(model, lr=1e-3, config=sel.preset("frozen")))
    step(model, optimizer)
    model.load_state_dict({key: torch.full_like(value, 3.0) for key, value in model.state_dict().items()})
    step(model, optimizer)
    for parameter in model.parameters():
        assert bool(((parameter - 3.0).abs() < 0.05).all())


def worn(model, optimizer):
    """Move a learned scale where its row of the map has no inverse, as long training can."""
    optimizer.state[model[0].weight]["panel0"][0, 0] = -1.0
    step(model, optimizer)


def test_a_write_elsewhere_does_not_touch_what_has_no_inverse():
    model, optimizer = setup()
    worn(model, optimizer)
    raw = optimizer.state[model[0].weight]["raw"].clone()
    with torch.no_grad():
        model[0].weight[3, 2] = 0.5
    coordinates = values_before_step(model, optimizer)
    assert float(coordinates.effective()[3, 2]) == pytest.approx(0.5, rel=1e-6)
    raw[3, 2] = coordinates.raw[3, 2]
    assert torch.equal(coordinates.raw, raw)


def test_a_write_out_of_reach_starts_the_scales_anew_and_keeps_every_weight():
    model, optimizer = setup()
    worn(model, optimizer)
    with torch.no_grad():
        model[0].weight[0] = 0.25
    expected = model[0].weight.detach().clone()
    with pytest.warns(UserWarning, match=r"0\.weight: weights written .* out of reach .* start anew"):
        coordinates = values_before_step(model, optimizer)
    assert torch.equal(model[0].weight, expected)
    torch.testing.assert_close(coordinates.effective(), expected, rtol=1e-6, atol=1e-9)
    assert torch.all(coordinates.panel0 == 1.0)


def test_rounding_of_another_machine_is_no_write():
    """After a load, entries within the accuracy of the map keep their raw bits, where E and L cancel too."""
    model, optimizer = setup()
    worn(model, optimizer)
    (coordinates,) = (c for name, c in optimizer.coordinates() if name == "0.weight")
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    allowed = transform.tolerance(coordinates.layout.form, coordinates.raw, coordinates.scales())
    saved[0]["0.weight"] += 0.9 * allowed
    twin, resumed = setup()
    twin.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    found = values_before_step(twin, resumed)
    assert torch.equal(found.raw, coordinates.raw)
