import pytest
import torch

from symexplin.lab.config import ComputeConfig, LogConfig, RunConfig, TrainConfig, resolve
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig
from symexplin.lab.settings import from_table, to_table


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ModelConfig(width=20, heads=4), "width must be heads of an even size, got 20 with 4 of size 5"),
        (lambda: ModelConfig(width=22, heads=4), "width must be heads of an even size, got 22 with 4 of size 5"),
        (lambda: ModelConfig(heads=4, head_dim=64), "width must be heads of an even size, got 128 with 4 of size 64"),
        (lambda: ModelConfig(width=64, harness="author"), "width must be heads .* got 64 with 1 of size 128"),
        (lambda: ModelConfig(heads=0), "heads must be a whole number"),
        (lambda: ModelConfig(harness="his"), "harness must be one of 'own', 'author', got 'his'"),
        (lambda: ModelConfig(embedding_std="width"), r"embedding_std must be .*'width\^-0.5', got 'width'"),
        (lambda: TrainConfig(decay="none"), "decay must be one of 'all', 'linears', 'matrices', got 'none'"),
        (lambda: CurveConfig(preset="paper", start_exclude=("*",)), "start_exclude must be left out unless start is"),
        (lambda: LogConfig(keep=0), "keep must be"),
        (lambda: TrainConfig(accumulation=3), "accumulation must divide batch_size = 16, got 3"),
        (lambda: TrainConfig(steps=5, warmup_steps=6), "warmup_steps must be at most steps = 5, got 6"),
        (lambda: TrainConfig(5, lr_decay_steps=4), "lr_decay_steps must be at least steps = 5, got 4"),
        (
            lambda: TrainConfig(5, warmup_steps=9, lr_decay_steps=8),
            "warmup_steps must be at most lr_decay_steps = 8, got 9",
        ),
        (lambda: ModelConfig(norm="batch"), "norm must be one of 'rms', 'layer', got 'batch'"),
        (lambda: ModelConfig(embedding_std=0.0), "embedding_std must be a positive finite number"),
        (lambda: resolve(RunConfig("d", compute=ComputeConfig(device="abacus")), 256), "device must be"),
    ],
)
def test_what_does_not_go_together_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


AUTHOR = {
    **{"input_projection": True, "qkv_bias": False, "head_bias": True, "embedding_std": "width^-0.5"},
    **{"hidden_rounding": "up", "norm_eps": "dtype", "heads": 4, "head_dim": 128},
}


def test_a_harness_says_what_the_keys_leave_open():
    """SAMVariants of 2026-06-05: transformer.py (at width 1024: 8 heads), and train_gpt.py for what decays."""
    model = ModelConfig(width=512, harness="author")
    assert {key: getattr(model, key) for key in AUTHOR} == AUTHOR
    assert (ModelConfig(width=1024, harness="author").heads, model.embedding_deviation) == (8, 512**-0.5)
    own = dict(zip(AUTHOR, (False, True, False, 0.02, "nearest", 1e-6, 4, 128), strict=True))
    assert {key: getattr(ModelConfig(width=512), key) for key in own} == own
    given = own | {"heads": 8, "head_dim": 64}
    found = ModelConfig(width=512, harness="author", **given)
    assert {key: getattr(found, key) for key in given} == given
    assert ModelConfig(width=512, head_dim=64).heads == 8
    decays = [RunConfig("d", ModelConfig(harness=name)).decays for name in ("own", "author")]
    assert decays == ["all", "matrices"]
    run = RunConfig("d", ModelConfig(harness="author"), TrainConfig(decay="linears"))
    assert (run.decays, resolve(run, 256).train.decay) == ("linears", "linears")
    assert resolve(RunConfig("d", ModelConfig(harness="author")), 256).train.decay == "matrices"
    # 8/3 of 512 is 1365.3, of 1024 2730.7 and of 384 exactly 1024.
    assert [ModelConfig(width=w, hidden_rounding=r).hidden for w in (512, 1024, 384) for r in ("nearest", "up")] == [
        *(1344, 1408, 2752, 2752, 1024, 1024)
    ]


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


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (20, 2), (300, 30), (250_000, 250)])
def test_the_warm_up_is_the_papers_or_a_tenth(steps, warmup):
    assert TrainConfig(steps=steps).warmup_steps == warmup
