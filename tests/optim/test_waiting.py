"""A step waits for no device: nothing that depends on values is read on the way."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import symexplin as sel
from symexplin import kernels
from symexplin.kernels.factors import Sums
from symexplin.optim import SELMuon, fused, placement
from training import backward, build, network, train

aten = torch.ops.aten
# Operations whose outcome, or the shape of it, the host must wait for.
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
COUNTERS = {"step", "scale_step"}


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


def watched(model, optimizer):
    """What a step reads besides its counters, which lie on the CPU wherever the parameters are."""
    optimizer.zero_grad()
    backward(model, 5)
    with Waits() as waits:
        optimizer.step()
    assert waits.found
    return waits.found - {
        s[k].untyped_storage().data_ptr() for s in optimizer.state.values() for k in COUNTERS & set(s)
    }


@pytest.mark.parametrize("kind", [sel.SELAdamW, SELMuon])
@pytest.mark.parametrize("preset", ["paper", "paper+offset", "absorbed"])
def test_a_readable_step_reads_counters_alone(monkeypatch, preset, kind):
    model = network()
    optimizer = kind(sel.param_groups(model, lr=1e-2, config=sel.preset(preset)), total_steps=50, max_grad_norm=0.1)
    train(model, optimizer, 2)
    with kernels.using("readable"):
        assert watched(model, optimizer)  # on a CPU it looks: at the norm, and at the samples
        monkeypatch.setattr(placement, "on_host", lambda _: False)  # as on an accelerator
        optimizer._writes = type(optimizer._writes)()
        optimizer._writes.know(optimizer.entries())
        assert not watched(model, optimizer)


class Deaf:
    """Kernels that compute nothing, and so read nothing."""

    name = "deaf"

    def covers(self, *_):
        return True

    def pull(self, _, __, factors, grads):
        return Sums(*(torch.zeros(3, axis.shape[1]) for axis in factors), torch.zeros(len(grads)))

    def update(self, *_):
        pass


def test_a_step_through_kernels_reads_counters_alone(monkeypatch):
    model = network()
    optimizer = build(model)
    train(model, optimizer, 2)
    monkeypatch.setattr(fused, "is_wanted", lambda: True)  # under the watching mode, too
    monkeypatch.setattr(fused, "backend_for", lambda _: Deaf())
    monkeypatch.setattr(placement, "on_host", lambda _: False)
    optimizer._writes = type(optimizer._writes)()
    optimizer._writes.know(optimizer.entries())
    assert not watched(model, optimizer)
    assert sum(len(b.views) for b in optimizer._batches[1] if isinstance(b, (fused.FusedBatch, fused.PlainBatch))) == 6
