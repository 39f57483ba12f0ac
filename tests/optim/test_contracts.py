"""What torch's optimizers promise, kept: hooks, state, groups, switches, subclasses of tensors; and what is refused."""

import copy
import math
import re
import warnings

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import symexplin as sel
from training import assert_same_bits, backward, build, network, train

OFFSET = sel.preset("paper+offset")


def resumed(optimizer, model, **kwargs):
    """A new optimizer over the same parameters, with the other's state."""
    other = build(model, **kwargs)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


@pytest.mark.parametrize("added", [{"beta": [7.5] * 4, "config": '{"e": {"peak_lr": null}}'}, {"out_dim": [0] * 4}])
def test_a_state_of_an_earlier_version_is_refused_with_what_to_do(added):
    """The first had one beta per parameter, and another form of the scales; the second knew no axes."""
    model = network()
    optimizer = build(model)
    train(model, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0] |= added
    if "out_dim" in added:
        del state["param_groups"][0]["axes"], state["param_groups"][0]["parts"]
    with pytest.raises(ValueError, match=r"state_dict is of an earlier version.*the model's weights alone.*'matched'"):
        build(model).load_state_dict(state)


def test_a_group_added_by_hand_is_saved_and_loaded():
    """As README shows it: parameters with names and nothing else."""
    models, optimizers = [], []
    for _ in range(2):
        model, extra = network(), nn.Parameter(torch.ones(3))
        optimizer = build(model)
        optimizer.add_param_group({"params": [("extra", extra)], "label": "mine"})
        models.append((model, extra))
        optimizers.append(optimizer)
    (model, extra), (first, second) = models[0], optimizers
    extra.grad = torch.ones(3)
    backward(model, 0)
    first.step()
    second.load_state_dict(first.state_dict())
    assert second.param_groups[-1]["label"] == "mine"
    assert torch.equal(second.state[models[1][1]]["exp_avg"], first.state[extra]["exp_avg"])


def test_keys_of_schedulers_and_users_stay_through_a_load():
    model = network()
    optimizer = build(model)
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.5)
    optimizer.param_groups[0]["label"] = "curved ones"
    train(model, optimizer, 1)
    other = resumed(optimizer, model)
    assert other.param_groups[0]["label"] == "curved ones"
    assert other.param_groups[0]["initial_lr"] == 1e-2


@pytest.mark.parametrize("switch", ["amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize"])
def test_switches_that_are_none_here_are_refused_by_name(switch):
    groups = sel.param_groups(network(), lr=1e-2, config=sel.preset("frozen"))
    sel.SELAdamW([{**group, switch: False} for group in groups])
    with pytest.raises(ValueError, match=f"{switch} must be left out, got True: SEL optimizers have no such switch"):
        sel.SELAdamW([{**group, switch: True} for group in groups])
    for kind in (sel.SELAdamW, sel.SELMuon):
        kind(network(), **{switch: None})
        with pytest.raises(ValueError, match=f"{switch} must be left out, got True"):
            kind(network(), **{switch: True})


def test_an_unknown_argument_is_refused_with_the_nearest():
    with pytest.raises(TypeError, match="SELAdamW has no argument 'betta'; did you mean 'betas'"):
        sel.SELAdamW(network(), betta=(0.9, 0.95))
    with pytest.raises(TypeError, match="SELMuon has no argument 'momentun'; did you mean 'momentum'"):
        sel.SELMuon(network(), momentun=0.9)
    with pytest.raises(TypeError, match="SELMuon has no argument 'moment_bit'; did you mean 'moment_bits'"):
        sel.SELMuon(network(), moment_bit=8)


@pytest.mark.parametrize("betas", [(None, 0.9), ("a", 0.9), 0.9, (0.9, 1.0), (0.9,)])
def test_betas_that_are_none_are_named(betas):
    with pytest.raises(ValueError, match="betas must be two numbers in"):
        sel.SELAdamW(network(), betas=betas)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_hooks_see_and_change_what_is_loaded(dtype):
    model = network(dtype)
    optimizer = build(model)
    train(model, optimizer, 2)
    other = build(model)

    def before(_, state_dict):
        found = copy.deepcopy(state_dict)
        found["state"][0]["exp_avg"].fill_(0.123456789)
        return found

    def after(loaded):
        loaded.state[model[0].bias]["exp_avg"].fill_(0.987654321)

    other.register_load_state_dict_pre_hook(before)
    other.register_load_state_dict_post_hook(after)
    other.load_state_dict(optimizer.state_dict())
    for parameter, value in ((model[0].weight, 0.123456789), (model[0].bias, 0.987654321)):
        found = other.state[parameter]["exp_avg"]
        assert found.dtype == torch.float32
        assert torch.equal(found, torch.full_like(found, value))
    assert torch.equal(other.state[model[0].weight]["raw"], optimizer.state[model[0].weight]["raw"])


def test_a_state_dict_hook_may_give_the_state_another_structure():
    model = network()
    optimizer = build(model)
    train(model, optimizer, 1)
    optimizer.register_state_dict_post_hook(lambda _, found: {"packed": list(found.items())})
    assert [name for name, _ in optimizer.state_dict()["packed"]] == ["state", "param_groups"]


def test_counts_may_be_saved_as_numbers():
    model, twin = network(), network()
    optimizer, reference = build(model), build(twin)
    train(model, optimizer, 2)
    train(twin, reference, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    for values in saved["state"].values():
        values |= {name: float(values[name]) for name in ("step", "scale_step") if name in values}
    other = build(model)
    other.load_state_dict(saved)
    assert_same_bits(train(model, other, 2, start=2), twin)


def test_a_cleared_state_starts_anew_from_the_weights_found():
    model = network()
    optimizer = build(model)
    train(model, optimizer, 3)
    weight = model[0].weight.detach().clone()
    optimizer.state[model[0].weight].clear()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1, start=3)
    assert torch.equal(model[0].weight, weight)
    assert float(optimizer.state[model[0].weight]["step"]) == 1.0
    assert float(optimizer.state[model[0].bias]["step"]) == 4.0


def test_a_renamed_module_is_loaded_by_position():
    model = network()
    optimizer = build(model)
    train(model, optimizer, 2)
    renamed = nn.ModuleDict({"first": nn.Sequential(*copy.deepcopy(model))})
    twin = build(renamed, config=sel.preset("paper"))
    with pytest.raises(
        ValueError, match=r"it has 0\.weight where the optimizer has first\.0\.weight.*by_position=True"
    ):
        twin.load_state_dict(optimizer.state_dict())
    twin.load_state_dict(optimizer.state_dict(), by_position=True)
    assert_same_bits(train(renamed["first"], twin, 2, start=2), train(model, optimizer, 2, start=2))
    other = build(nn.ModuleDict({"first": network(), "more": nn.Linear(3, 3)}))
    with pytest.raises(ValueError, match=r"different number of parameter groups|doesn't match the size"):
        other.load_state_dict(optimizer.state_dict(), by_position=True)


def test_a_matrix_that_was_plain_as_it_started_at_zero_is_named():
    config = sel.SELConfig(mode="power")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.zeros_(model[1].weight)
    early = sel.SELAdamW(copy.deepcopy(model), config=config)
    state = early.state_dict()
    nn.init.ones_(model[1].weight)  # as training would
    with pytest.raises(ValueError, match=r"has 1\.weight plain, and here it is not.*before the model's weights are"):
        sel.SELAdamW(model, config=config).load_state_dict(state)
    early.load_state_dict(state)


class Wrapper(nn.Module):
    """A model under `module`, as in DistributedDataParallel."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    "wrap", [Wrapper, torch.compile, lambda m: torch.compile(Wrapper(m)), lambda m: Wrapper(torch.compile(m))]
)
def test_the_state_of_a_wrapped_model_goes_to_the_plain_one_and_back(wrap):
    """Compiled after being wrapped, or before."""
    model = network()
    optimizer = build(wrap(model))
    train(model, optimizer, 2)
    twin = copy.deepcopy(model)
    other = resumed(optimizer, twin)
    assert_same_bits(train(twin, other, 1, start=2), train(model, optimizer, 1, start=2))
    optimizer.load_state_dict(other.state_dict())


def test_a_wrapper_subclass_takes_the_readable_path():
    """Its data pointer is 0. Both tensors follow the steps of a plain one (scales and a norm would be of both)."""
    model, twin = network(), network()
    for name, p in list(twin[0].named_parameters()):
        setattr(twin[0], name, nn.Parameter(TwoTensor(p.detach(), p.detach().clone())))
    ends = []
    for net in (model, twin):
        optimizer = build(net, sel.preset("frozen"), max_grad_norm=None)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in net.parameters():
                grad = torch.randn(p.shape, generator=generator)
                p.grad = TwoTensor(grad, grad.clone()) if isinstance(p.data, TwoTensor) else grad
            optimizer.step()
        ends.append([p.detach() for p in net.parameters()])
    for ours, theirs in zip(ends[1], ends[0], strict=True):
        parts = (ours.a, ours.b) if isinstance(ours, TwoTensor) else (ours,)
        for part in parts:
            torch.testing.assert_close(part, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_autocast_around_the_step_changes_nothing(home):
    """The residual's product is of float32, whatever the forward pass is cast to."""
    ends = []
    for enabled in (False, True):
        model = network()
        if home == "module":
            torch.manual_seed(0)
            sel.convert(model, OFFSET)
            for name, p in model.named_parameters():
                if "delta" in name:
                    nn.init.normal_(p)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                ends.append([layer.weight.detach() for layer in model if hasattr(layer, "raw_weight")])
            continue
        optimizer = build(model, OFFSET)
        for step in range(20):
            optimizer.zero_grad()
            backward(model, step)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                optimizer.step()
        ends.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_the_default_device_does_not_matter_to_the_draw_of_a_residual():
    ours, theirs = network(), network()
    train(theirs, build(theirs, OFFSET), 2)
    optimizer = build(ours, OFFSET)
    for step in range(2):
        optimizer.zero_grad()
        backward(ours, step)
        with torch.device("meta"):
            optimizer.step()
    assert_same_bits(ours, theirs)


def test_a_compiled_step_is_the_step():
    ours, theirs = network(), network()
    optimizer, reference = build(ours), build(theirs)
    step = torch.compile(optimizer.step, backend="eager")
    for i in range(3):
        optimizer.zero_grad()
        backward(ours, i)
        step()
    assert_same_bits(ours, train(theirs, reference, 3))


def overlap(how):
    memory = torch.randn(8, 6)
    parts = {
        "the same elements": (memory[:4], memory[3:]),
        "a view": (memory, memory.view(-1)[10:20]),
        "rows apart": (memory[:4], memory[4:]),
        "columns apart": (memory[:, :3], memory[:, 3:]),
    }
    return [nn.Parameter(part) for part in parts[how]]


@pytest.mark.parametrize("how", ["the same elements", "a view", "rows apart", "columns apart"])
def test_parameters_that_share_elements_are_refused(how):
    model = network()
    optimizer = build(model)
    first, second = overlap(how)
    optimizer.add_param_group({"params": [("first", first), ("second", second)]})
    backward(model, 0)
    if how in ("rows apart", "columns apart"):
        optimizer.step()
        return
    with pytest.raises(ValueError, match="second shares elements with first: leave one of them out"):
        optimizer.step()


@pytest.mark.parametrize("what", ["rate", "weight", "gradient"])
def test_divergence_is_told_once_by_name_and_shows_in_the_figures(what):
    model = network()
    optimizer = build(model, lr=1.0 if what == "rate" else 1e-3, max_grad_norm=None)
    if what == "weight":
        with torch.no_grad():
            model[3].weight[0, 0] = 3e22
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(60):
            optimizer.zero_grad()
            backward(model, step)
            if what == "gradient" and step == 2:
                model[0].bias.grad[1] = math.inf
            optimizer.step()
    (message,) = [str(w.message) for w in told if "diverges" in str(w.message)]
    named = {
        "rate": r"step \d+: ",
        "weight": r"3\.weight",
        "gradient": r"step 3: the gradient of 0\.bias is not finite",
    }
    assert message.startswith("step ")
    assert re.search(named[what], message)
    assert "lower the learning rate" in message
    figures = sel.stats(model, optimizer)
    if not all(p.isfinite().all() for p in model.parameters() if p.dim() == 2):
        assert math.isnan(figures["slope/mean"])
        assert math.isnan(figures["kappa_w/max"])
