"""Clipping under Hugging Face's Trainer: the optimizer's while it trains, the arguments' own before and afterwards."""

import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import symexplin as sel  # noqa: E402
from test_hf import Seen, arguments, rows, tiny, trainer  # noqa: E402


def weights(run):
    return {name: value.detach().clone() for name, value in run.model.named_parameters()}


def adamw(args, **more):
    return transformers.Trainer(model=tiny(), args=args, train_dataset=rows(), **more)


def test_the_arguments_clip_adamw_after_a_run_as_before(tmp_path):
    fresh = adamw(arguments(tmp_path))
    fresh.train()
    args, seen = arguments(tmp_path), Seen()
    run = trainer(args, callbacks=[seen])
    run.train()
    assert seen.norms == {0.0}
    assert run.optimizer.param_groups[0]["max_grad_norm"] == 0.5
    assert (args.max_grad_norm, args.to_dict()["max_grad_norm"]) == (0.5, 0.5)
    assert args.to_dict() == pickle.loads(pickle.dumps(args)).to_dict()
    after = adamw(args)
    after.train()
    for name, expected in weights(fresh).items():
        assert torch.equal(weights(after)[name], expected)


def test_a_training_that_broke_gives_the_clipping_norm_back(tmp_path):
    args, seen = arguments(tmp_path), Seen(breaks_at=2)
    run = trainer(args, callbacks=[seen])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.remove_callback(seen)
    run.train()
    assert (run.optimizer.param_groups[0]["max_grad_norm"], args.max_grad_norm) == (0.5, 0.5)
    saved = pickle.loads(seen.pickled)  # as training_args.bin in a checkpoint
    assert saved.max_grad_norm == 0.0
    again = trainer(saved)
    assert saved.max_grad_norm == 0.5
    assert again.create_optimizer().param_groups[0]["max_grad_norm"] == 0.5
    broken = pickle.loads(seen.pickled)
    factory, details = sel.hf.setup(arguments(tmp_path))["optimizer_cls_and_kwargs"]
    assert factory()(tiny(), **{**details, "args": broken}).param_groups[0]["max_grad_norm"] == 0.5


def test_clipping_can_be_changed_and_switched_off_between_runs(tmp_path):
    args = arguments(tmp_path, max_steps=1)
    # The optimizer is kept; made anew, as a search over hyperparameters does.
    for more in ({}, {"model_init": lambda: tiny()}):
        run = trainer(args, **more)
        for norm, expected in ((2.0, 2.0), (0.0, None), (0.25, 0.25)):
            args.max_grad_norm = norm
            run.train()
            inner = run.optimizer.optimizer
            assert {settings["max_grad_norm"] for settings in (*inner.param_groups, inner.defaults)} == {expected}
            assert args.max_grad_norm == norm


@pytest.mark.parametrize("norm", [0.05, 0.0])
def test_resumed_with_another_clipping_norm_it_is_what_adamw_is(tmp_path, norm):
    identity = sel.SELConfig(mode="linear", l=sel.Scale())
    found = []
    for kind in ("sel", "adamw"):
        saves = {"save_strategy": "steps", "save_steps": 3}
        for settings in (saves, {"max_grad_norm": norm}):
            args = arguments(tmp_path / kind, **settings)
            run = adamw(args, **(sel.hf.setup(args, identity) if kind == "sel" else {}))
            run.train(resume_from_checkpoint=None if settings is saves else str(tmp_path / kind / "checkpoint-3"))
        found.append(weights(run))
    for name, expected in found[1].items():
        torch.testing.assert_close(found[0][name], expected, rtol=1e-4, atol=1e-6)
