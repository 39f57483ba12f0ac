"""A step of any raw-space optimizer: clipping, rates of 0, groups, closures, autocast, averages, memory, waits."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

import symexplin as sel
from networks import strong
from pairwise import every_pair
from symexplin import closed, kernels
from training import PAPER, SELSGD, assert_same_bits, backward, batch, build, network, same, train

DEFAULT = sel.SELConfig()
MAPS = {"default": DEFAULT, "paper": PAPER, "frozen": strong("frozen"), "sinh": sel.SELConfig(mode="sinh")}
ends = pytest.mark.parametrize("config", [DEFAULT, PAPER], ids=["default", "paper"])


def set_lr(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


@pytest.mark.usefixtures("path")
def test_saved_weights_are_known_to_have_changed():
    model = network()
    optimizer = build(model, DEFAULT)
    backward(model, 0)
    loss = model(torch.ones(2, 12, requires_grad=True)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_pair(
    name=list(MAPS), kind=[sel.SELAdamW, SELSGD], dtype=[torch.float32, torch.bfloat16], choice=["auto", "readable"]
)
def test_a_rate_of_zero_keeps_the_bits_and_advances_the_moments(name, kind, dtype, choice):
    model = network(dtype)
    with torch.no_grad():
        model[0].weight[:, 0], model[0].weight[:, 1], model[1].bias[:5] = -0.0, 0.0, -0.0
    before = copy.deepcopy(model)
    optimizer = build(model, MAPS[name], kind=kind)
    set_lr(optimizer, 0.0)
    with kernels.using(choice):
        train(model, optimizer, 3)
    assert_same_bits(model, before)
    for state in optimizer.state.values():
        assert float(state["step"]) == 3
        assert any(bool((value != 0).any()) for key, value in state.items() if key.startswith(("exp_avg", "momentum")))
    assert optimizer.param_groups[0]["steps"] == 3
    set_lr(optimizer, 1e-2)
    with kernels.using(choice):
        train(model, optimizer, 1)
    assert bool((model[0].weight[:, :2] != 0).any())  # zeros move


@ends
def test_the_idle_step_of_a_distributed_checkpoint_counts_nothing(config):
    model, twin = network(), network()
    optimizer, reference = build(model, config), build(twin, config)
    get_state_dict(model, optimizer)
    assert optimizer.param_groups[0]["steps"] == 0
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())
    assert_same_bits(train(model, optimizer, 3), train(twin, reference, 3))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    set_lr(optimizer, 0.0)
    optimizer.step()  # a later one is a step
    assert optimizer.param_groups[0]["steps"] == 4


def test_a_parameter_frozen_when_groups_were_built_joins_later():
    model = network()
    model[:2].requires_grad_(False)
    optimizer = build(model)
    assert [group["role"] for group in optimizer.param_groups] == ["curved"]
    train(model, optimizer, 3)
    assert_same_bits(model[0], network()[0])
    model.requires_grad_(True)
    for group in sel.param_groups(model[:2], lr=1e-2, config=PAPER, whole=model):
        optimizer.add_param_group(group)
    train(model, optimizer, 3, start=3)
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), network().parameters(), strict=True))
    assert [name for name, _ in optimizer.curved()] == ["3.weight", "3.bias", "0.weight", "0.bias"]
    assert [float(optimizer.state[p]["step"]) for p in (model[3].bias, model[0].bias, model[1].bias)] == [6, 3, 3]


def test_a_group_added_by_hand_is_trained_saved_and_loaded():
    """Parameters with names and nothing else; keys of users and schedulers stay."""
    pairs = []
    for _ in range(2):
        model, extra = network(), nn.Parameter(torch.ones(3))
        optimizer = build(model)
        optimizer.add_param_group({"params": [("extra", extra)], "label": "mine"})
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.5)
        pairs.append((extra, optimizer))
    (extra, first), (other, second) = pairs
    extra.grad = torch.ones(3)
    first.step()
    second.load_state_dict(first.state_dict())
    assert not torch.equal(extra, torch.ones(3))
    assert second.param_groups[-1]["label"] == "mine"
    assert second.param_groups[0]["initial_lr"] == 1e-2
    assert torch.equal(second.state[other]["exp_avg"], first.state[extra]["exp_avg"])


@pytest.mark.usual_state  # the closure is the test's, and would run in the state
def test_a_closure_equals_the_open_loop():
    model, reference = network(), network()
    optimizer, other = build(model), build(reference)
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            return loss

        with torch.no_grad():
            expected = reference(batch(step)).square().mean()
        assert torch.equal(optimizer.step(closure), expected)
        train(reference, other, 1, start=step)
    assert_same_bits(model, reference)


def test_total_steps_may_come_later_and_be_changed():
    model, twin = network(), network()
    optimizer, expected = build(model, total_steps="later"), build(twin)
    train(model, optimizer, 1)
    backward(model, 1)
    with pytest.raises(ValueError, match=r"total_steps is still 'later': call set_total_steps\(T\) before the second"):
        optimizer.step()
    optimizer.set_total_steps(100)
    assert_same_bits(train(model, optimizer, 5, start=1), train(twin, expected, 6))
    optimizer.set_total_steps(50, restart=True)
    assert [(group["total_steps"], group["steps"]) for group in optimizer.param_groups] == [(50, 0), (50, 0)]


def test_the_groups_common_rate_is_the_optimizers_default():
    """Some schedulers, such as transformers' polynomial one, take it for the peak."""
    groups = sel.param_groups(network(), lr=1e-2)
    assert sel.SELAdamW(groups, lr=5e-3).defaults["lr"] == 1e-2
    groups[1]["lr"] = 1e-3
    assert sel.SELAdamW(groups, lr=5e-3).defaults["lr"] == 5e-3
    assert build(network(), lr={"0.*": 1e-2, "*": 1e-3}).defaults["lr"] == 1e-3


def test_a_rate_that_is_put_into_a_group_as_a_tensor_stays_one_and_gradients_of_zero_change_nothing():
    """test_arguments has rates that are passed as tensors."""
    model, rate = network(), torch.tensor(2.0**-10)
    optimizer = sel.SELAdamW(model, config=PAPER, total_steps=9)
    for group in optimizer.param_groups:
        group["lr"] = rate
    rate.fill_(0.0)
    before = copy.deepcopy(model)
    assert_same_bits(before, train(model, optimizer, 1))
    optimizer = sel.SELAdamW(model, weight_decay=0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(3):
        optimizer.step()
    assert_same_bits(model, before)


def test_a_grad_scaler_changes_nothing_but_the_steps_it_skips():
    """Scaling by a power of two is exact: the run equals one without, in which the overflowing steps never were."""
    model, reference = network(), network()
    optimizer, other = build(model), build(reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for step in (99, 0, 1, 2, 3, 99, 4, 5):  # the first overflows before there is any state, as fp16 runs start
        before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        scaler.scale(model(batch(step)).square().mean()).backward()
        if step == 99:
            model[3].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        if step == 99:
            assert_same_bits(model, before)
            assert same(optimizer.state_dict(), state)
    assert_same_bits(model, train(reference, other, 6))


@pytest.mark.usual_state  # compiled code would enter the state, and leave it where the graph breaks
@ends
def test_a_compiled_model_is_not_compiled_again_and_a_compiled_step_is_the_step(config):
    """Graphs are counted: none after the first step, whatever the steps, the schedule and a swap of weights write."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, reference = network(), network()
    optimizer, other = build(model, config), build(reference, config)
    compiled, step = torch.compile(model, backend=counter), torch.compile(optimizer.step, backend="eager")
    graphs = []
    for i in range(6):
        for net, opt, call in ((compiled, optimizer, step), (reference, other, other.step)):
            opt.zero_grad()
            net(batch(i)).square().mean().backward()
            set_lr(opt, 1e-2 / (i + 1))
            call()
            if i == 3:
                net.load_state_dict(copy.deepcopy(net.state_dict()))
        graphs.append(counter.frame_count)
    assert graphs == [1] * 6
    assert_same_bits(model, reference)


def test_parameters_without_values_are_refused_at_the_first_step():
    with torch.device("meta"):
        whole = network()
    part = network()
    part[3].to("meta")
    with FakeTensorMode():
        fake = nn.Sequential(nn.Linear(12, 4))
    for model, kind in ((whole, "on the device 'meta'"), (part, "on the device 'meta'"), (fake, "of FakeTensorMode")):
        optimizer = build(model)
        with pytest.raises(ValueError, match=rf"params must have values, got \d\.weight {kind}"):
            optimizer.step()


def test_a_parameter_with_a_gradient_is_updated_though_it_is_frozen_at_the_step():
    """As by torch's AdamW: adapters that are trained in turn may be frozen between backward and step."""
    model, twin = network(), network()
    optimizer, other = build(model), build(twin)
    for step in range(2):
        backward(model, step)
        model[0].requires_grad_(False)
        optimizer.step()
        model[0].requires_grad_(True)
        backward(twin, step)
        other.step()
    assert_same_bits(model, twin)


@pytest.mark.usual_state  # a copy steps at the line of its wrapper
@every_pair(what=["rate", "weight", "gradient", "nan"], config=[DEFAULT, PAPER], choice=["auto", "readable"])
def test_divergence_is_told_once_by_name_at_the_line_that_steps(what, config, choice):
    model = network()
    optimizer = build(model, config, lr=300.0 if what == "rate" else 1e-3, max_grad_norm=None)
    if what == "weight":
        model[3].weight.data[0, 0] = 3e22
    with warnings.catch_warnings(record=True) as told, kernels.using(choice):
        warnings.simplefilter("always")
        for step in range(60):
            optimizer.zero_grad()
            backward(model, step)
            if step == 2 and what in ("gradient", "nan"):
                model[0].bias.grad[1] = torch.inf if what == "gradient" else torch.nan
            optimizer.step()
    (warning,) = [w for w in told if "not finite" in str(w.message)]
    assert re.match(r"step \d+: ", str(warning.message))
    assert {"rate": "", "weight": ""}.get(what, "step 3: the gradient of 0.bias") in str(warning.message)
    assert warning.filename == __file__
    assert not all(p.isfinite().all() for p in model.parameters())  # nothing blames or repairs the weights
    assert not torch.isfinite(torch.tensor(sel.stats(model, optimizer)["slope/mean"])) or what == "weight"


@pytest.mark.usual_state  # a copy steps at the line of its wrapper
def test_no_gradient_at_the_first_step_is_told():
    model = network()
    with pytest.warns(UserWarning, match="no parameter has a gradient at the first step") as told, torch.device("meta"):
        build(model).step()
    assert told[0].filename == __file__


# Operations whose outcome, or the shape of it, the host must wait for.
WAITING = {torch.ops.aten.__getattr__(name).default for name in ("_local_scalar_dense", "nonzero", "masked_select")}
WAITING.add(torch.ops.aten.equal.default)


class Waits(TorchDispatchMode):
    """Collects the storages of tensors whose values are asked for."""

    def __init__(self):
        super().__init__()
        self.storages = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        mask = function is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if function in WAITING or mask:
            self.storages.add(args[0].untyped_storage().data_ptr())
        return function(*args, **(kwargs or {}))


NAMES = ["default", "paper", "paper+offset", "absorbed"]


@every_pair(name=NAMES, dtype=[torch.float32, torch.bfloat16], kind=[sel.SELAdamW, SELSGD])
def test_a_step_waits_for_no_device(name, dtype, kind, monkeypatch):
    """It reads nothing but counters, which lie on the CPU wherever the parameters are."""
    monkeypatch.setattr(
        closed, "_where", lambda mask, formula, values, others: torch.where(mask, formula(*values), others)
    )
    model, config = network(dtype), sel.preset(name)
    optimizer = build(model, config, kind=kind, max_grad_norm=0.1)
    train(model, optimizer, 2)
    backward(model, 5)
    counters = {id(v): v for s in optimizer.state.values() for k, v in s.items() if k == "step"}
    own = {v.untyped_storage().data_ptr() for v in counters.values()}
    with Waits() as waits:
        optimizer.step()
    assert waits.storages - own  # the norm, which is looked at on a CPU, on others every hundredth step
    optimizer._diverged = True  # as between two looks
    with Waits() as waits:
        optimizer.step()
    assert waits.storages <= own


def peak(function):
    """Return the largest number of bytes that a call holds beyond what it finds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("choice", ["auto", "readable"])
@ends
def test_a_step_holds_little_besides_the_state(config, choice):
    """A few times a chunk of 2^18 numbers in pure PyTorch; in kernels one, and the scales in float64."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(10)))
    optimizer = build(model, config)
    with kernels.using(choice):
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.randn(p.shape)
            optimizer.step()
        has_kernels = kernels.kernels_for(torch.device("cpu")) is not None
        chunk = 2**20 * torch.get_num_threads()
        assert peak(optimizer.step) < ((0.1 if config.closed else 1.9) * chunk if has_kernels else 8.0 * chunk)


def test_a_step_in_a_cuda_graph_is_refused(monkeypatch):
    model = network()
    optimizer = build(model)
    backward(model, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="outside of a CUDA graph"):
        optimizer.step()
