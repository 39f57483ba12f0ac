"""Kernels get no memory of another dtype, device, size or layout than they expect: the error names the tensor."""

import pytest
import torch

from symexplin.kernels.interface import ClosedPlan, Delta, Matrices, ProductPlan, Rates, Tensors

RATES = Rates(1e-2, 0.1, 0.9, 0.99, 1e-2, 0.5, 0.5)
CLOSED = ("weights", "exp_avgs", "exp_avg_sqs", "masters", "grads")
PRODUCTS = ("weights", "raws", "moments", "grads", "factors", "deltas")


def reached(*_):
    raise LookupError("the memory is used")


def untouched(kind):
    """A plan that says when it would use memory."""
    return type(
        "Untouched",
        (kind,),
        dict.fromkeys((*kind.__abstractmethods__, "_update"), reached) | {"_prepare": lambda _: None},
    )


class Subclass(torch.Tensor):
    pass


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


WRONG = {
    "dtype": (torch.Tensor.double, r"Tensor of torch\.float64"),
    "device": (lambda t: t.to("meta"), "on meta"),
    "size": (lambda t: t[:-1].clone(), r"shape \([1-4]"),
    "gaps": (lambda t: torch.stack([t, t], -1)[..., 0], r"strides \(\d+, 2"),
    "negated later": (lambda t: torch._neg_view(-t), "Tensor that torch will negate later"),
    "zeros later": (lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype), "Tensor without memory"),
    "freed": (freed, "Tensor without memory"),
    "subclass": (lambda t: t.as_subclass(Subclass), "Subclass of"),
}


def given(dtype, names):
    """The tensors of each name: two matrices, the factors of their rows and columns, the second one's delta."""
    sizes = {"factors": ((3, 8), (3, 6)), "deltas": ((5, 3), (3, 2), (5, 3), (3, 2))}
    dtypes = {"weights": dtype, "grads": dtype}
    return {
        name: [torch.ones(size, dtype=dtypes.get(name, torch.float32)) for size in sizes.get(name, ((3, 4), (5, 2)))]
        for name in names
    }


def closed(lists, stage):
    """Plan and step: with "update", the plan has the gradients."""
    grads = lists["grads"]
    plan = untouched(ClosedPlan)(None, Tensors(*(lists[n] for n in CLOSED[:4]), grads if stage == "update" else None))
    with pytest.raises(LookupError):
        plan.norm(grads) if stage == "norm" else plan.update(RATES, None)


def products(lists, stage):
    """Plan and step, with the factors in one stage."""
    first = Delta(torch.ones(3, 1), torch.ones(1, 4), torch.ones(3, 1), torch.ones(1, 4))
    deltas, factors = [first, Delta(*lists["deltas"])], lists["factors"]
    matrices = Matrices(lists["weights"], lists["raws"], [0, 3], [0, 4], True, False, deltas, [lists["moments"]] * 2)
    plan = untouched(ProductPlan)(matrices)
    with pytest.raises(LookupError):
        plan.norm(lists["grads"], factors if stage == "norm" else given(torch.float32, ["factors"])["factors"])
    with pytest.raises(LookupError):
        plan.push(None, factors) if stage == "push" else plan.update(RATES, None, factors)


STAGES = [(CLOSED, closed, "norm"), (CLOSED, closed, "update")]
STAGES += [(PRODUCTS, products, stage) for stage in ("norm", "push", "update")]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("names", "step", "stage"), STAGES, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_memory_is_refused_by_name(wrong, dtype, names, step, stage):
    step(given(dtype, names), stage)
    change, found = WRONG[wrong]
    for name, i in ((name, i) for name in names for i in range(1, 4)):
        lists = given(dtype, names)
        if i >= len(lists[name]):
            continue
        lists[name][i] = change(lists[name][i])
        blamed, said = rf"{name}\[{i}\]", found
        if name == "deltas":
            blamed = rf"deltas\[1\]\[{i}\]"
        if (name, wrong) == ("weights", "size"):  # the others have the size of the weights
            blamed, said = rf"{names[1]}\[1\]", r"shape \(5, 2\)"
        with pytest.raises(ValueError, match=rf"^{blamed}.* must be .*, got .*{said}"):
            step(lists, stage)


def test_lists_have_one_tensor_of_each_weight():
    lists = given(torch.float32, CLOSED)
    plan = untouched(ClosedPlan)(None, Tensors(lists["weights"]))
    for wrong in (lists["grads"][:1], lists["grads"] * 2):
        with pytest.raises(ValueError, match=r"argument 2 is (shorter|longer)"):
            plan.norm(wrong)
