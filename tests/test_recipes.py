"""The recipes as their pages have them: a switch of optimizers, what a plain loop computes, and timm's own rates."""

import copy
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import forked
import symexplin as sel
from fenced import blocks
from training import PAPER, assert_same_bits, backward, batch, network

PAGES = Path(__file__).parents[1] / "docs" / "how-to"
LIGHTNING, TIMM = blocks(PAGES / "lightning-and-timm.md", "python")
TO_SEL, TO_ADAMW, SCHEDULE = (
    source for source in blocks(PAGES / "loop.md", "python") if source.startswith(("optimizer =", "schedule ="))
)


def recipe(source, **names):
    """Return the names that a recipe leaves."""
    exec(compile(source, "recipe", "exec"), names)
    return names


# --- a switch of optimizers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(TO_ADAMW, TO_SEL), (TO_SEL, TO_ADAMW)], ids=["to SEL", "to AdamW"])
def test_a_switch_changes_no_weight_and_training_goes_on_at_the_schedules_rate(first, second):
    model, losses = network(), []

    def train(optimizer, schedule=None):
        rates = []
        for _ in range(20):
            (rate,) = {group["lr"] for group in optimizer.param_groups}
            rates.append(rate)
            losses.append(float(model(batch(0)).detach().square().mean()))
            optimizer.zero_grad()
            backward(model, 0)
            optimizer.step()
            if schedule:
                schedule.step()
        return rates

    train(recipe(first, sel=sel, torch=torch, model=model)["optimizer"])
    before = copy.deepcopy(model)
    switched = recipe(second + SCHEDULE, sel=sel, torch=torch, model=model)
    assert_same_bits(model, before)
    rates = train(switched["optimizer"], switched["schedule"])
    assert rates == pytest.approx([3e-4 * (9000 - step) / 10000 for step in range(20)])
    assert losses == sorted(losses, reverse=True)


# --- Lightning -------------------------------------------------------------------------------------------------------


def batches():
    """Return six batches whose gradients are clipped."""
    inputs = torch.cat([batch(step) for step in range(6)])
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, torch.full((96, 6), 50.0)), 16)


@pytest.fixture
def lightning(tmp_path, monkeypatch):
    """The names of the recipe after its run of four epochs."""
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    return recipe(LIGHTNING, model=network(), loader=batches())


def resume(lightning, build, folder, settings):
    """Return the Trainers of a whole run, and of one that stopped after two epochs and went on elsewhere."""
    lit = lightning["L"]

    class Stop(lit.Callback):
        def on_train_epoch_end(self, trainer, _module):
            trainer.should_stop = trainer.current_epoch == 1

    def fit(part, *callbacks):
        last = folder / part / "last.ckpt"
        saver = lit.pytorch.callbacks.ModelCheckpoint(last.parent, last.stem, enable_version_counter=False)
        quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lit.Trainer(max_epochs=4, gradient_clip_val=1.0, callbacks=[saver, *callbacks], **quiet, **settings())
        trainer.fit(build(), batches(), ckpt_path=last if last.exists() else None, weights_only=True)
        return trainer

    whole, stopped, resumed = fit("whole"), fit("parts", Stop()), fit("parts")
    assert 2 * stopped.global_step == resumed.global_step == whole.global_step
    assert resumed.optimizers[0].param_groups[0]["steps"] == whole.global_step
    return whole, resumed


def test_under_lightning_it_trains_as_a_plain_loop_does(lightning):
    model = network()
    optimizer = sel.SELAdamW(model, lr=1e-3, weight_decay=0.01, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    for inputs, targets in [*batches()] * 4:
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        assert optimizer.grad_norm > 2.0
        optimizer.zero_grad()
        scheduler.step()
    assert_same_bits(model, lightning["trainer"].model.model)
    assert lightning["trainer"].optimizers[0].param_groups[0]["total_steps"] == 24
    assert lightning["trainer"].callback_metrics.keys() > {"loss"}  # the statistics of curved weights


@pytest.mark.parametrize(("config", "precision"), [(PAPER, "32-true"), (None, "bf16-true")])
def test_a_run_under_lightning_resumes_to_the_bit(lightning, config, precision, tmp_path):
    def build():
        module = lightning["Module"](network(), config=config)
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32  # Lightning leaves the data as they are
        module.on_before_batch_transfer = lambda batch, _: [part.to(dtype) for part in batch]
        return module

    whole, resumed = resume(lightning, build, tmp_path, lambda: {"precision": precision})
    assert_same_bits(resumed.model, whole.model)


@pytest.mark.distributed
@pytest.mark.slow
def test_in_two_processes_under_lightning_a_run_resumes_to_the_bit(tmp_path):
    pytest.importorskip("lightning")
    script = (str(Path(__file__).parent / "lightning_sharded.py"), str(tmp_path))
    (printed,) = forked.outputs(["lightning", "torch._dynamo", "symexplin.optim"], [(2, script)])
    assert printed.split() == ["equal", "equal"]


# --- timm ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timm():
    """timm, also without torchvision, which it imports but neither its models nor its optimizers use.

    torchvision must be of the same build as torch: one for CUDA beside a torch for CPUs breaks Lightning and
    transformers too. Therefore it is not in the extra `dev`, and timm gets stand-ins while it is imported.
    """
    if find_spec("timm") is None:
        pytest.skip("timm is not installed: pip install --no-deps timm")
    local = ("datasets", "ops", "ops.misc", "transforms", "transforms.functional")
    names = ["torchvision", *(f"torchvision.{name}" for name in local)]
    if find_spec("torchvision") is None:
        stand_ins = {name: MagicMock(__spec__=ModuleSpec(name, None)) for name in names}
        for name in names[1:]:
            parent, _, last = name.rpartition(".")
            setattr(stand_ins[parent], last, stand_ins[name])
        stand_ins["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (nn.Module,), {})
        sys.modules |= stand_ins
    try:
        import timm.optim
        import timm.scheduler
    finally:
        if find_spec("torchvision") is None:
            for name in names:
                del sys.modules[name]
    return timm


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_timms_rates_decay_and_schedule_are_those_of_its_adamw(timm, layer_decay):
    torch.manual_seed(0)
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    model = timm.create_model("vit_tiny_patch16_224", **shape)
    model.patch_embed.requires_grad_(False)
    names = recipe(TIMM, model=copy.deepcopy(model))
    adamw = timm.optim.create_optimizer_v2(model, "adamw", lr=2e-3, weight_decay=0.05, layer_decay=layer_decay)
    ours = names["sel_adamw"](model, 2e-3, 0.05, layer_decay, max_grad_norm=1.0)
    rates = []
    for optimizer in (adamw, ours):
        scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=10, warmup_epochs=0)
        scheduler.step(3)
        lrs = [(g, g["lr"] * g.get("lr_factor", 1.0)) for g in optimizer.param_groups]
        rates.append({id(p): (lr, g["weight_decay"]) for g, lr in lrs for p in g["params"]})
    assert rates[1].keys() == rates[0].keys()
    assert all(rates[1][key] == pytest.approx(rates[0][key], rel=1e-12) for key in rates[0])
    assert len({lr for lr, _ in rates[0].values()}) == (1 if layer_decay == 1.0 else 4)
    images, losses = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)), []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(images), torch.arange(8) % 3)
        loss.backward()
        ours.step()
        ours.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
