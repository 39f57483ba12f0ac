"""A small network trained by SELAdamW whole, under DDP and under FSDP2, to be run by `processes.run`."""

import copy
import io
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import symexplin as sel
from symexplin.optim import small
from symexplin.optim.placement import local

__all__ = ["resumed", "saved", "several", "trajectory"]

ROWS = 24  # as many for each of 2, 3 or 4 processes


def model_of(dtype=torch.float32, seed=0):
    """17 rows over 4 processes are 5, 5, 5, 2; 3 rows are 1, 1, 1, 0."""
    torch.manual_seed(seed)
    layers = [nn.Linear(12, 17), nn.LayerNorm(17), nn.GELU(), nn.Linear(17, 16), nn.GELU(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).to(dtype)


class Pixels(nn.Sequential):
    """A convolution over 12 inputs, and one transposed."""

    def __init__(self):
        super().__init__(nn.Conv1d(3, 5, 3), nn.GELU(), nn.ConvTranspose1d(5, 2, 2), nn.Flatten())

    def forward(self, x):
        return super().forward(x.unflatten(1, (3, 4)))


class StackedExperts(nn.Module):
    """Three layers in one tensor, whose outputs are added; each process may have some of them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(3, 8, 6))
        self.bias = nn.Parameter(torch.zeros(3, 8))

    def forward(self, x):
        split = isinstance(self.weight, DTensor)
        x = DTensor.from_local(x, self.weight.device_mesh, [Replicate()]) if split else x
        outputs = torch.nn.functional.gelu(torch.bmm(self.weight, x.mT.expand(3, -1, -1)) + self.bias[:, :, None])
        total = outputs.sum(0).mT
        return total.redistribute(placements=[Replicate()]).to_local() if split else total


def layers_of(dtype=torch.float32):
    """A model with a convolution and a stack of matrices: 3 of them over 2 x 2 processes are 1, 1 and 1, 0."""
    torch.manual_seed(0)
    return nn.Sequential(Pixels(), StackedExperts(), nn.Linear(8, 3)).to(dtype)


def shard(model, how):
    """Split a model in place, or wrap it."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    options = {"mesh": init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))}
    if how == "tensor":
        both = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
        options["mesh"] = both["data"]
        # 17 rows over two processes are 9, 8, and then 5, 4 and 4, 4; 3 rows are 2, 1, and then 1, 1 and 1, 0.
        rows, columns = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
        parallelize_module(
            model, both["tensor"], {"0": rows, "3": columns, "5": rows} if len(model) > 3 else {"2": rows}
        )
        for name, parameter in list(model[1].named_parameters()) if len(model) == 3 else ():
            split = distribute_tensor(parameter.detach(), both["tensor"], [Shard(0)])
            model[1].register_parameter(name, nn.Parameter(split))
    if how == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    if how == "columns":
        options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % world == 0 else None
    if how == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def optimizer_of(model, config, lr=1e-2, kind=sel.SELAdamW, **kwargs):
    kwargs = {"total_steps": 50, "max_grad_norm": 0.5} | kwargs
    return kind(sel.param_groups(model, lr=lr, weight_decay=0.1, config=config), **kwargs)


def make(how, config, dtype=torch.float32, model_of=model_of, **kwargs):
    """Return model and optimizer, split over the processes as `how` says."""
    model = model_of(dtype)
    small._LEAST = 64  # of the matrices here three are larger
    if how != "whole":
        model = shard(model, how)
    return model, optimizer_of(model, config, **kwargs)


def loss_of(model, step, how, dtype=torch.float32):
    """Return this process's share of the loss on the step's batch, as data parallelism averages it."""
    rows = torch.randn(ROWS, 12, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    targets = torch.stack([rows.sum(1), rows[:, 0] * rows[:, 1], rows.abs().amax(1)], dim=1)
    if how != "whole":
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        if how == "tensor":  # the processes that share the rows of a weight see the same data
            world, rank = 2, rank // (world // 2)
        rows, targets = rows.chunk(world)[rank], targets.chunk(world)[rank]
    return (model(rows.to(dtype)).to(targets.dtype) - targets).square().mean()


def steps(model, optimizer, how, dtype, start, stop):
    """Train from step `start` on; return the losses of the whole batch."""
    losses = []
    for step in range(start, stop):
        optimizer.zero_grad()
        loss = loss_of(model, step, how, dtype)
        loss.backward()
        optimizer.step()
        value = loss.detach().clone()
        if how != "whole":
            torch.distributed.all_reduce(value)
            value /= torch.distributed.get_world_size()
        losses.append(float(value))
    return losses


def full(tensor):
    """Return all of a tensor, however it is split."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def weights(model):
    return {name.removeprefix("module."): full(p.detach()) for name, p in model.named_parameters()}


def states(model, optimizer):
    """Return every tensor of the optimizer's state, whole, by parameter and name."""
    names = {p: name.removeprefix("module.") for name, p in model.named_parameters()}
    return {
        f"{names[p]} {key}": full(value)
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def trajectory(how, config, dtype=torch.float32, one_ulp=False, **kwargs):
    """Train 20 steps; return weights, state, losses, the last norm of the gradient and the figures of `stats`."""
    model, optimizer = make(how, config, dtype, **kwargs)
    if one_ulp:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.where(p == 0, p, torch.nextafter(p, p + 1)))
    losses = steps(model, optimizer, how, dtype, 0, 20)
    figures = {"norm": float(optimizer.grad_norm), **sel.stats(model, optimizer)}
    return weights(model), states(model, optimizer), losses, figures


def several(calls):
    """Call functions of this module in turn, by name: joining processes takes longer than a case."""
    return [globals()[name](*args, **kwargs) for name, args, kwargs in calls]


def saved(how, config, folder, dtype=torch.float32, full_state=False, flat=False, **kwargs):
    """Train 4 steps, save with torch.distributed.checkpoint, train 4 more; return what was saved and the end.

    `full_state`: gather it all in the first process and save it with torch.save.
    """
    model, optimizer = make(how, config, dtype, **kwargs)
    steps(model, optimizer, how, dtype, 0, 4)
    at = weights(model), states(model, optimizer)
    options = StateDictOptions(full_state_dict=full_state, flatten_optimizer_state_dict=flat)
    values, state = get_state_dict(model, optimizer, options=options)
    if not full_state:
        dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder)
    elif how == "whole" or torch.distributed.get_rank() == 0:
        torch.save({"model": values, "optimizer": state}, folder)
    losses = steps(model, optimizer, how, dtype, 4, 8)
    return at, (weights(model), states(model, optimizer), losses)


def resumed(how, config, folder, dtype=torch.float32, full_state=False, flat=False, **kwargs):
    """Load what :func:`saved` wrote, into other weights; return it as loaded and the end."""
    model, optimizer = make(how, config, dtype, **kwargs)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    options = StateDictOptions(full_state_dict=full_state, flatten_optimizer_state_dict=flat)
    if full_state:
        content = torch.load(folder, weights_only=True)
    else:
        values, state = get_state_dict(model, optimizer, options=options)
        content = {"model": values, "optimizer": state}
        dcp.load(content, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"], options=options
    )
    at = weights(model), states(model, optimizer)
    losses = steps(model, optimizer, how, dtype, 4, 8)
    return at, (weights(model), states(model, optimizer), losses)


def started(how, config):
    """Return the weights that an optimizer has started."""
    return weights(make(how, config)[0])


def restarted(how, config):
    """Resume weights that look fresh, and such that do not; whether the run ends in the same bits."""
    same = []
    for scale in (1.0, 3.0):
        model, optimizer = make(how, config)
        steps(model, optimizer, how, torch.float32, 0, 4)
        values, state = copy.deepcopy(get_state_dict(model, optimizer))
        steps(model, optimizer, how, torch.float32, 4, 8)
        again = shard(model_of(), how)
        set_model_state_dict(again, values)
        with torch.no_grad():
            again[3].weight.mul_(scale)
        other = optimizer_of(again, config)
        set_state_dict(again, other, model_state_dict=values, optim_state_dict=state)
        steps(again, other, how, torch.float32, 4, 8)
        ends = weights(model), weights(again)
        same.append(all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]))
    return same


def refusal(how, config):
    """Return the message that refuses to start weights that were not just drawn, in one process's part."""
    model = shard(model_of(), how)
    if torch.distributed.get_rank() == 1:
        model[3].weight.to_local().data.mul_(9)
    optimizer = optimizer_of(model, config)
    try:
        steps(model, optimizer, how, torch.float32, 0, 1)
    except ValueError as error:
        return str(error)
    return "not refused"


def collectives(how, config):
    """Return how often a step calls all_reduce, and what the state of the second matrix is made of."""
    model, optimizer = make(how, config)
    steps(model, optimizer, how, torch.float32, 0, 1)
    count = 0

    def counting(*args, **kwargs):
        nonlocal count
        count += 1
        return all_reduce(*args, **kwargs)

    optimizer.zero_grad()
    loss_of(model, 1, how).backward()
    all_reduce, torch.distributed.all_reduce = torch.distributed.all_reduce, counting
    optimizer.step()
    torch.distributed.all_reduce = all_reduce
    state = optimizer.state[model[5].weight]
    kinds = {
        key: (tuple(value.shape), tuple(value.to_local().shape) if isinstance(value, DTensor) else None)
        for key, value in state.items()
    }
    return count, kinds


def written(how, config, far=False, value=None):
    """Write into one process's part of a weight through `.data`; return it as found and after two steps more.

    What all processes must settle together is taken over by all of them, before the next step.
    """
    model, optimizer = make(how, config, lr=1e-3)
    steps(model, optimizer, how, torch.float32, 0, 2)
    weight = model[3].weight
    if far:  # as training can: the exponential pathway weaker than the linear one, so that nothing has an inverse
        state = {panel: optimizer.state[weight][panel] for panel in ("panel0", "panel1")}
        for panel, start in (("panel0", torch.tensor([0.05, 1.0, 1.0])[None, :]), ("panel1", torch.ones(3, 1))):
            (state[panel].to_local() if isinstance(state[panel], DTensor) else state[panel]).copy_(start)
    if torch.distributed.get_rank() == 1:
        weight.to_local().data[0, :2] = torch.tensor([0.25, -0.125]) if value is None else value
    found = full(weight.detach())
    trail = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in (2, 3):
            for group in optimizer.param_groups:
                group["lr"] = 0.0 if far else 1e-3
            try:
                if step == 2 and (far or value is not None):
                    optimizer.take_over_writes()
                steps(model, optimizer, how, torch.float32, step, step + 1)
            except ValueError as error:
                return str(error)
            trail.append(full(weight.detach()))
    (coordinates,) = (e.coordinates() for e in optimizer.entries() if e.parameter is weight)
    agrees = bool(torch.allclose(coordinates.effective(), weight.to_local(), rtol=1e-5, atol=1e-7))
    panels = {key: full(optimizer.state[weight][key]) for key in ("panel0", "panel1")}
    return found, trail, agrees, panels, [str(w.message) for w in told if "anew" in str(w.message)]


def clamped(how, config, dtype=torch.float64):
    """Train 8 steps with weights that are clamped after each: writes from outside, everywhere; return weights."""
    model, optimizer = make(how, config, dtype, lr=1e-3)
    for step in range(8):
        steps(model, optimizer, how, dtype, step, step + 1)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)
    return weights(model)


def spoilt(how, config):
    """Train from a weight that is no number in one process's part; return the error."""
    model, optimizer = make(how, config)
    if torch.distributed.get_rank() == 1:
        model[3].weight.to_local().data[0, 0] = torch.nan
    try:
        steps(model, optimizer, how, torch.float32, 0, 1)
    except ValueError as error:
        return str(error)
    return "not refused"


def snapshots(how, config):
    """Save the state with torch.save and load it in the same processes; whether bits and storage are the parts'."""
    model, optimizer = make(how, config)
    steps(model, optimizer, how, torch.float32, 0, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    _, other = make(how, config)
    other.load_state_dict(torch.load(file, weights_only=True))
    whole = {  # gathered by hand, as a checkpoint of one process has it
        "state": {
            i: {key: full(value) for key, value in values.items()}
            for i, values in optimizer.state_dict()["state"].items()
        },
        "param_groups": optimizer.state_dict()["param_groups"],
    }
    _, third = make(how, config)
    third.load_state_dict(whole)
    parts = [
        (local(a[key]), local(b[key]))
        for again in (other, third)
        for a, b in zip(optimizer.state.values(), again.state.values(), strict=True)
        for key in a
    ]
    same = all(torch.equal(a, b) for a, b in parts)
    small = all(b.untyped_storage().nbytes() == b.numel() * b.element_size() for _, b in parts)
    return same, small


def peeked(how, config):
    """Train from the start, and so after a look at the state through torch.distributed.checkpoint; return losses."""
    losses = []
    for look in (False, True):
        model, optimizer = make(how, config)
        if look:
            get_state_dict(model, optimizer)
        losses.append(steps(model, optimizer, how, torch.float32, 0, 5))
    return losses


def refused(case):
    """Return the message with which a placement is refused."""
    world = torch.distributed.get_world_size()
    model, config = model_of(), sel.preset("paper")
    try:
        if case == "zero":
            groups = sel.param_groups(model, lr=1e-3, config=config)
            for group in groups:  # it knows no named parameters
                group["params"] = [parameter for _, parameter in group["params"]]
            ZeroRedundancyOptimizer(groups, sel.SELAdamW, total_steps=10)
            return "not refused"
        if case == "strides":
            mesh = init_device_mesh("cpu", (world,))
            part = distribute_tensor(model[3].weight.detach(), mesh, [Shard(0)]).to_local()
            weight = DTensor.from_local(part, mesh, [_StridedShard(0, split_factor=2)], run_check=False)
            model[3].weight = nn.Parameter(weight)
            optimizer = optimizer_of(model, config)
            weight = model[3].weight
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        elif case == "flattened later":
            optimizer = optimizer_of(model, config)
            weight = model[3].weight
            weight.data = weight.data.reshape(-1)
            optimizer.step()
        elif case == "fsdp1":
            whole = FullyShardedDataParallel(model, use_orig_params=False, device_id=torch.device("cpu"))
            optimizer_of(whole, config)
    except ValueError as error:
        return str(error)
    return "not refused"
