"""The mismatched start: the paper's construction in both homes, what it refuses, what a loaded state cancels."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import sharded
import symexplin as sel
from processes import run
from symexplin.starts import is_fresh
from training import assert_same_bits, train

PAPER = sel.preset("paper")
AUTO = sel.preset("paper", beta="auto")
REFUSED = r"start 'mismatched' is for weights that were just drawn: 2\.weight .* Use start='matched'"
# Once trained, the larger model is refused. The smaller one still looks like a draw, and is started again.
SIZES = {"refused": 128, "looks fresh": 8}


def network(size=128, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, size), nn.GELU(), nn.Linear(size, size), nn.GELU(), nn.Linear(size, 6)).to(dtype)


def build(model, config=AUTO, kind=sel.SELAdamW):
    return kind(model, lr=2e-3, config=config, total_steps=100, max_grad_norm=1.0)


def stale():
    model = network()
    with torch.no_grad():
        model[2].weight.mul_(3)
    return model


def bisected(target, beta=7.5):
    """The raw weight of the congruent map (expm1(beta|w|) + beta|w|)/beta = |t|, by bisection in float64."""
    low, high = torch.zeros_like(target, dtype=torch.float64), target.double().abs()
    for _ in range(60):
        middle = (low + high) / 2
        above = (torch.expm1(beta * middle) / beta + middle / beta) > target.double().abs()
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return target.double().sign() * high


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_raw_weights_of_width_1024_are_the_papers(home):
    """Section 4.3: positive weights are Xavier's; negative ones keep 0.75 to 0.80 of their size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024))
    nn.init.xavier_uniform_(model[0].weight)
    targets = [p.detach().clone() for p in model.parameters()]
    if home == "module":
        layer = sel.convert(model, PAPER)[0]
        raws, effective = (layer.raw_weight.detach(), layer.raw_bias.detach()), list(layer.sel_effective().values())
    else:
        optimizer = sel.SELAdamW(model, config=PAPER, total_steps=1)
        optimizer.create_state()
        raws, effective = zip(*((optimizer.state[p]["raw"], p.detach()) for p in model.parameters()), strict=True)
    for raw, target, found in zip(raws, targets, effective, strict=True):
        torch.testing.assert_close(raw.double(), bisected(target), rtol=2e-6, atol=0)
        positive = target > 0
        torch.testing.assert_close(found[positive], target[positive], rtol=1e-6, atol=0)
        ratio = (found / target)[~positive]
        assert 0.75 < float(ratio.min()) <= float(ratio.mean()) <= float(ratio.max()) < 0.80


def test_a_weight_that_was_not_just_drawn_is_refused_at_the_first_step_and_no_weight_is_changed():
    model, before = stale(), stale()
    optimizer = build(model)
    with pytest.raises(ValueError, match=REFUSED):
        train(model, optimizer, 1)
    assert_same_bits(model, before)
    train(model, build(model, sel.preset("paper", beta="auto", start="matched")), 1)  # what the message says
    sel.init_(model, AUTO)
    with pytest.raises(ValueError, match=r"that symexplin\.init_\(model, config\) has drawn and started"):
        train(model, build(model), 1)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_an_optimizer_copied_before_its_first_step_starts_and_refuses_alike(way):
    def twin(pair):
        return copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))

    model = stale()
    other = twin((model, build(model)))
    with pytest.raises(ValueError, match=REFUSED):
        train(*other, 1)
    model = network()
    optimizer = build(model)
    other = twin((model, optimizer))
    assert_same_bits(train(*other, 2), train(model, optimizer, 2))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    "order", ["weights, optimizer, state", "optimizer, weights, state", "optimizer, state, weights"]
)
@pytest.mark.parametrize(
    ("kind", "dtype"), [(sel.SELAdamW, torch.float32), (sel.SELAdamW, torch.bfloat16), (sel.SELMuon, torch.float32)]
)
def test_a_resumed_run_ends_in_the_same_bits(size, order, kind, dtype):
    """Trainers load the weights before the optimizer is built, or after it."""
    model = network(size, dtype)
    optimizer = build(model, kind=kind)
    train(model, optimizer, 4)
    assert all(is_fresh(model[i].weight) for i in (0, 2, 4)) == (size == 8)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    train(model, optimizer, 4, start=4)

    resumed = network(size, dtype)
    for step in order.split(", "):
        if step == "weights":
            resumed.load_state_dict(weights)
        elif step == "optimizer":
            other = build(resumed, kind=kind)
        else:
            other.load_state_dict(state)
            # Before the first step a model that was loaded has the weights of the checkpoint.
            assert order.startswith("optimizer, state") or torch.equal(resumed[2].weight, weights["2.weight"])
    assert_same_bits(train(resumed, other, 4, start=4), model)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_distributed_checkpoints_create_the_state_by_a_step_that_refuses_nothing(size):
    model = network(size)
    optimizer = build(model)
    train(model, optimizer, 4)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    resumed = network(size)
    resumed.load_state_dict(weights)
    other = build(resumed)
    set_state_dict(resumed, other, model_state_dict=weights, optim_state_dict=state)
    assert_same_bits(train(resumed, other, 4, start=4), train(model, optimizer, 4, start=4))
    weary = stale()
    other = build(weary)
    get_state_dict(weary, other)
    with pytest.raises(ValueError, match=REFUSED):
        train(weary, other, 1)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_switch_from_adamw_finds_the_weights_of_adamw(size):
    model = network(size)
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train(model, adamw, 4)
    if size != 8:
        model[2].weight.data.mul_(3)
    before = copy.deepcopy(model)
    optimizer = build(model)
    assert torch.equal(model[2].weight, before[2].weight) == (size != 8)
    sel.from_adamw(optimizer, adamw)
    assert_same_bits(model, before)
    train(model, optimizer, 1, start=4)


def test_a_group_that_is_added_later_starts_or_is_refused_by_itself():
    def added(extra):
        model = network()
        config = PAPER
        for parameter in model[4].parameters():
            parameter.requires_grad_(False)
        optimizer = build(model, config)
        train(model, optimizer, 2)
        extra(model[4].weight)
        for parameter in model[4].parameters():
            parameter.requires_grad_(True)
        before, trained = model[4].weight.detach().clone(), model[2].weight.detach().clone()
        (group,) = sel.param_groups(model[4], lr=1e-2, config=config, whole=model)
        optimizer.add_param_group(group)
        assert torch.equal(model[2].weight, trained)
        return model, optimizer, before

    model, optimizer, before = added(lambda _: None)
    kept = model[4].weight.abs() > 0.9 * before.abs()
    assert torch.equal(kept, before > 0)
    train(model, optimizer, 1, start=2)
    model, optimizer, before = added(lambda weight: weight.data.mul_(9))
    assert torch.equal(model[4].weight, before)
    with pytest.raises(ValueError, match=r"just drawn: 4\.weight "):
        train(model, optimizer, 1, start=2)


def test_frozen_and_plain_parameters_neither_start_nor_refuse():
    model = stale()
    model[2].requires_grad_(False)
    before = copy.deepcopy(model)
    optimizer = build(model)
    assert torch.equal(model[2].weight, before[2].weight)
    assert not torch.equal(model[0].weight, before[0].weight)
    train(model, optimizer, 1)
    before, model = network(), network()
    build(model, sel.preset("paper", exclude=("0.*",)))
    assert torch.equal(model[0].weight, before[0].weight)


def test_parameters_without_values_are_refused_at_the_first_step():
    with torch.device("meta"):
        model = network()
    optimizer = build(model)
    with pytest.raises(ValueError, match=r"on the device 'meta': build the optimizer after to_empty"):
        optimizer.step()


class Shared(nn.Module):
    """One linear layer that is called twice, and one that has its weight."""

    def __init__(self):
        super().__init__()
        self.inner, self.other = nn.Linear(12, 12), nn.Linear(12, 12)
        self.other.weight = self.inner.weight
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        return self.out(self.other(self.inner(self.inner(x))))


def test_a_tied_weight_starts_once():
    torch.manual_seed(0)
    model = Shared()
    before = model.inner.weight.detach().clone()
    optimizer = build(model, PAPER)
    assert model.other.weight is model.inner.weight
    optimizer.create_state()
    torch.testing.assert_close(optimizer.state[model.inner.weight]["raw"].double(), bisected(before), rtol=2e-6, atol=0)


def test_half_precision_starts_as_the_rounded_start_of_its_targets():
    model, reference = network(dtype=torch.bfloat16), network(dtype=torch.bfloat16).float()
    build(model, PAPER)
    build(reference, PAPER)
    assert_same_bits(model, reference.bfloat16())


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (2, 2), (1, 64)])
def test_small_draws_of_one_sign_are_draws(shape):
    """Three of a hundred 2 x 1 draws would lie far from 0 in units of their own deviation."""
    torch.manual_seed(0)
    assert all(is_fresh(nn.init.xavier_uniform_(torch.empty(shape))) for _ in range(1000))


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """What each of two processes has to say of weights sharded by FSDP2."""
    calls = [("started", ("fsdp", PAPER), {}), ("restarted", ("fsdp", PAPER), {}), ("refusal", ("fsdp", PAPER), {})]
    return run(2, tmp_path_factory.mktemp("split"), sharded.several, calls)


@pytest.mark.distributed
@pytest.mark.slow
def test_sharded_weights_start_as_whole_ones_resume_and_are_refused_in_every_process(split):
    expected = sharded.started("whole", PAPER)
    for started, same, refusal in split:
        assert all(torch.equal(started[name], value) for name, value in expected.items())
        assert same == [True, True]
        assert "start 'mismatched' is for weights that were just drawn: 3.weight" in refusal
