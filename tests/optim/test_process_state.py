"""No result depends on the state of the process: its default dtype and device, modes, precision and threads."""

import contextlib
import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import symexplin as sel
from networks import strong
from scripts import load
from states import STATES, entered, setting
from training import PAPER, same

SELLion = load(Path(__file__).parents[2] / "examples" / "sel_lion.py").SELLion
STEPS = 8


EACH = STATES | {
    "float16": functools.partial(setting, torch.get_default_dtype, torch.set_default_dtype, torch.float16),
    "autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16),
    "gradients": torch.enable_grad,
    "threads": functools.partial(setting, torch.get_num_threads, torch.set_num_threads, 3),
    "denormals": functools.partial(setting, lambda: False, torch.set_flush_denormal, True),
}
# Several at once, in which a result should not change either.
TOGETHER = (
    ("bfloat16", "meta", "medium"),
    ("float64", "inference", "deterministic", "threads"),
    ("float16", "autocast", "gradients", "denormals"),
)


together = pytest.mark.parametrize(
    "state", [functools.partial(entered, names, EACH) for names in TOGETHER], ids=map(", ".join, TOGETHER)
)

SHARED = {"lr": 1e-2, "max_grad_norm": 1.0}
OFFSET = strong("paper+offset")
NUMBERS = sel.SELConfig(mode="congruent", e=sel.Scale("global"), normalize=True)
RUNS = {
    "default": sel.SELAdamW,
    "paper": functools.partial(sel.SELAdamW, config=PAPER, total_steps=9),
    "paper+offset": functools.partial(sel.SELAdamW, config=OFFSET, total_steps=9),
    "numbers": functools.partial(sel.SELAdamW, config=NUMBERS),
    "lion": SELLion,
    "lion, paper": functools.partial(SELLion, config=PAPER, total_steps=9),
    "half": sel.SELAdamW,
    "rounded": functools.partial(sel.SELAdamW, stochastic_rounding=True),
}


def layers():
    """A matrix with more numbers than torch leaves to one thread, and a vector."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(230, 190), nn.LayerNorm(190))


def trained(run, state=contextlib.nullcontext):
    """Build and step in the state, and the last steps outside of it; return the state of model and optimizer."""
    model, generator = layers(), torch.Generator().manual_seed(1)
    model = model.bfloat16() if run in ("half", "rounded") else model
    with state():
        optimizer = RUNS[run](model, **SHARED)
        optimizer.create_state()
    for state_of in optimizer.state.values():  # bfloat16 has 300, but not 301
        for key in state_of.keys() & {"step", "scale_step"}:
            state_of[key].fill_(300.0)
    for step in range(STEPS):
        for parameter in model.parameters():
            grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.grad = grad.to(parameter.dtype)
        with state() if step < STEPS - 2 else contextlib.nullcontext():
            optimizer.step()
    return model.state_dict(), optimizer.state_dict(), optimizer.grad_norm


@pytest.fixture(scope="module")
def usual():
    """The results of the usual state, by run and path."""
    return {}


@together
@pytest.mark.parametrize("run", RUNS)
def test_training_has_the_same_bits(run, state, path, usual):
    if (run, path) not in usual:
        usual[run, path] = trained(run)
    assert same(trained(run, state), usual[run, path])
