"""Writes from outside: free for maps in closed form, adopted into stored raw weights and into master copies."""

import copy
import itertools

import pytest
import torch
from torch import nn

import symexplin as sel
from networks import strong
from symexplin import transform
from training import assert_same_bits, build

STORED = {
    "vectors": strong("fixed_curvature"),
    "sums": strong("congruent", e=sel.Scale("row_col_add", k=(50.0, 8.0))),
    "residual": strong("paper+offset"),
    "fixed": strong("frozen"),
}
CLOSED = {
    "default": sel.SELConfig(),
    "sinh": sel.SELConfig(mode="sinh"),
    "identity": sel.SELConfig(mode="linear", l=sel.Scale(start=-2.0)),
}
stored = pytest.mark.parametrize("config", STORED.values(), ids=STORED)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def setup(config=STORED["vectors"], dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)).to(dtype)
    optimizer = build(model, config, lr=1e-3)
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer, lr=1e-3):
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    weight = model[0].weight
    generator = torch.Generator().manual_seed(0)
    model(torch.randn(8, weight.shape[1], generator=generator).to(weight.dtype)).float().square().mean().backward()
    optimizer.step()


def known(model, optimizer):
    """What the optimizer believes the first weight to be in a step with rates of 0, which must not write."""
    before = copy.deepcopy(model)
    step(model, optimizer, lr=0.0)
    assert_same_bits(model, before)
    return dict(optimizer.curved())["0.weight"]


WRITES = {
    "in place": lambda p, new: p.copy_(new),
    "swapped data": lambda p, new: setattr(p, "data", new.clone()),
    "part": lambda p, new: p[3:5].copy_(new[3:5]),
    "view": lambda p, new: p.view(-1)[70:90].copy_(new.view(-1)[70:90]),
    "loaded": lambda p, new: nn.ParameterList([p]).load_state_dict({"0": new}),
}
UNSEEN = {
    "a row": lambda p: p.data[5].zero_(),
    "an entry": lambda p: p.data[3, 4].fill_(0.7),
    "permuted": lambda p: p.data.copy_(p.data.flip(0).clone()),
    "nudged by 2 ulp of bfloat16": lambda p: p.data.mul_(1.006),
    "clamped": lambda p: p.data.clamp_(-0.01, 0.01),
}


def check_adopted(curved, weight, raw, changed):
    """The map gives the weights written, within its accuracy, and what was not written keeps its raw bits."""
    half = weight.dtype == torch.bfloat16
    torch.testing.assert_close(curved.effective(), weight.float(), rtol=2.0**-8 if half else 2e-6, atol=1e-9)
    assert torch.equal(curved.raw[~changed], raw[~changed])


HOWS = {**WRITES, **UNSEEN}


@pytest.mark.parametrize(("how", "name"), zip(HOWS, itertools.cycle(STORED), strict=False))  # found alike in each map
@dtypes
def test_writes_are_adopted_and_only_what_differs_is_inverted(how, name, dtype):
    """Those through `.data` when the optimizer is told."""
    model, optimizer = setup(STORED[name], dtype)
    weight, raw = model[0].weight, optimizer.state[model[0].weight]["raw"].clone()
    old = weight.detach().clone()
    if how in WRITES:
        new = (0.1 * torch.randn(64, 64, generator=torch.Generator().manual_seed(5))).to(dtype)
        with torch.no_grad():
            WRITES[how](weight, new)
    else:
        UNSEEN[how](weight)
        optimizer.take_over_writes()
    check_adopted(known(model, optimizer), weight.detach(), raw, weight.detach() != old)


@pytest.mark.parametrize("config", [*CLOSED.values(), sel.SELConfig(exclude=("0.*",))], ids=[*CLOSED, "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("path")
def test_a_master_adopts_edits_to_the_bit_and_keeps_its_precision_elsewhere(config, dtype):
    model, optimizer = setup(config, dtype)
    weight, master = model[0].weight, optimizer.state[model[0].weight]["master"]
    before = master.clone()
    assert bool((before != before.to(dtype).float()).any())  # there is precision to lose
    weight.data[3] = torch.tensor(0.3)
    weight.data[4] = torch.tensor(-0.0)
    weight.data[5] = weight.data[5]  # written, but the same
    step(model, optimizer, lr=1e-9)  # far below half an ulp: the masters move by nothing that rounds
    torch.testing.assert_close(master[3], weight[3].float().detach(), rtol=1e-6, atol=0)
    assert bool((master[4].abs() < 1e-7).all())
    rest = torch.arange(64) != 3
    rest[4] = False
    torch.testing.assert_close(master[rest], before[rest], rtol=1e-5, atol=1e-7)
    assert bool((master[5] != master[5].to(dtype).float()).any())
    assert torch.equal(weight, master.to(dtype))


@pytest.mark.parametrize("config", [STORED["vectors"], CLOSED["default"]], ids=["stored", "closed"])
@dtypes
def test_what_is_swapped_in_and_out_changes_nothing(config, dtype):
    """As an exponential moving average for an evaluation, through `.data` and in place."""
    runs = [setup(config, dtype) for _ in range(3)]
    for (model, _), how in zip(runs[1:], ("data", "in place"), strict=True):
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p, old in zip(model.parameters(), kept, strict=True):
                (p.data if how == "data" else p).mul_(0.9)
                (p.data if how == "data" else p).copy_(old)
    for model, optimizer in runs:
        step(model, optimizer)
    assert_same_bits(runs[1][0], runs[0][0])
    assert_same_bits(runs[2][0], runs[0][0])


def worn(model, optimizer):
    """Move a learned scale where its row of the map has no inverse, as long training can."""
    optimizer.state[model[0].weight]["e_row"][0] = -1.0
    step(model, optimizer)


def test_a_write_elsewhere_does_not_touch_what_has_no_inverse():
    model, optimizer = setup()
    worn(model, optimizer)
    raw, old = optimizer.state[model[0].weight]["raw"].clone(), model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight[3, 2] = 0.5
    check_adopted(known(model, optimizer), model[0].weight.detach(), raw, model[0].weight.detach() != old)


@pytest.mark.parametrize("told", [False, True])
def test_a_write_out_of_reach_is_a_clear_error_that_says_what_to_do(told):
    model, optimizer = setup()
    worn(model, optimizer)
    with torch.no_grad():
        (model[0].weight.data if told else model[0].weight)[0] = 0.25
    expected = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"0\.weight: .*64 of 64"):
        optimizer.take_over_writes() if told else step(model, optimizer)
    assert_same_bits(model, expected)
    del optimizer.state[model[0].weight]
    torch.testing.assert_close(known(model, optimizer).effective(), model[0].weight.detach(), rtol=2e-6, atol=1e-9)
    assert torch.all(optimizer.state[model[0].weight]["e_row"] == 1.0)


@stored
def test_a_state_that_is_loaded_alone_adopts_the_weights_of_the_model(config):
    model, optimizer = setup(config)
    saved = copy.deepcopy(optimizer.state_dict())
    for _ in range(5):
        step(model, optimizer, lr=3e-3)
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(known(model, optimizer).effective(), model[0].weight.detach(), rtol=2e-6, atol=1e-8)


def test_rounding_of_another_machine_is_no_write():
    """After a load, entries within the accuracy of the map keep their raw bits, where E and L cancel too."""
    model, optimizer = setup()
    worn(model, optimizer)
    curved = dict(optimizer.curved())["0.weight"]
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    saved[0]["0.weight"] += 0.9 * transform.tolerance(curved.spec.config.mode, curved.raw, curved.scales())
    twin, resumed = setup()
    twin.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert torch.equal(known(twin, resumed).raw, curved.raw)
    saved[0]["0.weight"][1:] *= 1.0001  # more than that is
    twin.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    torch.testing.assert_close(known(twin, resumed).effective()[1:], saved[0]["0.weight"][1:], rtol=2e-6, atol=1e-9)
