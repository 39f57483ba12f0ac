"""SELAdamW in the habits of a training loop: scaling, autocast, freezing, averaging, checkpointing, compilation."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import symexplin as sel
from symexplin.presets import IDENTITY
from training import assert_same_bits, backward, batch, build, network, train


def frozen_bits(optimizer):
    """Return everything an optimizer knows, as bytes."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    return buffer.getvalue()


def scaled_step(model, optimizer, scaler, step, spoil=False):
    optimizer.zero_grad()
    scaler.scale(model(batch(step)).square().mean()).backward()
    if spoil:
        model[3].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()


def test_a_grad_scaler_changes_nothing_but_the_steps_it_skips():
    """Scaling by a power of two is exact: the run equals one without, in which the overflowing steps never were."""
    model, reference = network(), network()
    optimizer, other = build(model), build(reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scaled_step(model, optimizer, scaler, 99, spoil=True)  # overflow before there is any state, as fp16 runs start
    assert_same_bits(model, network())
    assert not optimizer.state
    for step in range(8):
        scaled_step(model, optimizer, scaler, step)
        if step == 4:
            weights, state, scale = copy.deepcopy(model), frozen_bits(optimizer), scaler.get_scale()
            scaled_step(model, optimizer, scaler, 98, spoil=True)
            assert scaler.get_scale() == scale / 2
            assert_same_bits(model, weights)
            assert frozen_bits(optimizer) == state
    train(reference, other, 8)
    assert_same_bits(model, reference)
    assert optimizer.param_groups[0]["steps"] == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_trains(dtype):
    """Half-precision activations, full-precision weights: near the full-precision run."""
    model, reference = network(), network()
    optimizer, other = build(model, lr=1e-3), build(reference, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    for step in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            out = model(batch(step))
            assert model[0](batch(step)).dtype == dtype
            loss = out.float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    train(reference, other, 20)
    start = network()
    for p, q, r in zip(model.parameters(), reference.parameters(), start.parameters(), strict=True):
        assert torch.norm(p - q) < 0.2 * torch.norm(q - r)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_freezing_and_thawing_is_torchs_adamw(set_to_none):
    """Without a gradient nothing moves; a gradient of zeros moves by momentum and decay, here as there."""
    model, reference = network(torch.float64), network(torch.float64)
    optimizer = build(model, IDENTITY, max_grad_norm=None, weight_decay=0.1)
    adamw = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(12):
        for net, opt in ((model, optimizer), (reference, adamw)):
            net[0].weight.requires_grad_(not 3 <= step < 6)
            net[1].requires_grad_(not 5 <= step < 9)
            opt.zero_grad(set_to_none=set_to_none)
            backward(net, step)
            opt.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
    assert float(optimizer.state[model[0].weight]["step"]) == (9 if set_to_none else 12)


def test_a_frozen_parameter_keeps_its_bits_and_its_state():
    model = network(torch.bfloat16)
    optimizer = build(model)
    train(model, optimizer, 3)
    model[0].requires_grad_(False)
    weights, state = copy.deepcopy(model[0]), copy.deepcopy(optimizer.state[model[0].weight])
    train(model, optimizer, 3, start=3)
    assert_same_bits(model[0], weights)
    assert all(torch.equal(value, state[name]) for name, value in optimizer.state[model[0].weight].items())
    model[0].requires_grad_(True)
    train(model, optimizer, 1, start=6)
    assert not torch.equal(model[0].weight, weights.weight)


def test_a_parameter_frozen_when_groups_were_built_joins_later():
    """A thawed layer's groups, curved and plain, are added: it is matched to the weights found and trained."""
    model = network()
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    optimizer = build(model)
    assert [group["role"] for group in optimizer.param_groups] == ["curved"]
    train(model, optimizer, 3)
    assert_same_bits(model[0], network()[0])
    model.requires_grad_(True)
    for group in sel.param_groups(model[:2], lr=1e-2, config=sel.preset("paper", start="matched")):
        optimizer.add_param_group(group)
    expected = sel.functional.inverse(model[0].weight.detach(), mode="mismatch", beta=7.5)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1, start=3)
    torch.testing.assert_close(optimizer.state[model[0].weight]["raw"], expected, rtol=1e-5, atol=1e-7)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    train(model, optimizer, 3, start=4)
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), network().parameters(), strict=True))
    names = [name for name, _ in optimizer.coordinates()]
    assert names == ["3.weight", "3.bias", "0.weight", "0.bias"]


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


@pytest.mark.parametrize("go_on", [False, True])
def test_averages_are_of_effective_weights_and_can_be_swapped_in(go_on):
    """Swapped in and out again, nothing was; swapped in and trained, the averages are what is trained on."""
    model = network()
    optimizer = build(model, lr=1e-3)
    average = torch.optim.swa_utils.AveragedModel(model)
    kept = []
    for step in range(4):
        train(model, optimizer, 1, start=step)
        average.update_parameters(model)
        kept.append(copy.deepcopy(model))
    mean = torch.stack([twin[0].weight for twin in kept]).mean(0)
    torch.testing.assert_close(average.module[0].weight, mean, rtol=1e-5, atol=1e-7)
    reference, other = copy.deepcopy((model, optimizer))
    weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(average.module.state_dict())
    if not go_on:
        model(batch(0))
        model.load_state_dict(weights)
        train(model, optimizer, 2, start=4)
        train(reference, other, 2, start=4)
        assert_same_bits(model, reference)
        return
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1, start=4)
    assert_same_bits(model, average.module)
    for name, coordinates in optimizer.coordinates():
        torch.testing.assert_close(
            coordinates.effective(), average.module.get_parameter(name).detach(), rtol=1e-5, atol=1e-6
        )


def test_activation_checkpointing_changes_no_bit():
    model, reference = network(), network()
    optimizer, other = build(model), build(reference)
    for step in range(4):
        optimizer.zero_grad()
        checkpoint(model, batch(step), use_reentrant=False).square().mean().backward()
        optimizer.step()
    train(reference, other, 4)
    assert_same_bits(model, reference)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_not_compiled_again(backend):
    """Graphs are counted: none after the first step, whatever the steps, the schedule and a swap of weights write."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model, reference = network(), network()
    optimizer, other = build(model), build(reference)
    compiled = torch.compile(model, backend=counter)
    graphs = []
    for step in range(8):
        for net, opt in ((compiled, optimizer), (reference, other)):
            opt.zero_grad()
            net(batch(step)).square().mean().backward()
            for group in opt.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            opt.step()
            if step == 4:
                net.load_state_dict(copy.deepcopy(net.state_dict()))
        graphs.append(counter.frame_count)
    assert graphs == [1] * 8
    assert_same_bits(model, reference)


def test_a_pickled_optimizer_goes_on_alike():
    model = network()
    optimizer = build(model)
    train(model, optimizer, 3)
    twin, copied = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, 3, start=3)
    train(twin, copied, 3, start=3)
    assert_same_bits(model, twin)
    assert frozen_bits(optimizer) == frozen_bits(copied)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = nn.Embedding(9, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def test_tied_embeddings_are_torchs_adamw_and_stay_tied_through_a_load():
    tokens = torch.arange(9)
    model, reference = Tied().double(), Tied().double()
    optimizer = build(model, IDENTITY, max_grad_norm=None, weight_decay=0.1)
    adamw = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(6):
        for net, opt in ((model, optimizer), (reference, adamw)):
            opt.zero_grad()
            nn.functional.cross_entropy(net(tokens), tokens.roll(1)).backward()
            opt.step()
        if step == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = Tied().double()
            optimizer = build(model, IDENTITY, max_grad_norm=None, weight_decay=0.1)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    assert model.head.weight is model.embed.weight
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
