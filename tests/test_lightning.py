"""SEL under Lightning's Trainer: the plain loop's bits, checkpoints that survive a kill, refused strategies."""

import copy
import functools
import pickle
import re
import signal
import subprocess
import sys
import warnings
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import forked
import symexplin as sel
from scripts import load
from symexplin.lightning import setup
from training import assert_same_bits

EXAMPLE = Path(__file__).parents[1] / "examples" / "lightning_module.py"
PRECISIONS = ["32-true", "bf16-true"]
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

test_lightning.record(example, Path(sys.argv[2], sys.argv[3]), 4, Kill(), precision=sys.argv[3])
"""


def load_example():
    module = load(EXAMPLE)
    module.Regressor.config = sel.preset("paper")  # learned scales: more to resume
    return module


def record(example, out, epochs, *callbacks, **settings):
    """Train as the example does; return the module and the exact losses by step."""
    losses = {}
    if settings.get("precision") == "bf16-true":
        example.Regressor.config = sel.SELConfig()  # the default map, with a master copy

    class Losses(example.L.Callback):
        def on_train_batch_end(self, trainer, _module, outputs, *_args):
            losses[trainer.global_step] = outputs["loss"].item()

    return example.fit(out, epochs, Losses(), *callbacks, **settings), losses


@pytest.fixture
def example():
    pytest.importorskip("lightning")
    return load_example()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Runs of each precision, killed in the third epoch of six steps."""
    pytest.importorskip("lightning")
    folder = tmp_path_factory.mktemp("killed")
    (folder / "run.py").write_text(KILLED)
    jobs = [(1, (str(folder / "run.py"), str(Path(__file__).parent), str(folder), name)) for name in PRECISIONS]
    forked.outputs(["lightning", "torch._dynamo", "symexplin.optim"], jobs, ends=[-signal.SIGKILL] * len(jobs))
    return folder


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_killed_run_goes_on_to_the_same_bits(example, killed, tmp_path, precision):
    """Resumed in another process, from the checkpoint of the second epoch."""
    whole, expected = record(example, tmp_path, 4, precision=precision)
    module, losses = record(example, killed / precision, 4, precision=precision)
    assert list(losses) == list(range(13, 25))
    assert losses == {step: expected[step] for step in losses}
    assert_same_bits(module, whole)
    half = precision == "bf16-true"
    assert module.net[0].weight.dtype == (torch.bfloat16 if half else torch.float32)
    (mine,), (theirs,) = module.trainer.optimizers, whole.trainer.optimizers
    for p, q in zip(module.parameters(), whole.parameters(), strict=True):
        assert mine.state[p].keys() == theirs.state[q].keys()
        assert ("master" in mine.state[p]) == half
        for name, value in mine.state[p].items():
            assert torch.equal(value, theirs.state[q][name])
            assert value.dtype == torch.float32


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_trainer_does_what_the_plain_loop_does(example, tmp_path, accumulation):
    """Same clipping (the raw norm's), annealing, schedule and accumulation as the loop written out; 6 = 4 + 2."""
    module, _ = record(example, tmp_path, 2, accumulate_grad_batches=accumulation, gradient_clip_val=0.05)
    torch.manual_seed(0)
    plain, updates, norms = example.Regressor(), 2 * -(-6 // accumulation), []
    groups = sel.param_groups(plain, lr=1e-3, weight_decay=0.01, config=sel.preset("paper"))
    optimizer = sel.SELAdamW(groups, total_steps=updates, max_grad_norm=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
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
def test_the_trainer_never_clips_this_optimizer_and_clips_another_as_before(example, precision):
    module, used = example.Regressor(), under_adamw(example)
    for norm in (0.25, None, 0.05):  # the module keeps nothing of an earlier run
        fitter, clipped = train(example, module, gradient_clip_val=norm, precision=precision)
        assert (fitter.optimizers[0].param_groups[0]["max_grad_norm"], fitter.gradient_clip_val) == (norm, norm)
        assert clipped == 0
    fitter.fit_loop.epoch_loop.max_steps = 4
    assert train(example, under_adamw(example), fitter)[1] == 2
    setup(trainer(lightning_module=used, gradient_clip_val=0.05))  # as a first run does that was not AdamW's
    assert train(example, used)[1] == 2


def test_a_module_that_was_trained_can_be_pickled_and_copied(example):
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


def test_total_steps_are_the_trainers_where_it_can_count_them(example):
    for estimate, expected in ((7, 7), (float("inf"), None), (-1, None)):
        assert setup(trainer(estimated_stepping_batches=estimate))["total_steps"] == expected
        assert setup(trainer(estimated_stepping_batches=estimate), total_steps=5)["total_steps"] == 5
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


def test_what_cannot_be_right_is_refused_or_warned_of(example):
    strategies = example.L.pytorch.strategies
    for kind in (strategies.FSDPStrategy, strategies.DeepSpeedStrategy):
        with pytest.raises(ValueError, match="strategy must leave parameters their shapes"):
            setup(trainer(strategy=kind.__new__(kind)))
    parallel = strategies.ModelParallelStrategy
    assert setup(trainer(strategy=parallel.__new__(parallel)))["total_steps"] == 7
    algorithm = Enum("GradClipAlgorithmType", {"NORM": "norm", "VALUE": "value"})  # Lightning's own has these too
    norm, value = (trainer(gradient_clip_val=0.5, gradient_clip_algorithm=way) for way in algorithm)
    assert setup(norm)["max_grad_norm"] == 0.5
    with pytest.raises(ValueError, match=r"gradient_clip_algorithm must be 'norm', got 'value'"):
        setup(value)

    class Clips(example.L.LightningModule):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            """Clip in some other way."""

    with pytest.warns(UserWarning, match=r"Clips\.configure_gradient_clipping is still called .* to 0\.5"):
        setup(trainer(lightning_module=Clips(), gradient_clip_val=0.5))


def test_the_older_package_name_is_known_too():
    module = pytest.importorskip("pytorch_lightning").LightningModule()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert setup(trainer(lightning_module=module, gradient_clip_val=1.0))["max_grad_norm"] == 1.0
    assert isinstance(module.configure_gradient_clipping, functools.partial)
