import dataclasses

import pytest

from symexplin.lab.bench import BenchConfig, Case


@pytest.mark.parametrize(("width", "heads"), [(1024, 16), (3072, 48), (512, 8), (64, 1), (32, 1), (80, 1), (320, 5)])
def test_heads_have_size_64_where_they_can(width, heads):
    config = BenchConfig(widths=(width,), device="cpu")
    assert config.run(next(config.cases())).model.heads == heads


def test_a_sweep_is_every_size_with_every_other_where_it_matters():
    config = BenchConfig(widths=(64, 128), depths=(1, 2), microbatches=(1, 4), dtypes=("bf16",))
    cases = list(config.cases())
    sizes = {part: [case[2:] for case in cases if case.part == part] for part in ("optimizer", "step")}
    assert [size[:2] for size in sizes["optimizer"]] == [(64, 1), (64, 2), (128, 1), (128, 2)]
    assert sizes["step"][:3] == [(64, 1, 1, 8192), (64, 1, 4, 8192), (64, 2, 1, 8192)]
    assert len(sizes["step"]) == 2 * 2 * 2


def test_a_case_has_the_labs_run():
    config = BenchConfig(widths=(128,), tokens=4096, vocab_size=50304, device="cpu", threads=3, recompute=True)
    run = config.run(Case("step", "fp32", 128, 6, 2, 4096))
    assert (run.model.width, run.model.depth, run.model.heads, run.model.vocab_size) == (128, 6, 2, 50304)
    assert (run.train.batch_size, run.train.accumulation) == (8, 2)
    assert (run.compute.threads, run.compute.recompute) == (3, True)
    assert 0 < run.compute.loss_chunk < 2048  # 2,048 tokens x 50,304 logits are more than 256 MiB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": ("stpe",)}, r"parts must be one of .*got 'stpe'; did you mean 'step'\?"),
        ({"widths": ()}, r"widths must hold at least one entry, and each once, got \(\)"),
        ({"depths": (2, 2)}, r"depths must hold at least one entry, and each once, got \(2, 2\)"),
        ({"microbatches": (0,)}, "microbatches must be a whole number >= 1, got 0"),
        ({"widths": (512, 33)}, r"width must be a multiple of 2 \* heads = 2, .*got 33"),
        ({"microbatches": (1, 3)}, "tokens must be a multiple of context x microbatches = 512 x 3, got 8192"),
        ({"map": {"bete": 3}}, "map: key must be one of .*did you mean 'beta'"),
        ({"warmup": -1}, "warmup must be a whole number >= 0, got -1"),
        ({"compile_mode": "fast"}, "compile_mode must be one of 'default', 'reduce-overhead'"),
        ({"step_speedup": 0.0}, "step_speedup must be"),
        ({"device": "meta"}, "device must be one of 'auto', 'cpu', 'cuda', got 'meta'"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BenchConfig(), **changes)


def test_a_device_that_is_not_there_is_named():
    config = BenchConfig(device="cuda:77")
    with pytest.raises(ValueError, match="device must be"):
        config.run(next(config.cases()))
