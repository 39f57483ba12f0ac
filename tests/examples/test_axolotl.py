"""axolotl's plugin, with a stub of axolotl's base class, on a Trainer that calls the factory as axolotl 0.18.0 does."""

import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import symexplin as sel  # noqa: E402
from scripts import load  # noqa: E402

recipe = load(Path(__file__).with_name("test_hf_trainer.py"))

PLUGIN = Path(__file__).parents[2] / "examples" / "axolotl" / "sel_plugin.py"


class Trainer(transformers.Trainer):
    def create_optimizer(self, model=None):
        """Call the factory with the training arguments as a second argument."""
        factory, details = self.optimizer_cls_and_kwargs
        self.optimizer = factory()(self.model if model is None else model, self.args, **details)
        return self.optimizer


@pytest.fixture
def plugin(monkeypatch):
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = type("BasePlugin", (), {})
    return runpy.run_path(str(PLUGIN))["SELPlugin"]()


def test_the_trainer_gets_the_optimizer_which_clips(plugin, tmp_path):
    args = transformers.TrainingArguments(**recipe.arguments(tmp_path, max_grad_norm=0.5))
    run = Trainer(model=recipe.tiny(), args=args, train_dataset=recipe.rows())
    plugin.post_trainer_create({"optimizer": "adamw_torch_fused"}, run)
    run.train()
    inner = run.optimizer.optimizer
    assert type(inner) is sel.SELAdamW
    assert (inner.param_groups[0]["max_grad_norm"], run.args.max_grad_norm) == (0.5, 0.0)
    losses = recipe.losses(run)
    assert losses[-1] < losses[0]


def test_what_axolotl_would_ignore_is_refused(plugin, tmp_path):
    args = transformers.TrainingArguments(**recipe.arguments(tmp_path))
    run = transformers.Trainer(model=recipe.tiny(), args=args, train_dataset=recipe.rows())
    for key, value in (("loraplus_lr_ratio", 16), ("embedding_lr", 1e-4), ("lr_groups", [{"lr": 1e-3}])):
        with pytest.raises(ValueError, match=f"{key} must be left out"):
            plugin.post_trainer_create({key: value}, run)
    run.optimizer_cls_and_kwargs = (torch.optim.SGD, {})
    with pytest.raises(ValueError, match="optimizer must be adamw_torch or adamw_torch_fused, got 'muon'"):
        plugin.post_trainer_create({"optimizer": "muon"}, run)
