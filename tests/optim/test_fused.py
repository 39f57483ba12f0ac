"""Steps through kernels against the same steps through the readable formulas; what is left to those; what stays."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import symexplin as sel
from symexplin.kernels import backend_for, using
from symexplin.optim.batch import ReadableBatch
from symexplin.presets import PRESETS
from training import assert_same_bits, backward, build, network, train

pytestmark = pytest.mark.skipif(backend_for("cpu") is None, reason="needs a C compiler")

# Preset, and how many of the network's six tensors a fast path takes: all but weights with a full residual.
TAKEN = {name: {"paper+offset": 4, "structured_linear": 2}.get(name, 6) for name in PRESETS}
# Relative to the largest entry of each tensor, after 12 steps; half precision rounds the gradients' inputs.
CLOSE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def taken_by_fast_paths(optimizer):
    return sum(len(b.views) for b in optimizer._batches[1] if not isinstance(b, ReadableBatch))


def run(config, dtype, kernels, steps=12, **settings):
    model = network(dtype)
    optimizer = build(model, config, **settings)
    taken = set()
    with using(kernels):
        for step in range(steps):
            optimizer.zero_grad()
            backward(model, step)
            if step % 5 == 3:
                next(model.parameters()).grad = None  # parameters may come and go
            optimizer.step()
            taken.add(taken_by_fast_paths(optimizer))
    return model, optimizer, taken


def assert_close(ours, theirs, dtype):
    for name, value in theirs.items():
        largest = float(value.abs().max()) if value.numel() else 0.0
        gap = float((ours[name] - value).abs().max()) if value.numel() else 0.0
        assert gap <= CLOSE[dtype] * largest + 1e-30, (name, gap, largest)


def tensors(model, optimizer):
    state = {
        f"{i}.{key}": value.double()
        for i, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
    }
    return {name: p.detach().double() for name, p in model.named_parameters()} | state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PRESETS)
def test_kernels_take_the_same_steps(name, dtype):
    """Clipping, decay, annealing, biases, a norm's plain weights, a parameter that sometimes has no gradient."""
    ours, optimizer, taken = run(sel.preset(name), dtype, "auto", weight_decay=0.1)
    theirs, reference, none = run(sel.preset(name), dtype, "readable", weight_decay=0.1)
    assert taken == {TAKEN[name], TAKEN[name] - (name not in ("paper+offset", "structured_linear"))}
    assert none == {0}
    assert_close(tensors(ours, optimizer), tensors(theirs, reference), dtype)
    assert float(optimizer.grad_norm) == pytest.approx(float(reference.grad_norm), rel=50 * CLOSE[dtype])


def test_without_clipping_and_with_a_rate_of_zero():
    """A warm-up from 0 moves no bit of the weights and counts the step; the moments are the readable path's."""
    for kernels in ("auto", "readable"):
        model, before = network(), network()
        optimizer = build(model, sel.preset("paper", start="matched"), max_grad_norm=None)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        with using(kernels):
            train(model, optimizer, 2)
        assert_same_bits(model, before)
        assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
        moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        if kernels == "auto":
            ours = moments
    for a, b in zip(ours, moments, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads(dtype):
    """Twice with one thread, twice with two: one end."""

    def wide(threads):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 700), nn.Linear(700, 12)).to(dtype)
        optimizer = build(model)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):  # gradients by hand: those of torch's products may depend on the threads
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()
        return model, optimizer.grad_norm

    threads = torch.get_num_threads()
    try:
        (first, norm), *others = [wide(n) for n in (1, 1, 2, 2)]
    finally:
        torch.set_num_threads(threads)
    for other, other_norm in others:
        assert_same_bits(other, first)
        assert torch.equal(other_norm, norm)


def test_gradients_are_left_alone_and_saved_weights_are_known_to_have_changed():
    model = network()
    optimizer = build(model, max_grad_norm=1e-3)
    backward(model, 0)
    grads = [p.grad.clone() for p in model.parameters()]
    loss = model(torch.ones(2, 12, requires_grad=True)).sum()
    optimizer.step()
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(p.grad, grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_of_any_stride_are_read():
    ours, theirs = network(), network()
    for model, fold in ((ours, lambda g: g.t().contiguous().t()), (theirs, lambda g: g)):
        optimizer = build(model)
        backward(model, 0)
        for p in model.parameters():
            p.grad = fold(p.grad) if p.dim() == 2 else p.grad.sum().expand(p.shape)
        optimizer.step()
    assert_same_bits(ours, theirs)


def test_no_temporary_is_as_large_as_a_weight():
    """A step after the first allocates less than a hundredth of the weights at once, at the rule's hungriest moment."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    optimizer = build(model)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
        optimizer.step()
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < 0.01 * sum(p.numel() for p in model.parameters()) * 4


def move_weight(weight, optimizer):  # noqa: ARG001
    weight.data = weight.data.clone()


def transpose_weight(weight, optimizer):  # noqa: ARG001
    """At the same address; of a square weight even in the same shape."""
    weight.data = weight.data.t().contiguous().t()


def stride_panels(weight, optimizer):
    state = optimizer.state[weight]
    state["panel0"].data = state["panel0"].data.t().contiguous().t()


def copy_moments(weight, optimizer):
    optimizer.state[weight]["exp_avg"].data = optimizer.state[weight]["exp_avg"].data.clone()


def load_state(weight, optimizer):  # noqa: ARG001
    optimizer.load_state_dict(optimizer.state_dict())


def move_state(weight, optimizer):
    optimizer.state[weight]["raw"] = optimizer.state[weight]["raw"].clone()


def write(weight, optimizer):  # noqa: ARG001
    weight.data.mul_(1.5)


@pytest.mark.parametrize(
    "change", [move_weight, transpose_weight, stride_panels, copy_moments, load_state, move_state, write]
)
def test_what_moves_between_steps_is_found_again(change):
    """Addresses are kept from step to step: whoever moves what lies there must be noticed."""
    ends = []
    for kernels in ("auto", "readable"):
        model = network()
        optimizer = build(model)
        with using(kernels):
            train(model, optimizer, 3)
            change(model[0].weight, optimizer)
            train(model, optimizer, 3, start=3)
        ends.append(tensors(model, optimizer))
    assert_close(*ends, torch.float32)


def shrink(tensor):
    tensor.data = tensor.data[:2].clone()


def halve(tensor):
    tensor.data = tensor.data.bfloat16()


def turn(tensor):
    tensor.data = tensor.data.t().contiguous().t()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, shrink) for name in ("grad", "raw", "exp_avg", "panel0", "panel1_exp_avg_sq")),
        ("exp_avg", halve),
        ("raw", turn),
    ],
)
def test_tensors_that_somebody_has_made_smaller_are_not_read_beyond_their_end(name, change):
    """The readable path ends in an error of torch. Kernels, which do not ask, would read what lies behind."""
    model = network()
    optimizer = build(model)
    train(model, optimizer, 2)
    weight = model[0].weight
    backward(model, 2)
    change(weight.grad if name == "grad" else optimizer.state[weight][name])
    with pytest.raises(RuntimeError):
        optimizer.step()


def test_the_default_device_is_not_asked():
    ours, theirs = network(), network()
    train(theirs, build(theirs), 2)
    optimizer = build(ours)
    for step in range(2):
        optimizer.zero_grad()
        backward(ours, step)
        with torch.device("meta"):
            optimizer.step()
    assert_same_bits(ours, theirs)


def test_operations_that_somebody_watches_are_torchs():
    """Under a dispatch mode (fake tensors, tracing, counting) kernels would work unseen, or on memory that is none."""
    model = network()
    optimizer = build(model)
    backward(model, 0)
    with FlopCounterMode(display=False):
        optimizer.step()
    assert taken_by_fast_paths(optimizer) == 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert backend_for("cpu") is None


@pytest.mark.parametrize("spike", [1.5e19, 1e20])
def test_a_spike_that_adamw_survives_is_survived(spike):
    """Without clipping g^2 alone leaves float32's range where (1 - beta2) g^2 does not."""
    model = network()
    optimizer = build(model, max_grad_norm=None)
    train(model, optimizer, 2)
    for step in range(2, 5):
        optimizer.zero_grad()
        backward(model, step)
        if step == 2:
            model[0].weight.grad[1, 1] = spike
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_betas_of_zero_are_the_sign_of_the_gradient():
    ends = []
    for kernels in ("auto", "readable"):
        model = network()
        optimizer = build(model, betas=(0.0, 0.0), lr=1e-3)
        with using(kernels):
            for step, size in enumerate((1.0, 1e4, 1.0, 1e-4)):
                for p in model.parameters():
                    generator = torch.Generator().manual_seed(step)
                    p.grad = size * torch.randn(p.shape, generator=generator)
                optimizer.step()
        ends.append(tensors(model, optimizer))
    assert_close(*ends, torch.float32)


def test_a_rule_of_ones_own_is_not_replaced():
    class Still(sel.SELAdamW):
        def rule_(self, target, group):
            pass

    model, before = network(), network()
    optimizer = Still(sel.param_groups(model, lr=0.1, config=sel.preset("paper", start="matched")), total_steps=10)
    train(model, optimizer, 2)
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)


def test_a_gradient_of_another_dtype_is_read_as_what_it_is():
    """torch lets a gradient have another dtype than its parameter (`grad_dtype`), from one step to the next."""
    ends = []
    for halves in (False, True):
        model = network()
        optimizer = build(model)
        for step in range(4):
            for p in model.parameters():
                p.grad_dtype = None
                grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
                p.grad = grad if halves and step > 1 else grad.float()
            optimizer.step()
        ends.append(tensors(model, optimizer))
    assert_close(*ends, torch.float32)


def test_one_parameters_count_may_be_edited():
    """Reset a layer in the middle of a run, as for units that died: its corrections begin anew, all others go on."""
    ends = []
    for kernels in ("auto", "readable"):
        model = network()
        optimizer = build(model)
        with using(kernels):
            train(model, optimizer, 4)
            for name, value in optimizer.state[model[3].weight].items():
                if name not in ("raw", "panel0", "panel1"):
                    value.zero_()
            train(model, optimizer, 3, start=4)
        ends.append(tensors(model, optimizer))
    assert_close(*ends, torch.float32)
