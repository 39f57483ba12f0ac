"""The keystone: the optimizer and the module form train the same transformer on text, to rounding.

Learned scales, biases, QK-norm, clipping, decay, warm-up and annealing are all on. The learning rate is the paper's
3e-4: at ten times that the run itself amplifies one ulp to 1e-3, and nothing could be seen. The module form stores raw
weights and computes the formulas in PyTorch; the optimizer uses the closed form, and kernels where they cover the map.
"""

import functools
import os
from pathlib import Path

import pytest
import torch

import symexplin as sel
from networks import ELEMENTWISE, EXP
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.presets import PRESETS
from training import compare_homes

BATCH, CONTEXT = 4, 32
CONFIGS = {name: sel.preset(name) for name in PRESETS}
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


def compare(config, dtype, room, device="cpu", far=False):
    """Compare both homes on text; return the weights at the start and at the end."""

    def build():
        shape = ModelConfig(width=32, depth=1, heads=2, context=CONTEXT)
        model = Transformer(shape, torch.Generator().manual_seed(0)).to(device=device, dtype=dtype)
        if far:
            outliers(model)
        return model

    return compare_homes(build, lambda model, step: model(*(part.to(device) for part in batch(step))), config, room)


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
