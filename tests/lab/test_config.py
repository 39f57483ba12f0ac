import math

import pytest
import torch

from symexplin.lab.config import ComputeConfig, LogConfig, RunConfig, TrainConfig, resolve
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig
from symexplin.lab.settings import from_table, to_table


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("batch_size", -1),
        ("accumulation", 3),
        ("lr", 0.0),
        ("lr", math.nan),
        ("warmup_steps", -1),
        ("floor", 1.0),
        ("weight_decay", -0.1),
        ("betas", (0.9, 1.0)),
        ("max_grad_norm", 0.0),
        ("eval_every", 0),
        ("eval_batches", 0),
        ("seed", 0.5),
        ("optimizer", "sgd"),
        ("decay_plain", 1),
    ],
)
def test_bad_values_of_training_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        TrainConfig(**{field: value})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ComputeConfig(autocast="yes"), "autocast must be one of"),
        (lambda: ComputeConfig(compile_mode="fast"), "compile_mode must be one of 'default', 'reduce-overhead'"),
        (lambda: ComputeConfig(threads=0), "threads must be a whole number >= 1"),
        (lambda: ComputeConfig(loss_chunk=-1), "loss_chunk must be a whole number >= 0"),
        (lambda: LogConfig(checkpoint_every=0), "checkpoint_every must be"),
        (lambda: LogConfig(keep=0), "keep must be"),
        (
            lambda: RunConfig("d", sel=CurveConfig(preset="congruent", start="mismatched")),
            "start must be 'matched' for mode 'congruent'",
        ),
        (
            lambda: RunConfig("d", train=TrainConfig(weights="x"), sel=CurveConfig(preset="paper")),
            "start must be given with weights and preset 'paper'",
        ),
        (lambda: RunConfig("d", sel=CurveConfig(map={"betta": 1})), "did you mean 'beta'"),
        (
            lambda: RunConfig("d", train=TrainConfig(optimizer="muon"), sel=CurveConfig(home="module")),
            "optimizer must be 'adamw' for home 'module'.*got 'muon'",
        ),
        (lambda: ModelConfig(fused_gate=1), "fused_gate must be True or False, got 1"),
        (lambda: ModelConfig(init="kaiming"), "init must be one of 'xavier_uniform', 'xavier_normal', got 'kaiming'"),
        (lambda: resolve(RunConfig("d", compute=ComputeConfig(device="abacus")), 256), "device must be"),
    ],
)
def test_bad_values_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_resolving_says_everything_and_twice_the_same():
    config = RunConfig("d", ModelConfig(width=64), sel=CurveConfig(preset="paper"))
    resolved = resolve(config, 300)
    assert resolved.model.vocab_size == 300
    assert resolved.compute.threads == torch.get_num_threads()
    assert resolved.compute.device in ("cpu", "cuda")
    assert resolved.compute.autocast in ("on", "off")
    assert resolved.sel.map["e"]["k"] == (50.0, 8.0)
    assert resolve(resolved, 300) == resolved
    # As a file, and what a newer version's preset might say is overruled by the map in it.
    assert resolve(from_table(RunConfig, to_table(resolved)), 300) == resolve(resolved, 300)


def test_the_loss_is_cut_where_its_logits_would_be_large():
    """16 x 128 tokens x 50,257 x 4 bytes is 412 MB: above 256 MiB; by a vocabulary of 256 it is 2 MB."""
    config = RunConfig("d")
    assert resolve(config, 256).compute.loss_chunk == 0
    chunk = resolve(config, 50257).compute.loss_chunk
    assert 0 < chunk * 50257 * 4 <= 2**28
    halved = RunConfig("d", train=TrainConfig(batch_size=16, accumulation=2))
    assert resolve(halved, 50257).compute.loss_chunk == 0
    assert resolve(RunConfig("d", compute=ComputeConfig(loss_chunk=0)), 50257).compute.loss_chunk == 0


def test_accumulation_must_divide_the_batch():
    with pytest.raises(ValueError, match="accumulation must divide batch_size = 16, got 3"):
        TrainConfig(accumulation=3)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (20, 2), (300, 30), (2_500, 250), (250_000, 250)])
def test_the_warm_up_is_the_papers_or_a_tenth(steps, warmup):
    assert TrainConfig(steps=steps).warmup_steps == warmup


def test_a_warm_up_longer_than_the_run_is_refused():
    assert TrainConfig(steps=5, warmup_steps=5).warmup_steps == 5
    with pytest.raises(ValueError, match="warmup_steps must be at most steps = 5, got 6"):
        TrainConfig(steps=5, warmup_steps=6)


def test_weights_are_found_from_any_folder(monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    config = resolve(RunConfig("d", train=TrainConfig(weights="base")), 300)
    assert config.train.weights == str(tmp_path / "base")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolve(config, 300) == config
    assert resolve(RunConfig("d"), 300).train.weights is None
