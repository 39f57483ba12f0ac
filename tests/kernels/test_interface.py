"""Kernels get no memory of another dtype, device, size or layout than they expect: the error names the tensor."""

import pytest
import torch

from symexplin.kernels.interface import FactoredMap, Kernels, Rates, Tensors

RATES = Rates(1e-2, 0.1, 0.9, 0.99, 1e-2, 0.5, 0.5)
PAPER = FactoredMap("mismatch", False, False, 7.5)
STATE, VECTORS = ("weights", "exp_avgs", "exp_avg_sqs", "masters"), ("vectors", "gradients")


class Steps:
    """Steps that touch nothing and say so."""

    def pull(self, *_):
        raise LookupError("the gradients are read")

    update = pull


KERNELS = Kernels("none", lambda *_: Steps(), lambda *_: Steps())


class Subclass(torch.Tensor):
    pass


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


WRONG = {
    "dtype": (torch.Tensor.double, r"Tensor of torch\.float64"),
    "device": (lambda t: t.to("meta"), "on meta"),
    "size": (lambda t: t[:-1].clone(), r"shape \([124]"),
    "gaps": (lambda t: torch.stack([t, t], -1)[..., 0], r"strides \((4, )?2"),
    "negated later": (lambda t: torch._neg_view(-t), "Tensor that torch will negate later"),
    "zeros later": (lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype), "Tensor without memory"),
    "freed": (freed, "Tensor without memory"),
    "subclass": (lambda t: t.as_subclass(Subclass), "Subclass of"),
}


def given(dtype, names):
    """Two tensors of each name: matrices, or vectors of the first one's rows and the second one's columns."""
    dtypes = {"weights": dtype, "grads": dtype}
    sizes = {"vectors": (3, 2), "gradients": (3, 2)}
    return {
        name: [torch.ones(size, dtype=dtypes.get(name, torch.float32)) for size in sizes.get(name, ((3, 4), (5, 2)))]
        for name in names
    }


def step(lists):
    """Plan and step: the steps are reached only if all memory is right."""
    tensors = Tensors(*(lists[name] for name in STATE))
    if "vectors" in lists:
        vectors, gradients = ([(a, *[None] * 7), (None, b, *[None] * 6)] for a, b in map(lists.get, VECTORS))
        plan = KERNELS.plan(PAPER, tensors, vectors, gradients)
    else:
        plan = KERNELS.plan(None, tensors)
    for call in (lambda: plan.pull(lists["grads"]), lambda: plan.update(lists["grads"], RATES, None)):
        with pytest.raises(LookupError):
            call()


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", [(*STATE, "grads"), (*STATE, "grads", *VECTORS)], ids=["closed", "factored"])
def test_wrong_memory_is_refused_by_name(wrong, dtype, names):
    step(given(dtype, names))
    change, found = WRONG[wrong]
    for name in names:
        lists = given(dtype, names)
        lists[name][1] = change(lists[name][1])
        blamed, said = (name, found) if (name, wrong) != ("weights", "size") else ("exp_avgs", r"shape \(5, 2\)")
        with pytest.raises(ValueError, match=rf"^{blamed}\[1\].* must be .*, got .*{said}"):
            step(lists)


def test_a_plan_without_gradients_wants_them_in_the_step():
    plan = KERNELS.plan(None, Tensors(*given(torch.float32, STATE).values()))
    with pytest.raises(ValueError, match="grads must be given"):
        plan.update(None, RATES, None)
    lists = given(torch.float32, (*STATE, "grads"))
    with pytest.raises(LookupError):
        KERNELS.plan(None, Tensors(*lists.values())).update(None, RATES, None)
    for wrong in (lists["grads"][:1], lists["grads"] * 2):
        with pytest.raises(ValueError, match=r"argument 2 is (shorter|longer)"):
            plan.pull(wrong)
