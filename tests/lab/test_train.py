import copy
import json
import math

import pytest
import torch
from torch.nn import functional

from symexplin.lab.arms import build_arm
from symexplin.lab.data import BatchLoader, Corpus, eval_batches
from symexplin.lab.evaluate import evaluate
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.train import NonFiniteError, TrainConfig, lr_factor, train

TINY = ModelConfig(width=16, depth=1, heads=2, context=8)
CORPUS = Corpus.from_documents([f"document {i} says {i * i}".encode() for i in range(60)])
CONFIG = TrainConfig(steps=6, batch_size=4, warmup_steps=2, lr=1e-2, eval_every=4, eval_batches=2)


def build(dtype=torch.float64):
    return Transformer(TINY, torch.Generator().manual_seed(0)).to(dtype)


def adamw(model, config=CONFIG):
    return torch.optim.AdamW(model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("config", "factors"),
    [
        (TrainConfig(steps=6, warmup_steps=2), [1 / 2, 1, 1, 3 / 4, 2 / 4, 1 / 4, 0]),
        (TrainConfig(steps=4, warmup_steps=0, floor=0.2), [1, 0.8, 0.6, 0.4, 0.2]),
        (TrainConfig(steps=3, warmup_steps=3), [1 / 3, 2 / 3, 1, 1]),
        (TrainConfig(steps=2, warmup_steps=5), [1 / 5, 2 / 5, 3 / 5]),
    ],
)
def test_schedule(config, factors):
    assert [lr_factor(step, config) for step in range(config.steps + 1)] == pytest.approx(factors)


def test_adamw_run_is_the_loop_written_out(tmp_path):
    """Ten lines of plain PyTorch, with the formulas of the schedule, the clipping and the mean, give the same."""
    config = TrainConfig(steps=6, batch_size=4, warmup_steps=2, lr=1e-2, max_grad_norm=0.5, eval_batches=2)
    model, expected = build(), build()
    result = train(model, CORPUS, config, adamw(model, config), out_dir=tmp_path, clip=True)
    optimizer = adamw(expected, config)
    loader = BatchLoader(CORPUS.train, TINY.context, 4, seed=0)
    losses, norms, rates = [], [], [0.5, 1, 1, 0.75, 0.5, 0.25]
    for step, rate in enumerate(rates):
        inputs, targets = loader.batch(step)
        loss = functional.cross_entropy(expected(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in expected.parameters()))
        for parameter in expected.parameters():
            parameter.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))
        optimizer.param_groups[0]["lr"] = 1e-2 * rate
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    for parameter, reference in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, reference, rtol=1e-9, atol=1e-12)
    updates = [record for record in records(tmp_path) if "loss" in record]
    assert [r["loss"] for r in updates] == pytest.approx(losses)
    assert [r["grad_norm"] for r in updates] == pytest.approx(norms)
    assert max(norms) > 0.5  # the clipping did something
    assert [r["lr"] for r in updates] == pytest.approx([1e-2 * rate for rate in rates])
    assert [r["tokens"] for r in updates] == [32 * step for step in range(1, 7)]
    held_out = eval_batches(CORPUS.valid, TINY.context, 4, 2)
    assert result.final_loss == pytest.approx(evaluate(expected, held_out), rel=1e-9)


def test_evaluations_at_the_start_every_so_often_and_at_the_end(tmp_path):
    model = build()
    start = evaluate(model, eval_batches(CORPUS.valid, TINY.context, 4, 2))
    result = train(model, CORPUS, CONFIG, adamw(model), out_dir=tmp_path, clip=True)
    assert [step for step, _ in result.evals] == [0, 4, 6]
    assert result.evals[0][1] == start
    assert result.final_loss < start
    written = [(r["step"], r["eval_loss"]) for r in records(tmp_path) if "eval_loss" in r]
    assert written == result.evals


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulated_parts_are_the_whole_batch(tmp_path, accumulation):
    whole, parts = build(), build()
    train(whole, CORPUS, CONFIG, adamw(whole), out_dir=tmp_path / "a", clip=True)
    config = TrainConfig(**{**vars(CONFIG), "accumulation": accumulation})
    train(parts, CORPUS, config, adamw(parts), out_dir=tmp_path / "b", clip=True)
    for first, second in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-8, atol=1e-11)


def test_the_loop_leaves_clipping_to_an_optimizer_that_clips(tmp_path):
    """A gradient hook sees what reaches the optimizer: unclipped with clip=False, of norm 1e-3 with clip=True."""
    norms = {}
    for clip in (False, True):
        model = build()
        optimizer = adamw(model)
        seen = norms.setdefault(clip, [])

        def look(*_, model=model, seen=seen):
            seen.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())

        optimizer.register_step_pre_hook(look)
        config = TrainConfig(**{**vars(CONFIG), "max_grad_norm": 1e-3})
        train(model, CORPUS, config, optimizer, out_dir=tmp_path, clip=clip)
    assert norms[True] == pytest.approx([1e-3] * 6, rel=1e-2)
    assert min(norms[False]) > 0.01


def test_sel_arm_trains_and_logs_the_norm_in_raw_space(tmp_path):
    model, optimizer, clip = build_arm("SEL", TINY, CONFIG, seed=0)
    result = train(model, CORPUS, CONFIG, optimizer, out_dir=tmp_path, clip=clip)
    assert not clip
    assert result.final_loss < result.evals[0][1]
    assert records(tmp_path)[-2]["grad_norm"] == optimizer.grad_norm.item()


def test_runs_repeat_bit_for_bit(tmp_path):
    finals = []
    for name in ("a", "b"):
        model, optimizer, clip = build_arm("SEL", TINY, CONFIG, seed=0)
        train(model, CORPUS, CONFIG, optimizer, out_dir=tmp_path / name, clip=clip)
        torch.manual_seed(1234)
        finals.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(value, finals[1][name]) for name, value in finals[0].items())


def test_a_planted_nan_stops_the_run_and_names_step_and_layer(tmp_path):
    model = build()
    optimizer = adamw(model)
    steps = []

    def plant(*_):
        steps.append(1)
        if len(steps) == 3:
            model.blocks[0].ffn.up.weight.data[0, 0] = math.nan

    optimizer.register_step_post_hook(plant)
    with pytest.raises(NonFiniteError, match=r"step 4: loss is nan.* weight: blocks.0.ffn.up.weight"):
        train(model, CORPUS, CONFIG, optimizer, out_dir=tmp_path, clip=True)
    assert len(steps) == 3
    *before, last = records(tmp_path)
    assert [r["step"] for r in before] == [0, 1, 2, 3]
    assert last["step"] == 4
    assert "blocks.0.ffn.up.weight" in last["error"]


def test_an_infinite_gradient_is_noticed_before_it_is_used(tmp_path):
    model = build()
    model.blocks[0].attention.k.weight.register_hook(lambda grad: grad * math.inf)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NonFiniteError, match=r"step 1: gradient norm is .*gradient: blocks.0.attention.k.weight"):
        train(model, CORPUS, CONFIG, adamw(model), out_dir=tmp_path, clip=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_evaluation_that_is_not_finite_stops_the_run(tmp_path):
    model = build()
    model.norm.weight.data[3] = math.inf
    with pytest.raises(NonFiniteError, match=r"step 0: loss is nan.*weight: norm.weight"):
        train(model, CORPUS, CONFIG, adamw(model), out_dir=tmp_path, clip=True)


def test_too_short_a_corpus_is_refused_before_a_file_is_written(tmp_path):
    corpus = Corpus.from_documents([b"abc", b"defg"])
    model = build()
    with pytest.raises(ValueError, match="context must be below"):
        train(model, corpus, CONFIG, adamw(model), out_dir=tmp_path / "run", clip=True)
    assert not (tmp_path / "run").exists()


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
    ],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        TrainConfig(**{field: value})
