"""Every learning-rate scheduler of torch and of transformers drives SELAdamW as it drives AdamW."""

import inspect

import pytest
import torch
from torch.optim import lr_scheduler

import symexplin as sel
from symexplin.presets import IDENTITY
from training import backward, network

STEPS = 12
ONCE = {"max_lr": [0.02, 0.01], "total_steps": STEPS, "cycle_momentum": True}
CYCLE = {"base_lr": 1e-3, "max_lr": 1e-2, "step_size_up": 3, "cycle_momentum": True, "mode": "triangular2"}
TORCH = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda t: 0.9**t, lambda t: 0.8**t]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.95 if t % 2 else 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 7]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.25, 5),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 8)], [4]
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, **CYCLE),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, **ONCE),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=1e-3, anneal_epochs=5),
}
SPECIFIC = {
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "warmup_stable_decay": {"num_decay_steps": 4},
    "polynomial": {"power": 2.0},
    "greedy": {"patience": 1, "min_lr": 1e-4},
    "reduce_lr_on_plateau": {"patience": 1},
}
TRANSFORMERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "greedy",
)


def of_transformers(name):
    def make(optimizer):
        get_scheduler = pytest.importorskip("transformers").optimization.get_scheduler
        return get_scheduler(name, optimizer, 3, STEPS, SPECIFIC.get(name))

    return make


MAKERS = TORCH | {f"transformers.{name}": of_transformers(name) for name in TRANSFORMERS}


def advance(scheduler, loss):
    if "metrics" in inspect.signature(scheduler.step).parameters:
        scheduler.step(loss)
    else:
        scheduler.step()


def ours(model):
    groups = sel.param_groups(model, config=IDENTITY)
    return sel.SELAdamW(groups, lr=1e-2, weight_decay=0.05)  # transformers reads the rate from `defaults`


def theirs(model):
    groups = [{"params": [*model[0].parameters(), *model[3].parameters()]}, {"params": model[1].parameters()}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.05)


def run(model, optimizer, scheduler, steps, start=0):
    """Train; return the rates and betas that each step used."""
    used = []
    for step in range(start, start + steps):
        used.append([(float(group["lr"]), tuple(group["betas"])) for group in optimizer.param_groups])
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        advance(scheduler, 1.0 + 0.01 * step)  # a loss that rises, so that plateaus are met
    return used


def test_the_tables_name_every_scheduler():
    found = {
        name
        for name, member in vars(lr_scheduler).items()
        if inspect.isclass(member) and issubclass(member, lr_scheduler.LRScheduler) and not name.startswith("_")
    } - {"LRScheduler"}
    assert found <= set(TORCH)
    trainer_utils = pytest.importorskip("transformers.trainer_utils")
    assert {str(kind.value) for kind in trainer_utils.SchedulerType} == set(TRANSFORMERS)


@pytest.mark.parametrize("name", MAKERS)
def test_a_scheduler_drives_it_as_it_drives_adamw(name):
    """Under the identity map: the same rates, betas and float64 weights; and a scheduler resumed half-way goes on."""
    model, reference = network(torch.float64), network(torch.float64)
    optimizer, adamw = ours(model), theirs(reference)
    scheduler, other = MAKERS[name](optimizer), MAKERS[name](adamw)
    used = run(model, optimizer, scheduler, STEPS // 2)
    saved = [part.state_dict() for part in (model, optimizer, scheduler)]
    model = network(torch.float64, seed=1)
    optimizer = ours(model)
    scheduler = MAKERS[name](optimizer)
    for part, state in zip((model, optimizer, scheduler), saved, strict=True):
        part.load_state_dict(state)
    used += run(model, optimizer, scheduler, STEPS - STEPS // 2, start=STEPS // 2)
    assert used == run(reference, adamw, other, STEPS)
    assert len({str(rates) for rates in used}) > 1 or name == "transformers.constant"
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)


def test_scales_follow_the_scheduler_times_their_multipliers():
    """The rate of a scale is lr(t) k(t), whatever sets lr(t): read from the size of its own first AdamW steps."""
    layer = torch.nn.Linear(2, 2, bias=False, dtype=torch.float64)
    config = sel.preset("frozen", start="matched", e=sel.Scale("global", k=(8.0, 2.0), base_lr=None))
    optimizer = sel.SELAdamW(
        sel.param_groups(layer, config=config), weight_decay=0.0, betas=(0.0, 0.0), eps=0.0, total_steps=STEPS
    )
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=STEPS, cycle_momentum=False)
    value = 1.0
    for step in range(STEPS):
        rate = optimizer.param_groups[0]["lr"]
        optimizer.zero_grad()
        layer.weight.backward(-layer.weight.detach().sign())  # de is negative always
        optimizer.step()
        scheduler.step() if step < STEPS - 1 else None
        moved = float(optimizer.state[layer.weight]["scalar"]) - value
        assert moved == pytest.approx(rate * sel.functional.anneal(step, STEPS, 8.0, 2.0), rel=1e-9)
        value += moved
