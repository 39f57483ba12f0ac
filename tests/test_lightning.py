"""SEL under Lightning's Trainer: the plain loop's bits, checkpoints that survive a kill, refused strategies."""

import copy
import importlib.util
import pickle
import re
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import symexplin as sel
from symexplin.lightning import setup
from symexplin.starts import is_fresh
from training import assert_same_bits

EXAMPLE = Path(__file__).parents[1] / "examples" / "lightning_module.py"
# One process imports Lightning and forks one process per precision.
PRECISIONS = ["32-true", "bf16-true"]
WIDTH = 64  # once trained, the first layer is no longer within the bound of a draw, so that a start would be refused
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_lightning
example = test_lightning.load_example()

class Kill(example.L.Callback):
    def on_train_batch_end(self, trainer, *_args):
        if trainer.global_step == 15:
            os.kill(os.getpid(), signal.SIGKILL)

for precision in sys.argv[3:]:
    pid = os.fork()
    if not pid:
        test_lightning.record(example, Path(sys.argv[2], precision), 4, Kill(), width=test_lightning.WIDTH,
                              precision=precision)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
"""


def load_example():
    spec = importlib.util.spec_from_file_location("lightning_module", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Regressor.config = sel.preset("paper")  # learned scales and the mismatched start have more to resume
    return module


def record(example, out, epochs, *callbacks, **settings):
    """Train as the example does; return the module and the exact losses by step."""
    losses = {}

    class Losses(example.L.Callback):
        def on_train_batch_end(self, trainer, _module, outputs, *_args):
            losses[trainer.global_step] = outputs["loss"].item()

    return example.fit(out, epochs, Losses(), *callbacks, **settings), losses


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("lightning")
    return load_example()


@pytest.fixture(scope="module")
def killed(example, tmp_path_factory):  # noqa: ARG001 (skips without Lightning)
    """Runs of each precision, killed in the third epoch of six steps."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(folder), *PRECISIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_killed_run_goes_on_to_the_same_bits(example, killed, tmp_path, precision):
    """Resumed in another process, from the checkpoint of the second epoch."""
    whole, expected = record(example, tmp_path, 4, width=WIDTH, precision=precision)
    module, losses = record(example, killed / precision, 4, width=WIDTH, precision=precision)
    saved = torch.load(killed / precision / "last.ckpt", weights_only=True)["state_dict"]
    assert not is_fresh(saved["net.0.weight"])
    assert list(losses) == list(range(13, 25))
    assert losses == {step: expected[step] for step in losses}
    assert_same_bits(module, whole)
    assert module.net[0].weight.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    (mine,), (theirs,) = module.trainer.optimizers, whole.trainer.optimizers
    for p, q in zip(module.parameters(), whole.parameters(), strict=True):
        assert all(torch.equal(value, theirs.state[q][name]) for name, value in mine.state[p].items())
        assert p.dtype == torch.float32 or mine.state[p]["raw"].dtype == torch.float32


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_trainer_does_what_the_plain_loop_does(example, tmp_path, accumulation):
    """Same clipping (the raw norm's), annealing, schedule and accumulation as the loop written out; 6 = 4 + 2."""
    module, _ = record(example, tmp_path, 2, accumulate_grad_batches=accumulation, gradient_clip_val=0.05)
    torch.manual_seed(0)
    plain = example.Regressor()
    updates = 2 * -(-6 // accumulation)
    groups = sel.param_groups(plain, lr=1e-3, weight_decay=0.01, config=sel.preset("paper"))
    optimizer = sel.SELAdamW(groups, total_steps=updates, max_grad_norm=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    norms = []
    for _ in range(2):
        for i, (inputs, targets) in enumerate(example.data(16), start=1):
            loss = torch.nn.functional.mse_loss(plain.net(inputs), targets)
            (loss / accumulation).backward()
            if i % accumulation == 0 or i == 6:
                optimizer.step()
                norms.append(float(optimizer.grad_norm))
                optimizer.zero_grad()
                scheduler.step()
    assert_same_bits(module, plain)
    assert min(norms) > 0.05  # every step was clipped
    assert float(module.trainer.optimizers[0].grad_norm) == norms[-1]
    assert module.trainer.gradient_clip_val == 0.05


@pytest.mark.distributed
@pytest.mark.slow
def test_runs_in_two_processes_go_on_to_the_same_bits(tmp_path):
    """DDP; FSDP2 with whole checkpoints and with sharded ones."""
    pytest.importorskip("lightning")
    command = [sys.executable, str(Path(__file__).parent / "lightning_sharded.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"equal: (\w+ in \d)", done.stdout)
    assert sorted(found) == [f"{name} in {rank}" for name in ("ddp", "full", "shards") for rank in (0, 1)]


def trainer(**changes):
    defaults = {"estimated_stepping_batches": 7, "gradient_clip_val": None, "gradient_clip_algorithm": None}
    return SimpleNamespace(**{"strategy": None, **defaults, **changes})


@pytest.mark.parametrize(("estimate", "expected"), [(7, 7), (float("inf"), None), (-1, None)])
def test_total_steps_are_the_trainers_where_it_knows_an_end(estimate, expected):
    assert setup(trainer(estimated_stepping_batches=estimate)) == {"total_steps": expected, "max_grad_norm": None}
    assert setup(trainer(estimated_stepping_batches=estimate), total_steps=5)["total_steps"] == 5


def train(example, module, fitter=None, **settings):
    """Fit for two steps; the Trainer, and how often it clipped."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    default = {"accelerator": "cpu", "max_steps": 2, "gradient_clip_val": 0.05, "enable_checkpointing": False}
    fitter = fitter or example.L.Trainer(**default | quiet | settings)
    clipped = []
    plugin, clip = fitter.precision_plugin, type(fitter.precision_plugin).clip_gradients
    plugin.clip_gradients = lambda *args, **kwargs: (clipped.append(1), clip(plugin, *args, **kwargs))
    fitter.fit(module, example.data(16))
    return fitter, len(clipped)


def under_adamw(example):
    class Plain(example.Regressor):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    return Plain()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_the_trainer_clips_another_optimizer_afterwards_and_never_this_one(example, precision):
    fitter, clipped = train(example, example.Regressor(), precision=precision)
    assert (clipped, fitter.gradient_clip_val) == (0, 0.05)
    assert fitter.optimizers[0].param_groups[0]["max_grad_norm"] == 0.05
    fitter.fit_loop.epoch_loop.max_steps = 4
    _, clipped = train(example, under_adamw(example), fitter)
    assert clipped == 2


def test_a_module_trained_again_has_no_memory_of_the_first_clipping(example, monkeypatch):
    monkeypatch.setattr(
        example.Regressor, "config", sel.preset("paper")
    )  # its weights will be trained
    module = example.Regressor()
    train(example, module)
    for norm in (None, 0.25):
        fitter, clipped = train(example, module, gradient_clip_val=norm)
        assert (fitter.optimizers[0].param_groups[0]["max_grad_norm"], clipped) == (norm, 0)
    used, fresh = under_adamw(example), under_adamw(example)
    setup(trainer(lightning_module=used, gradient_clip_val=0.05))  # as a first run does that was not AdamW's
    assert train(example, used)[1] == train(example, fresh)[1] == 2
    assert_same_bits(used, fresh)


def test_a_module_that_was_trained_can_be_pickled_and_copied(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning_module", example)
    module = example.Regressor()
    setup(trainer(lightning_module=module, gradient_clip_val=1.0))
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert again.configure_gradient_clipping.args[0] is again
        assert again.configure_gradient_clipping(torch.optim.Optimizer.__new__(sel.SELAdamW), 1.0, "norm") is None


def test_resumed_for_more_epochs_steps_and_clipping_are_this_runs(example, tmp_path):
    first, _ = record(example, tmp_path, 2, gradient_clip_val=0.5)
    more, losses = record(example, tmp_path, 3, gradient_clip_val=0.05)
    assert list(losses) == list(range(13, 19))
    found = [run.trainer.optimizers[0].param_groups[0] for run in (first, more)]
    assert [(g["total_steps"], g["max_grad_norm"], g["steps"]) for g in found] == [(12, 0.5, 12), (18, 0.05, 18)]


def test_where_the_trainer_cannot_count_steps_they_must_be_given(example):
    manual = example.Regressor()
    manual.automatic_optimization = False
    scheduler = example.L.pytorch.callbacks.GradientAccumulationScheduler
    for changes, why in (
        ({"lightning_module": manual}, "manual optimization"),
        ({"callbacks": [scheduler({0: 4})]}, "GradientAccumulationScheduler"),
        ({"callbacks": [scheduler({2: 2})]}, "GradientAccumulationScheduler"),
    ):
        with pytest.raises(ValueError, match=f"total_steps must be given .* got None: .*{why}"):
            setup(trainer(**changes))
        assert setup(trainer(**changes), total_steps=5)["total_steps"] == 5
    assert setup(trainer(callbacks=[scheduler({0: 1})]))["total_steps"] == 7


def test_what_cannot_be_right_is_refused(example):
    for name in ("FSDPStrategy", "DeepSpeedStrategy"):
        real = getattr(example.L.pytorch.strategies, name)
        fake = trainer(strategy=real.__new__(real))
        with pytest.raises(ValueError, match="strategy must leave parameters their shapes"):
            setup(fake)
    parallel = example.L.pytorch.strategies.ModelParallelStrategy
    assert setup(trainer(strategy=parallel.__new__(parallel)))["total_steps"] == 7
    by_norm = trainer(gradient_clip_val=0.5, gradient_clip_algorithm=Enum("Algorithm", {"NORM": "norm"}).NORM)
    assert setup(by_norm)["max_grad_norm"] == 0.5
    by_value = example.L.Trainer(gradient_clip_val=1.0, gradient_clip_algorithm="value", logger=False)
    with pytest.raises(ValueError, match=r"gradient_clip_algorithm must be 'norm', got 'value'"):
        setup(trainer(gradient_clip_val=1.0, gradient_clip_algorithm=by_value.gradient_clip_algorithm))
    with pytest.raises(ValueError, match="total_steps must be a whole number >= 1, got 0"):
        setup(trainer(), total_steps=0)


def test_a_clipping_hook_of_ones_own_is_warned_of(example):
    class Clips(example.L.LightningModule):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            """Clip in some other way."""

    with pytest.warns(
        UserWarning, match=r"Clips\.configure_gradient_clipping is still called .* raw gradients to 0\.5"
    ):
        setup(trainer(lightning_module=Clips(), gradient_clip_val=0.5))


def test_the_older_package_name_trains_too(tmp_path):
    older = pytest.importorskip("pytorch_lightning")

    class Module(older.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 4)

        def training_step(self, batch):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return sel.SELAdamW(sel.param_groups(self, lr=1e-3, config=sel.preset("paper")), **setup(self.trainer))

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    fitter = older.Trainer(max_steps=3, gradient_clip_val=1.0, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    fitter.fit(Module(), torch.utils.data.DataLoader(torch.ones(8, 4), 2))
    (optimizer,) = fitter.optimizers
    assert [group["steps"] for group in optimizer.param_groups] == [3]
    assert optimizer.param_groups[0]["total_steps"] == 3
    assert optimizer.param_groups[0]["max_grad_norm"] == 1.0
