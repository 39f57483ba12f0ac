"""axolotl's plugin, with a stub of axolotl's base class, on a Trainer that calls the factory as axolotl 0.18.0 does."""

import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from test_hf import Seen, arguments, rows, state_of, tiny  # noqa: E402

import symexplin as sel  # noqa: E402

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


@pytest.mark.parametrize("kind", [Trainer, transformers.Trainer])
def test_the_trainer_gets_the_optimizer_which_clips(plugin, kind, tmp_path):
    args, seen = arguments(tmp_path), Seen()
    before = state_of(args)
    run = kind(model=tiny(), args=args, train_dataset=rows(), callbacks=[seen])
    plugin.post_trainer_create({"optimizer": "adamw_torch_fused"}, run)
    run.train()
    inner = run.optimizer.optimizer
    assert type(inner) is sel.SELAdamW
    assert (inner.param_groups[0]["max_grad_norm"], run.args.max_grad_norm) == (0.5, 0.5)
    assert seen.logs[5]["grad_norm"] == float(inner.grad_norm)
    assert "sel/slope/mean" in seen.logs[5]
    assert state_of(args) == before
    losses = [record["loss"] for record in run.state.log_history if "loss" in record]
    assert losses[-1] < losses[0]


def test_what_axolotl_would_ignore_is_refused(plugin, tmp_path):
    run = transformers.Trainer(model=tiny(), args=arguments(tmp_path), train_dataset=rows())
    for key, value in (("loraplus_lr_ratio", 16), ("embedding_lr", 1e-4), ("lr_groups", [{"lr": 1e-3}])):
        with pytest.raises(ValueError, match=f"{key} must be left out"):
            plugin.post_trainer_create({key: value}, run)
    run.optimizer_cls_and_kwargs = (torch.optim.SGD, {})
    with pytest.raises(ValueError, match="optimizer must be adamw_torch or adamw_torch_fused, got 'muon'"):
        plugin.post_trainer_create({"optimizer": "muon"}, run)
