"""A small network trained whole, under DDP, FSDP2 and tensor parallelism, to be run by `processes.run`."""

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import symexplin as sel
from networks import SUMS, strong
from scripts import load
from symexplin.kernels import kernels_for
from symexplin.optim.shard import local

__all__ = ["RUNS", "joined", "resumed", "saved", "several", "trajectory"]

ROWS = 24  # as many for each of 2 or 4 processes
PAPER, OFFSET = strong("paper"), strong("paper+offset")
SELMuon = load(Path(__file__).parents[1] / "examples" / "sel_muon.py").SELMuon  # a rule that needs whole tensors


def model_of(dtype=torch.float32):
    """17 rows over 4 processes are 5, 5, 5, 2; 3 rows are 1, 1, 1, 0."""
    torch.manual_seed(0)
    layers = [nn.Linear(12, 17), nn.LayerNorm(17), nn.GELU(), nn.Linear(17, 16), nn.GELU(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).to(dtype)


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
    """A model with a stack of matrices: 3 of them over 2 x 2 processes are 1, 1 and 1, 0."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 6), StackedExperts(), nn.Linear(8, 3)).to(dtype)


def mixed_of(dtype=torch.float32):
    """Plain parameters between two matrices; a process may have no part of the last one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 3)).to(dtype)


# Each run's arguments of `make`. The rate is hot enough to be clipped at first, cool enough not to amplify roundings.
RUNS = {
    "default": {"config": None, "lr": 1e-2},
    "paper": {"config": PAPER},
    "offset": {"config": OFFSET},
    "numbers": {"config": strong("paper", l=sel.Scale("global", k=(50.0, 8.0)))},
    "sums": {"config": SUMS},
    "muon": {"config": OFFSET, "kind": SELMuon, "lr": 1e-3, "split": {"3.weight": (8, 4, 4)}},
    "layers": {"config": OFFSET, "model_of": layers_of, "lr": 1e-3},
    "default layers": {"config": None, "model_of": layers_of, "lr": 1e-3},
    "muon layers": {"config": OFFSET, "kind": SELMuon, "model_of": layers_of, "lr": 1e-3},
    "muon mixed": {"config": OFFSET, "kind": SELMuon, "model_of": mixed_of, "lr": 1e-3},
}


def shard(model, how):
    """Split a model in place, or wrap it."""
    world = torch.distributed.get_world_size()
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
            split = distribute_tensor(parameter.detach(), both["tensor"], [Shard(0)])  # expert parallelism
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


def make(how, run, dtype=torch.float32):
    """Return model and optimizer, split over the processes as `how` says."""
    settings = {"kind": sel.SELAdamW, "model_of": model_of, "lr": 3e-3} | RUNS[run]
    kind, model, lr, config = (settings.pop(key) for key in ("kind", "model_of", "lr", "config"))
    model = model(dtype)
    model = model if how == "whole" else shard(model, how)
    groups = sel.param_groups(model, lr=lr, weight_decay=0.1, config=config)
    return model, kind(groups, **{"total_steps": 50, "max_grad_norm": 0.5} | settings)


def loss_of(model, step, how, dtype=torch.float32):
    """Return this process's share of the loss on the step's batch, one of three, as data parallelism averages it."""
    rows = torch.randn(ROWS, 12, generator=torch.Generator().manual_seed(step % 3), dtype=torch.float64)
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


@dataclass(frozen=True)
class Part:
    """This process's part of a tensor of some shape, and where it begins there."""

    shape: torch.Size
    offset: tuple[int, ...]
    values: torch.Tensor


def full(tensor):
    """Return all of a tensor, or this process's part, which :func:`joined` joins to the others."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Part(tensor.shape, offset, tensor.detach().to_local().clone())


def joined(answers):
    """Return the last process's answer with whole tensors in place of parts, the other processes' where it has none.

    The test's process does this once: torch's full_tensor has a collective for each of thousands of tensors.
    """
    last = answers[-1]
    if isinstance(last, dict):
        return {key: joined([answer[key] for answer in answers]) for key in last}
    if isinstance(last, list | tuple):
        return type(last)(map(joined, zip(*answers, strict=True)))
    if not isinstance(last, Part):
        return last
    whole = torch.full(last.shape, torch.nan, dtype=last.values.dtype)
    for part in answers:
        whole[tuple(slice(i, i + size) for i, size in zip(part.offset, part.values.shape, strict=True))] = part.values
    return whole


def weights(model):
    return {name.removeprefix("module."): full(p.detach()) for name, p in model.named_parameters()}


def states(model, optimizer):
    """Return every tensor of the optimizer's state, whole, by parameter and name."""
    names = {p: name.removeprefix("module.") for name, p in model.named_parameters()}
    for part in (local(value) for state in optimizer.state_dict()["state"].values() for value in state.values()):
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()  # not a view of the whole
    return {f"{names[p]} {key}": full(value) for p, state in optimizer.state.items() for key, value in state.items()}


def trajectory(how, run, dtype=torch.float32, one_ulp=False):
    """Train 7 steps; return weights, states, losses, and the last norm with the figures of `stats`."""
    model, optimizer = make(how, run, dtype)
    with torch.no_grad():
        for p in model.parameters() if one_ulp else ():
            p.copy_(torch.where(p == 0, p, torch.nextafter(p, p + 1)))
    losses = steps(model, optimizer, how, dtype, 0, 7)
    figures = {"norm": float(optimizer.grad_norm), **sel.stats(model, optimizer)}
    return weights(model), states(model, optimizer), losses, figures


def several(calls):
    """Call functions of this module in turn, by name: joining processes takes longer than a case."""
    return [globals()[name](*args, **kwargs) for name, args, kwargs in calls]


def saved(how, run, folder, dtype, full_state=False, flat=False):
    """Train 3 steps, save with torch.distributed.checkpoint, train 3 more; return what was saved and the end.

    `full_state`: gather it all in the first process and save it with torch.save.
    """
    model, optimizer = make(how, run, dtype)
    steps(model, optimizer, how, dtype, 0, 3)
    options = StateDictOptions(full_state_dict=full_state, flatten_optimizer_state_dict=flat)
    values, state = get_state_dict(model, optimizer, options=options)
    if not full_state:
        dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder)
    elif how == "whole" or torch.distributed.get_rank() == 0:
        torch.save({"model": values, "optimizer": state}, folder)
    return _end(model, optimizer, how, dtype)


def _end(model, optimizer, how, dtype):
    """Train 3 steps more; return weights and states before, and weights, states and losses after."""
    at = weights(model), states(model, optimizer)
    losses = steps(model, optimizer, how, dtype, 3, 6)
    return at, (weights(model), states(model, optimizer), losses)


def resumed(how, run, folder, dtype, full_state=False, flat=False):
    """Load what :func:`saved` wrote, into other weights; return it as loaded and the end."""
    model, optimizer = make(how, run, dtype)
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
    return _end(model, optimizer, how, dtype)


def given(run, dtype, blocks=False):
    """Take 4 steps with given gradients, the same on any number of processes; return weights and states."""
    # What is left of a row behind whole vectors is rounded otherwise by torch's fused AdamW, not by kernels.
    width = 16 if kernels_for(torch.device("cpu")) is None else 13
    torch.manual_seed(0)
    layers = [nn.Embedding(5, 2 * width), nn.Linear(2 * width, 17, bias=False), nn.Linear(4 * width, 7, bias=False)]
    model = nn.Sequential(*layers).to(dtype)
    if torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
        mesh = init_device_mesh("cpu", (2, world // 2) if blocks else (world,))
        for module in model:
            for name, p in list(module.named_parameters()):
                split = distribute_tensor(p.detach(), mesh, [Shard(0), Shard(1)][: mesh.ndim])
                module.register_parameter(name, nn.Parameter(split))
    settings = {"lr": 3e-3, "total_steps": 50, "max_grad_norm": None} | RUNS[run]
    optimizer = sel.SELAdamW(model, weight_decay=0.1, **settings)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=generator).to(dtype)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        optimizer.step()
    return weights(model), states(model, optimizer)


def collectives(how):
    """Return how often a step calls all_reduce."""
    model, optimizer = make(how, "offset")
    steps(model, optimizer, how, torch.float32, 0, 1)
    loss_of(model, 1, how).backward()
    with mock.patch.object(torch.distributed, "all_reduce", wraps=torch.distributed.all_reduce) as called:
        optimizer.step()
    return called.call_count


def written(how, run="paper", dtype=torch.float64):
    """Train 8 steps with weights that are clamped after each, in every process, and a write into one; return weights.

    That is through `.data`, into the first row of the second process.
    """
    model, optimizer = make(how, run, dtype)
    for step in range(8):
        steps(model, optimizer, how, dtype, step, step + 1)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)
        if step == 4 and (how == "whole" or torch.distributed.get_rank() == 1):
            local(model[3].weight).data[4 if how == "whole" else 0, :2] = torch.tensor([0.25, -0.125], dtype=dtype)
            optimizer.take_over_writes()
    return weights(model)


def missing(how):
    """Train 5 steps, two of them without a gradient in the second process and one in all; return weights and states."""
    model, optimizer = make(how, "paper", torch.float64)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, step, how, torch.float64).backward()
        if step in (1, 3):
            model[5].weight.grad = None
            if how == "whole":
                model[3].weight.grad[4:8] = 0.0  # the part of the second process
            elif torch.distributed.get_rank() == 1:
                model[3].weight.grad = None
        optimizer.step()
    return weights(model), states(model, optimizer)


def refused():
    """Return the message with which a dimension split in strides is refused."""
    model = model_of()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    part = distribute_tensor(model[3].weight.detach(), mesh, [Shard(0)]).to_local()
    weight = DTensor.from_local(part, mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    model[3].weight = nn.Parameter(weight)
    optimizer = sel.SELAdamW(model)
    model[3].weight.grad = torch.zeros_like(weight)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "not refused"
