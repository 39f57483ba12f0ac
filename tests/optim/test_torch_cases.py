"""What PyTorch's own tests ask of every optimizer (test/test_optim.py), asked of ours, under their names.

docs/reference/tested.md lists the cases that differ; more are in test_optimizer and test_state.
"""

import copy

import pytest
import torch

import symexplin as sel
from training import PAPER, SELSGD, assert_same_bits, build, network, train

both = pytest.mark.parametrize("kind", [sel.SELAdamW, SELSGD])


@both
def test_tensor_lr(kind):
    """One that is put into a group stays; test_arguments has those that are passed."""
    model, rate = network(), torch.tensor(2.0**-10)
    optimizer = kind(model, config=PAPER, total_steps=9)
    for group in optimizer.param_groups:
        group["lr"] = rate
    rate.fill_(0.0)
    assert_same_bits(copy.deepcopy(model), train(model, optimizer, 1))


@both
def test_step_is_noop_for_zero_grads(kind):
    model = network()
    optimizer = kind(model, weight_decay=0.0)
    before = copy.deepcopy(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(3):
        optimizer.step()
    assert_same_bits(model, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [sel.SELConfig(), PAPER])
def test_load_state_dict_hooks(dtype, config):
    """They see and change what is loaded, in full precision."""
    model = network(dtype)
    optimizer = build(model, config)
    train(model, optimizer, 2)
    other = build(model, config)

    def before(_, state_dict):
        changed = copy.deepcopy(state_dict)
        changed["state"][0]["exp_avg"].fill_(0.123456789)
        return changed

    def after(loaded):
        loaded.state[model[0].bias]["exp_avg"].fill_(0.987654321)

    other.register_load_state_dict_pre_hook(before)
    other.register_load_state_dict_post_hook(after)
    other.load_state_dict(optimizer.state_dict())
    for parameter, value in ((model[0].weight, 0.123456789), (model[0].bias, 0.987654321)):
        loaded = other.state[parameter]["exp_avg"]
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded, torch.full_like(loaded, value))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("there", ["cpu", "cuda"])
@pytest.mark.parametrize("config", [sel.SELConfig(), PAPER])
def test_state_dict_with_cuda_params(there, config):
    """A state of the other device is loaded onto the parameters' own; counts stay on the CPU."""
    here = "cuda" if there == "cpu" else "cpu"
    model = network().to(there)
    optimizer = build(model, config)
    train(model, optimizer, 3)
    twin = copy.deepcopy(model).to(here)
    other = build(twin, config)
    other.load_state_dict(optimizer.state_dict())
    for state in other.state.values():
        assert {key: value.device.type for key, value in state.items()} == {
            key: "cpu" if key in ("step", "scale_step") else here for key in state
        }
    train(model, optimizer, 3, start=3)
    train(twin, other, 3, start=3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q.cpu(), rtol=1e-4, atol=1e-5)
