"""Pruned and quantized copies: each rounding against its definition, and a run that measures them."""

import json

import pytest
import torch

from corpora import TEXTS, prepared
from symexplin.lab.compress import LEVELS, prune_2_of_4, quantize_
from symexplin.lab.config import ComputeConfig, LogConfig, RunConfig, TrainConfig
from symexplin.lab.data.batches import Corpus, eval_batches
from symexplin.lab.evaluate import evaluate
from symexplin.lab.folders import COMPRESSED
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.run import train
from symexplin.lab.sparse import matrices, prune_
from symexplin.lab.weights.files import load_model

MODEL = ModelConfig(width=16, depth=1, heads=2, context=8)


def weight_of():
    return torch.randn(24, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("kind", "most"), [("int8", 127), ("int4", 7)])
def test_whole_multiples_of_a_scale_per_row(kind, most):
    w, found = weight_of(), weight_of()
    quantize_([found], kind)
    scale = w.double().abs().amax(dim=1, keepdim=True) / most
    torch.testing.assert_close(found.double(), (w.double() / scale).round() * scale, rtol=1e-5, atol=1e-6)


def test_nf4_has_sixteen_quantiles_of_a_normal_distribution_per_block():
    """QLoRA's levels, from its appendix E; the scales of blocks are themselves rounded to 8 bits."""
    levels = torch.tensor(
        [
            *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
            *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
        ]
    )
    w, found = weight_of(), weight_of()
    quantize_([found], "nf4")
    blocks, scale = w.view(-1, 64), w.view(-1, 64).abs().amax(dim=1, keepdim=True)
    nearest = levels[((blocks / scale).unsqueeze(-1) - levels).abs().argmin(-1)]
    torch.testing.assert_close(found.view(-1, 64) / scale, nearest, rtol=0, atol=0.02)


def test_log4_has_a_sign_and_eight_powers_of_two():
    w, found = weight_of(), weight_of()
    quantize_([found], "log4")
    ratio = found.abs() / w.abs().amax(dim=1, keepdim=True)
    assert set((-ratio.log2()).unique().tolist()) <= set(range(8))
    assert torch.equal(found.sign(), w.sign())
    large = w.abs() > w.abs().amax(dim=1, keepdim=True) * 2**-7
    assert float((found[large] / w[large]).log2().abs().max()) <= 0.5 + 1e-5


def test_two_of_each_four_entries_of_a_row_stay_and_they_are_the_larger():
    model = Transformer(MODEL, torch.Generator().manual_seed(0))
    before = [w.clone() for w in matrices(model)]
    head = model.head.weight.detach().clone()
    prune_2_of_4(model)
    for old, new in zip(before, matrices(model), strict=True):
        groups, kept = old.view(-1, 4), new.view(-1, 4)
        order = groups.abs().argsort(dim=1)
        assert bool((kept.gather(1, order[:, :2]) == 0).all())
        assert torch.equal(kept.gather(1, order[:, 2:]), groups.gather(1, order[:, 2:]))
    assert torch.equal(model.head.weight, head)


@pytest.mark.parametrize("curve", [CurveConfig(home="none"), CurveConfig(map={"mode": "exp_only", "beta": 8.0})])
def test_a_run_measures_its_copies_and_keeps_its_weights(tmp_path, curve):
    """The losses are those of the saved weights, compressed outside of the run; a finished run says so once."""
    data = prepared(tmp_path / "data", TEXTS)
    config = RunConfig(
        data,
        MODEL,
        TrainConfig(steps=20, batch_size=4, warmup_steps=2, lr=1e-2, eval_every=10, eval_batches=2),
        curve,
        ComputeConfig(device="cpu", threads=1, autocast="off"),
        LogConfig(tensorboard=False, compress=True),
    )
    train(config, tmp_path / "run", progress=False)
    found = json.loads((tmp_path / "run" / COMPRESSED).read_text())
    assert set(found["once"]) == set(LEVELS)
    batches = eval_batches(Corpus.load(data).valid, 8, 4, 2)
    model = load_model(tmp_path / "run/model.safetensors")
    assert evaluate(model, batches) == pytest.approx(found["dense"], rel=1e-6)
    prune_(matrices(model), 0.8)
    assert evaluate(model, batches) == pytest.approx(found["once"]["0.8"], rel=1e-6)
    assert found["retrained"].keys() == {"0.7", "0.9", "2:4"}
    assert found["retrained"]["0.9"] < found["once"]["0.9"]
