"""The keystone: the optimizer and the module form train the same transformer on text, to rounding.

Learned scales, biases, QK-norm, clipping, decay, warm-up and annealing are all on. The learning rate is the paper's
3e-4: at ten times that the run itself amplifies one ulp to 1e-3, and nothing could be seen. The module form stores raw
weights and computes the formulas in PyTorch; the optimizer uses the closed form, and kernels where they cover the map.
"""

import copy
import functools
import os
from pathlib import Path

import pytest
import torch

import symexplin as sel
from networks import ELEMENTWISE, EXP
from symexplin.config import PATTERNS
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.presets import PRESETS

STEPS, BATCH, CONTEXT, LR, CLIP = 40, 4, 32, 3e-4, 0.25
# Every pattern in some role; "row_col_mult" is the presets' own.
PATTERNED = [("global", "row", "column"), ("lora", "row_col_add", "global"), ("column", "fixed", "row_col_add")]
PATTERNED += [("elementwise", "elementwise", "elementwise")]
assert {pattern for patterns in PATTERNED for pattern in patterns} | {"row_col_mult"} == set(PATTERNS)
CONFIGS = {name: sel.preset(name) for name in PRESETS} | {
    f"paper, {patterns}": sel.preset(
        "paper", **{role: {"pattern": p, "rank": 2} for role, p in zip("elm", patterns, strict=True)}
    )
    for patterns in PATTERNED
}
CONFIGS |= {"paper, exp": EXP, "paper+offset, elementwise": ELEMENTWISE}
CONFIGS |= {
    mode: sel.preset("paper", mode=mode, n=sel.Scale("row", start=0.1)) for mode in ("oppose", "damped", "sinh")
}


@functools.cache
def text():
    """Real text that every machine has: a module of the standard library."""
    return torch.tensor(list(Path(os.__file__).read_bytes()))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text()) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
    windows = torch.stack([text()[i : i + CONTEXT + 1] for i in starts])
    return windows[:, :-1], windows[:, 1:]


def outliers(model):
    """Give every matrix and bias entries at zero and far out: 30 Xavier bounds, as pretrained models have."""
    for parameter in (p for name, p in model.named_parameters() if "norm" not in name):
        far = 30.0 * (6 / sum(parameter.shape)) ** 0.5
        parameter.data.view(-1)[:4] = torch.tensor([far, -far, 0.0, -0.0])


def train(home, config, dtype, device="cpu", far=False):
    """Train in one home; return the plain weights at the start and at the end, and the losses."""
    shape = ModelConfig(width=32, depth=1, heads=2, context=CONTEXT)
    model = Transformer(shape, torch.Generator().manual_seed(0)).to(device=device, dtype=dtype)
    if far:
        outliers(model)
    start = copy.deepcopy(model.state_dict())
    if home == "module":
        sel.convert(model, config)
        optimizer = torch.optim.AdamW(sel.param_groups(model, lr=LR, weight_decay=0.1))
        sel.anneal_scales(optimizer, STEPS)
    else:
        kwargs = {"lr": LR, "weight_decay": 0.1, "total_steps": STEPS, "max_grad_norm": CLIP}
        optimizer = sel.SELAdamW(model, config=config, **kwargs)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / 20, 1.0) * (1 - t / (2 * STEPS)))
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = (part.to(device) for part in batch(step))
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        if home == "module":
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert home == "optimizer" or max(norms) > CLIP
    return start, sel.fold(model).state_dict(), losses


def compare(config, dtype, room, device="cpu", far=False):
    """Compare both homes: per tensor ||a - b|| / ||b|| must be within `room`; return the weights before and after."""
    (start, weights, losses), (_, found, ours) = (
        train(home, config, dtype, device, far) for home in ("module", "optimizer")
    )
    for name, w in weights.items():
        assert float((found[name] - w).double().norm() / w.double().norm()) < room, name
    assert ours == pytest.approx(losses, abs=room)
    assert losses[-1] < losses[0] - 0.1
    return start, weights


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_homes_agree_in_float64(name):
    compare(CONFIGS[name], torch.float64, 1e-9)


def test_the_closed_form_is_the_raw_weight_path():
    """The default map, whose raw weights the module form stores and the optimizer never has."""
    start, weights = compare(sel.SELConfig(beta=7.5), torch.float64, 1e-12, far=True)
    assert sum(int((start[name] * weight < 0).sum()) for name, weight in weights.items()) > 50
    assert max(float(weight.abs().max()) for weight in weights.values()) > 5.0


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)  # kernels cover them; the others differ by what float64 shows
def test_homes_agree_in_float32(name):
    compare(CONFIGS[name], torch.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["default", "paper", "paper+offset", "absorbed", "frozen"])
def test_homes_agree_on_a_gpu(name):
    compare(CONFIGS[name], torch.float32, 1e-4, "cuda")
