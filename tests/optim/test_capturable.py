"""A step waits for no device: nothing that depends on values is read on the way."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import symexplin as sel
from symexplin import kernels
from symexplin.optim import SELMuon, watch
from training import assert_same_bits, backward, build, network, train

aten = torch.ops.aten
# Operations whose outcome, or the shape of it, the host must wait for.
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
COUNTERS = {"step", "scale_step"}


@pytest.fixture(autouse=True)
def _readable():
    """Compiled kernels read their numbers from the CPU; what is tested here is what an accelerator runs."""
    with kernels.using("readable"):
        yield


class Waits(TorchDispatchMode):
    """Collects the storages of tensors whose values are asked for."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        mask = function is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if function in WAITING or mask:
            self.found.add(args[0].untyped_storage().data_ptr())
        return function(*args, **(kwargs or {}))


def step_watched(model, optimizer):
    optimizer.zero_grad()
    backward(model, 5)
    with Waits() as waits:
        optimizer.step()
    return waits.found


@pytest.mark.parametrize("kind", [sel.SELAdamW, SELMuon])
@pytest.mark.parametrize("preset", ["paper", "paper+offset", "absorbed"])
def test_a_step_reads_counters_on_the_cpu_alone(monkeypatch, preset, kind):
    model = network()
    optimizer = kind(sel.param_groups(model, lr=1e-2, config=sel.preset(preset)), total_steps=50, max_grad_norm=0.1)
    train(model, optimizer, 2)
    seen = step_watched(model, optimizer)
    assert seen  # the watch on a CPU reads its flags, and counters are read
    monkeypatch.setattr(watch, "_asynchronous", lambda _: True)  # as on an accelerator: flags stay there
    counters = {s[key].untyped_storage().data_ptr() for s in optimizer.state.values() for key in COUNTERS & set(s)}
    assert step_watched(model, optimizer) <= counters


class Deaf:
    """Kernels that compute nothing, and so read nothing."""

    name = "deaf"

    def covers(self, *_):
        return True

    def pull(self, parts):
        return torch.zeros(len(parts))

    def update(self, parts, *_):
        return self.marks(parts)

    def marks(self, tensors):
        return torch.zeros(len(tensors), 2, dtype=torch.int64)


def test_a_step_through_kernels_reads_counters_alone(monkeypatch):
    deaf = Deaf()
    for module in ("symexplin.optim.fused", "symexplin.optim.watch"):
        monkeypatch.setattr(f"{module}.backend_for", lambda _: deaf)
    monkeypatch.setattr(watch, "_asynchronous", lambda _: True)
    model = network()
    optimizer = build(model)
    train(model, optimizer, 2)
    counters = {s[key].untyped_storage().data_ptr() for s in optimizer.state.values() for key in COUNTERS & set(s)}
    assert step_watched(model, optimizer) <= counters
    assert len(optimizer._fused[0].entries) == 6


@pytest.mark.parametrize("kind", [sel.SELAdamW, SELMuon])
def test_a_captured_step_reads_nothing(monkeypatch, kind):
    model = network()
    groups = sel.param_groups(model, lr=torch.tensor(1e-2), config=sel.preset("paper+offset"))
    optimizer = kind(groups, total_steps=50, max_grad_norm=0.1, capturable=True)
    train(model, optimizer, 2)
    monkeypatch.setattr("symexplin.optim.raw_space._capturing", lambda: True)
    assert step_watched(model, optimizer) == set()


def test_capturable_is_the_same_training():
    plain, captured = network(torch.float64), network(torch.float64)
    train(plain, build(plain, lr=1e-3, max_grad_norm=0.1), 20)
    groups = sel.param_groups(captured, lr=torch.tensor(1e-3, dtype=torch.float64), config=sel.preset("paper"))
    optimizer = sel.SELAdamW(groups, total_steps=100, max_grad_norm=0.1, capturable=True)
    train(captured, optimizer, 20)
    for p, q in zip(plain.parameters(), captured.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-7)  # counters and k(t) are float32 there


def test_counters_follow_a_change_of_mind():
    model = network()
    groups = sel.param_groups(model, lr=1e-2, config=sel.preset("paper"))
    captured = sel.SELAdamW(groups, total_steps=100, max_grad_norm=1.0, capturable=True)
    train(model, captured, 3)
    assert isinstance(captured.param_groups[0]["steps"], torch.Tensor)
    twin = network()
    twin.load_state_dict(model.state_dict())
    optimizer = build(twin)
    optimizer.load_state_dict(captured.state_dict())
    train(twin, optimizer, 1, start=3)
    assert [group["steps"] for group in optimizer.param_groups] == [4, 4]
    assert not optimizer.param_groups[0]["capturable"]


def test_lr_zero_as_a_tensor_keeps_the_bits():
    model = network()
    groups = sel.param_groups(model, lr=torch.tensor(0.0), config=sel.preset("paper"))
    optimizer = sel.SELAdamW(groups, total_steps=100, capturable=True)
    before = network()
    train(model, optimizer, 2)
    assert_same_bits(model, before)


def test_a_write_found_late_is_held_then_taken_over(monkeypatch):
    model = network()
    optimizer = build(model, lr=1e-3)
    train(model, optimizer, 2)
    monkeypatch.setattr(watch, "_asynchronous", lambda _: True)  # as on an accelerator: flags stay there
    model[0].weight.data[0] = 0.125
    found = model[0].weight.detach().clone()
    train(model, optimizer, 1, start=2)
    assert torch.equal(model[0].weight, found)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1, start=3)
    assert torch.equal(model[0].weight, found)
    coordinates = dict(optimizer.coordinates())["0.weight"]
    torch.testing.assert_close(coordinates.effective(), found, rtol=1e-5, atol=1e-7)
    optimizer.param_groups[0]["lr"] = 1e-3
    train(model, optimizer, 1, start=4)
    assert not torch.equal(model[0].weight, found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_of_the_step_is_the_step():
    model, twin = network().cuda(), network().cuda()
    settings = {"total_steps": 100, "max_grad_norm": 0.1, "capturable": True}
    optimizer, other = (
        sel.SELAdamW(sel.param_groups(m, lr=torch.tensor(1e-2, device="cuda"), config=sel.preset("paper")), **settings)
        for m in (model, twin)
    )
    for m, o in ((model, optimizer), (twin, other)):
        backward(m, 0)
        o.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(5):
        graph.replay()
        other.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
