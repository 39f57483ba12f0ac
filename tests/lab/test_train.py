import copy
import math

import pytest
import torch
from torch.nn import functional

from corpora import in_memory
from run_folders import CURVES
from symexplin.lab.config import ComputeConfig, RunConfig, TrainConfig
from symexplin.lab.data.batches import BatchLoader, eval_batches
from symexplin.lab.evaluate import evaluate
from symexplin.lab.model import ModelConfig
from symexplin.lab.train import NonFiniteError, Trainer, lr_factor

TINY = ModelConfig(width=16, depth=1, heads=2, context=8)
CORPUS = in_memory([f"document {i} says {i * i}".encode() for i in range(60)])
TRAIN = TrainConfig(steps=6, batch_size=4, warmup_steps=2, lr=1e-2, eval_every=4, eval_batches=2)


def make(curve="none", train=TRAIN, compute=None, dtype=None):
    trainer = Trainer(RunConfig("", TINY, train, CURVES[curve], compute or ComputeConfig()), CORPUS)
    if dtype is not None:
        trainer.model.to(dtype)
    return trainer


def run(trainer, steps=6):
    return [trainer.update() for _ in range(steps)]


def test_the_schedule_ends_at_its_floor():
    """Warm-up and decay to zero are those of the loop written out, below."""
    config = TrainConfig(steps=4, warmup_steps=0, floor=0.2)
    assert [lr_factor(step, config) for step in range(5)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    short = TrainConfig(steps=2, lr_decay_steps=4, warmup_steps=3, floor=0.2)
    assert [lr_factor(step, short) for step in range(5)] == pytest.approx([1 / 3, 2 / 3, 1, 1, 0.2])


def test_an_adamw_run_is_the_loop_written_out():
    """Ten lines of plain PyTorch, with the formulas of the schedule, the clipping and the mean, give the same."""
    train = TrainConfig(steps=6, batch_size=4, warmup_steps=2, lr=1e-2, max_grad_norm=0.5, eval_batches=2)
    trainer = make(train=train, dtype=torch.float64)
    expected = copy.deepcopy(trainer.model)
    records = run(trainer)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01)
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
    for parameter, reference in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, reference, rtol=1e-9, atol=1e-12)
    assert [r["loss"] for r in records] == pytest.approx(losses)
    assert [r["grad_norm"] for r in records] == pytest.approx(norms)
    assert max(norms) > 0.5  # the clipping did something
    assert [r["lr"] for r in records] == pytest.approx([1e-2 * rate for rate in rates])
    held_out = eval_batches(CORPUS.valid, TINY.context, 4, 2)
    assert trainer.evaluate() == pytest.approx(evaluate(expected, held_out), rel=1e-9)


def test_accumulated_parts_are_the_whole_batch():
    whole = make(dtype=torch.float64)
    parts = make(train=TrainConfig(**{**vars(TRAIN), "accumulation": 2}), dtype=torch.float64)
    run(whole), run(parts)
    for first, second in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-8, atol=1e-11)
    assert whole.evaluate() == pytest.approx(parts.evaluate(), rel=1e-9)


def test_saving_memory_changes_nothing_but_rounding():
    plain, saving = make("module"), make("module", compute=ComputeConfig(recompute=True, loss_chunk=7))
    first, second = run(plain), run(saving)
    assert (saving.model.recompute, saving.model.loss_chunk) == (True, 7)
    assert [r["loss"] for r in second] == pytest.approx([r["loss"] for r in first], rel=1e-5)
    assert saving.evaluate() == pytest.approx(plain.evaluate(), rel=1e-5)


def test_a_compiled_model_is_one_graph_with_its_loss_and_trains_the_same_in_the_mode_asked_for(monkeypatch):
    """Traced alone: tests/test_modules.py compiles a curved layer, and code for ordinary ones takes long."""
    asked, compile_ = [], torch.compile

    def traced(model, mode):
        asked.append(mode)
        return compile_(model, backend="eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", traced)
    plain = make()
    compiled = make(compute=ComputeConfig(compile=True, compile_mode="reduce-overhead", loss_chunk=5))
    first, second = run(plain, 2), run(compiled, 2)
    assert [r["loss"] for r in second] == pytest.approx([r["loss"] for r in first], rel=1e-4)
    assert compiled.evaluate() == pytest.approx(plain.evaluate(), rel=1e-4)
    assert asked == ["reduce-overhead"]


def test_bfloat16_computes_in_bfloat16_and_trains():
    trainer = make("optimizer", compute=ComputeConfig(autocast="on"))
    seen = []
    trainer.model.blocks[0].ffn.up.register_forward_hook(lambda *_: seen.append(_[-1].dtype))
    before = trainer.evaluate()
    run(trainer)
    assert trainer.evaluate() < before
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("curve", ["optimizer", "module"])
def test_gradients_are_clipped_once_and_the_norm_before_is_logged(curve):
    trainer = make(curve, train=TrainConfig(**{**vars(TRAIN), "max_grad_norm": 1e-3}))
    norms = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]).item())
    )
    records = run(trainer)
    assert min(record["grad_norm"] for record in records) > 0.01
    if curve == "optimizer":  # which clips by itself, in raw space
        assert min(norms) > 0.01
        assert records[-1]["grad_norm"] == trainer.optimizer.grad_norm.item() != norms[-1]
    else:
        assert norms == pytest.approx([1e-3] * 6, rel=1e-2)


def test_a_nan_is_noticed_in_an_evaluation_too():
    """In a step: tests/lab/test_run.py."""
    trainer = make()
    trainer.model.blocks[0].ffn.up.weight.data[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"step 0: loss is nan.* weight: blocks.0.ffn.up.weight"):
        trainer.evaluate()


@pytest.mark.parametrize("home", ["optimizer", "none"])
def test_an_infinite_gradient_ends_the_run_and_its_layer_is_named(home):
    trainer = make(home)
    trainer.model.blocks[0].attention.k.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(NonFiniteError, match=r"step 1: gradient norm is .*last layer .*: blocks.0.attention.k.weight"):
        trainer.update()
    assert trainer.step == 0


def test_the_loop_waits_for_the_device_once_a_step(monkeypatch):
    trainer, waits = make("optimizer"), []
    for name in ("tolist", "item", "__float__"):
        inner = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, inner=inner: waits.append(self) or inner(self))
    monkeypatch.setattr(trainer.optimizer, "step", lambda: setattr(trainer.optimizer, "grad_norm", torch.ones(())))
    trainer.update()
    assert [len(values) for values in waits if values.dtype == torch.float32] == [2]  # others are numbers of the host


def test_a_norm_that_is_infinite_in_raw_space_alone_ends_the_run():
    """Finite gradients of the effective weights may be infinite after the pullback."""
    trainer = make("optimizer")
    trainer.optimizer.register_step_post_hook(
        lambda optimizer, *_: setattr(optimizer, "grad_norm", torch.tensor(torch.inf))
    )
    with pytest.raises(NonFiniteError, match="step 1: gradient norm is inf; all weights and gradients are finite"):
        trainer.update()
