"""Hugging Face's Trainer: the same steps as a plain loop, its clipping moved, killed and resumed to the same bits."""

import json
import logging
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import forked  # noqa: E402
import symexplin as sel  # noqa: E402
from symexplin.starts import is_fresh  # noqa: E402

CONFIG = sel.preset("paper")


def tiny(dtype=torch.float32, width=16):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=width,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in model.modules():  # the mismatched start is not for transformers' own draw, a normal one
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
    return model


def rows(count=64):
    starts = torch.randint(0, 32, (count, 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(10)) % 32]


def arguments(folder, **changes):
    settings = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "adam_beta1": 0.8,
        "adam_epsilon": 1e-6,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
    }
    return transformers.TrainingArguments(**{**settings, **changes})


def trainer(args, model=None, setup=None, **more):
    given = setup if setup is not None else sel.hf.setup(args, CONFIG)
    callbacks = given["callbacks"] + more.pop("callbacks", [])
    model = {} if "model_init" in more else {"model": model or tiny()}
    return transformers.Trainer(args=args, train_dataset=rows(), **model, **{**given, "callbacks": callbacks}, **more)


class Seen(transformers.TrainerCallback):
    """The Trainer's clipping norm during training, a pickle of its arguments, and a way to break it off."""

    def __init__(self, breaks_at=None):
        self.breaks_at, self.norms, self.pickled = breaks_at, set(), None

    def on_step_end(self, args, state, control, **kwargs):  # noqa: ARG002
        self.norms.add(args.max_grad_norm)
        self.pickled = pickle.dumps(args)
        if state.global_step == self.breaks_at:
            raise KeyboardInterrupt


def losses(history):
    return [record["loss"] for record in history if "loss" in record]


def test_the_trainer_takes_the_very_steps_of_a_plain_loop(tmp_path):
    run = trainer(arguments(tmp_path))
    run.train()

    model, data = tiny(), rows()
    undecayed = [name for name, _ in model.named_parameters() if name.endswith("bias") or "norm" in name]
    groups = sel.param_groups(model, lr=3e-3, weight_decay=0.1, config=CONFIG, no_decay=undecayed)
    optimizer = sel.SELAdamW(groups, betas=(0.8, 0.999), eps=1e-6, total_steps=6, max_grad_norm=0.5)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 6)
    expected = []
    for step in range(6):
        ids = torch.stack([row["input_ids"] for row in data[4 * step : 4 * step + 4]])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        expected.append((float(loss.detach()), float(optimizer.grad_norm), sel.stats(model, optimizer)))
    for record, (loss, norm, figures) in zip(run.state.log_history, expected, strict=False):
        assert record["loss"] == pytest.approx(loss, rel=1e-6)
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert norm > 0.5  # it was clipped
        assert {name: record[f"sel/{name}"] for name in figures} == pytest.approx(figures)
    for (name, found), right in zip(run.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-8, msg=name)
    inner = run.optimizer.optimizer
    assert {group["total_steps"] for group in inner.param_groups} == {6}
    decays = {n: group["weight_decay"] for group in inner.param_groups for n in group["param_names"]}
    assert {name for name, decay in decays.items() if decay == 0.0} == set(undecayed)
    assert set(decays.values()) == {0.0, 0.1}


def test_epochs_give_the_number_of_steps_and_a_longer_second_run_changes_it(tmp_path):
    run = trainer(
        arguments(
            tmp_path,
            max_steps=-1,
            num_train_epochs=2,
            per_device_train_batch_size=16,
            save_steps=3,
            save_strategy="steps",
        )
    )
    run.train()
    assert {group["total_steps"] for group in run.optimizer.optimizer.param_groups} == {8}
    more = trainer(arguments(tmp_path, max_steps=10, per_device_train_batch_size=16))
    more.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    groups = more.optimizer.optimizer.param_groups
    assert {(group["total_steps"], group["steps"]) for group in groups} == {(10, 10)}


def test_resumed_under_another_map_it_stops(tmp_path):
    trainer(arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)).train()
    args = arguments(tmp_path, max_steps=4)
    other = trainer(args, setup=sel.hf.setup(args, sel.preset("paper", beta=9)))
    with pytest.raises(ValueError, match="state_dict is of another map: beta is "):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_second_run_anneals_from_the_beginning(tmp_path):
    run = trainer(arguments(tmp_path))
    run.train()
    run.args.max_steps = 4
    run.train()
    assert {(group["total_steps"], group["steps"]) for group in run.optimizer.param_groups} == {(4, 4)}


def test_a_model_made_by_the_trainer_and_arguments_changed_until_training_starts(tmp_path):
    args = arguments(tmp_path, max_steps=1)
    run = trainer(args, model_init=lambda: tiny())
    args.learning_rate = 1e-3  # as a search over hyperparameters does
    run.train()
    assert {group["initial_lr"] for group in run.optimizer.param_groups} == {1e-3}
    owned = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    assert owned == {id(p) for p in run.model.parameters()}


def test_other_optimizers_and_their_arguments(tmp_path):
    args = arguments(tmp_path, max_steps=2)
    setup = sel.hf.setup(args, CONFIG, optimizer=sel.SELMuon, no_decay=["*.weight"], momentum=0.9)
    run = trainer(args, setup=setup)
    run.train()
    inner = run.optimizer.optimizer
    assert type(inner) is sel.SELMuon
    assert {(group["momentum"], *group["betas"]) for group in inner.param_groups} == {(0.9, 0.8, 0.999)}
    decays = {n: group["weight_decay"] for group in inner.param_groups for n in group["param_names"]}
    assert all((decay == 0.0) == name.endswith(".weight") for name, decay in decays.items())


def test_the_routing_is_logged_once(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="symexplin.hf"):
        trainer(arguments(tmp_path, max_steps=2)).train()
    tables = [record.getMessage() for record in caplog.records if record.name == "symexplin.hf"]
    assert len(tables) == 1
    rates = {"lr": 3e-3, "weight_decay": 0.1, "no_decay": ["*bias", "*norm*"]}
    assert str(sel.routing(tiny(), CONFIG, **rates)) in tables[0]


def test_reporters_see_the_figures_once_they_come_after(tmp_path):
    class Reporter(transformers.TrainerCallback):
        seen = ()

        def on_log(self, args, state, control, logs, **kwargs):  # noqa: ARG002
            self.seen = (*self.seen, logs)

    run = trainer(arguments(tmp_path, max_steps=2), callbacks=[Reporter])
    run.callback_handler.callbacks.insert(0, run.pop_callback(Reporter))  # where the Trainer puts its own
    run.add_callback(run.pop_callback(Reporter))
    run.train()
    (reporter,) = (c for c in run.callback_handler.callbacks if isinstance(c, Reporter))
    assert ["sel/e/mean" in logs for logs in reporter.seen] == [True, True, False]  # the last is the summary


class Signs(sel.RawSpaceOptimizer):
    """A rule with betas of its own and no eps."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0, *, total_steps=None, max_grad_norm=None):
        rule = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        shared = {"total_steps": total_steps, "max_grad_norm": max_grad_norm}
        super().__init__(params, rule | shared)

    def rule_(self, target, group):
        target.value.sub_(target.grad.sign() * target.lr * group["betas"][0])


def test_betas_and_eps_are_the_optimizers_own_unless_said_once(tmp_path):
    def made(optimizer, changes, **options):
        args = arguments(tmp_path, **{"adam_beta1": 0.9, "adam_epsilon": 1e-8, **changes})
        given = sel.hf.setup(args, CONFIG, optimizer=optimizer, **options)
        return trainer(args, setup=given).create_optimizer().param_groups[0]

    assert made(Signs, {})["betas"] == (0.9, 0.99)
    assert made(Signs, {"adam_beta2": 0.95})["betas"] == (0.9, 0.95)
    assert made(Signs, {}, betas=(0.5, 0.6))["betas"] == (0.5, 0.6)
    assert made(sel.SELAdamW, {"adam_beta2": 0.95}, eps=1e-5)["eps"] == 1e-5
    with pytest.raises(TypeError, match="unexpected keyword argument 'eps'"):
        made(Signs, {"adam_epsilon": 1e-6})
    with pytest.raises(ValueError, match=r"betas must be given once, got betas=\(0.5, 0.6\) and args.adam_beta1 and"):
        made(Signs, {"adam_beta2": 0.95}, betas=(0.5, 0.6))
    with pytest.raises(ValueError, match=r"eps must be given once, got eps=1e-05 and args\.adam_epsilon=\[1e-06\]"):
        made(sel.SELAdamW, {"adam_epsilon": 1e-6}, eps=1e-5)


def test_callbacks_of_ones_own_come_along(tmp_path):
    args, seen = arguments(tmp_path, max_steps=1), Seen()
    run = transformers.Trainer(
        model=tiny(), args=args, train_dataset=rows(), **sel.hf.setup(args, CONFIG, callbacks=[seen])
    )
    run.train()
    assert seen.norms == {0.0}
    assert "sel/e/mean" in run.state.log_history[0]


def test_a_trainer_that_does_not_take_the_optimizers_argument(tmp_path):
    args = transformers.Seq2SeqTrainingArguments(**{**arguments(tmp_path).to_dict(), "max_steps": 2})
    given = sel.hf.setup(args, CONFIG)
    run = transformers.Seq2SeqTrainer(model=tiny(), args=args, train_dataset=rows(), callbacks=given["callbacks"])
    run.optimizer_cls_and_kwargs = given["optimizer_cls_and_kwargs"]
    run.train()
    assert type(run.optimizer.optimizer) is sel.SELAdamW
    assert run.optimizer.param_groups[0]["total_steps"] == 2


def test_a_log_before_training_has_no_figures(tmp_path):
    run = trainer(arguments(tmp_path))
    run.log({"loss": 1.0})
    assert not [name for name in run.state.log_history[0] if name.startswith("sel/") or name == "grad_norm"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "adafactor"}, "args.optim must be left at its default, got 'adafactor'"),
        ({"optim_args": "a=1"}, "args.optim_args must be None, got 'a=1'"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, r"args.fsdp_config\['version'\] asks for FSDP1"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_arguments_that_the_optimizer_cannot_follow(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        sel.hf.setup(arguments(tmp_path, **changes))


def test_deepspeed_is_refused_however_it_is_asked_for(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    args.deepspeed_plugin = object()
    with pytest.raises(ValueError, match=r"args\.deepspeed asks for DeepSpeed, which flattens"):
        sel.hf.setup(args)
    run = trainer(arguments(tmp_path))
    state = sel.hf.AcceleratorState._shared_state
    monkeypatch.setitem(state, "deepspeed_plugins", {"default": object()})
    with pytest.raises(ValueError, match="launcher's configuration asks for DeepSpeed"):
        run.create_optimizer()
    monkeypatch.setitem(state, "deepspeed_plugins", None)
    monkeypatch.setitem(state, "fsdp_plugin", types.SimpleNamespace(fsdp_version=1))
    with pytest.raises(ValueError, match="launcher's fsdp_version asks for FSDP1"):
        run.create_optimizer()


def test_rates_by_name_pattern_follow_the_trainers_schedule(tmp_path):
    args = arguments(tmp_path, warmup_steps=0, lr_scheduler_type="constant")
    setup = sel.hf.setup(args, CONFIG, lr={"*.mlp.*": 1e-3, "*": 2e-3}, weight_decay={"*.mlp.*": 0.2, "*": 0.1})
    run = trainer(args, setup=setup)
    run.train()
    found = {
        ("mlp" in name, group["lr"], group["weight_decay"])
        for group in run.optimizer.optimizer.param_groups
        for name in group["param_names"]
    }
    assert found == {(True, 1e-3, 0.2), (False, 2e-3, 0.1), (False, 2e-3, 0.0)}  # biases and norms do not decay


def test_misuse_is_named(tmp_path):
    args = arguments(tmp_path)
    with pytest.raises(ValueError, match="args must be the Trainer's TrainingArguments, got Linear"):
        sel.hf.setup(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"optimizer must be a raw-space optimizer, .* got AdamW"):
        sel.hf.setup(args, optimizer=torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"lr must be given as args.learning_rate, got lr=0.1 here"):
        sel.hf.setup(args, lr=0.1)
    frozen = tiny().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to curve"):
        trainer(args, frozen).train()
    alone = {"callbacks": sel.hf.setup(args)["callbacks"]}
    with pytest.raises(TypeError, match="must be a raw-space optimizer, got AdamW"):
        trainer(args, setup=alone).train()


# One process imports torch and forks one process a run: starting Python for each would take most of the time.
_RUNS = """if True:
    import json, os, signal, sys, torch, torch._dynamo, transformers
    sys.path.insert(0, sys.argv[1])
    from test_hf import arguments, losses, tiny, trainer

    class Kill(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 13:
                os.kill(os.getpid(), signal.SIGKILL)

    def fork(folder, dtype, name, callbacks, resume):
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        code = 1
        try:
            out = os.path.join(folder, name)
            args = arguments(out, max_steps=20, save_strategy="steps", save_steps=5, dataloader_drop_last=True,
                             train_sampling_strategy="random", max_grad_norm=1.0)
            # Once trained, weights of this size are no longer taken for a draw.
            run = trainer(args, tiny(dtype, 256), callbacks=callbacks)
            run.train(resume_from_checkpoint=resume)
            run.save_model()
            logits = run.model(torch.arange(10)[None]).logits
            final = {"losses": losses(run.state.log_history), "logits": logits.tolist()}
            with open(os.path.join(out, "final.json"), "w") as file:
                json.dump(final, file)
            code = 0
        finally:
            os._exit(code)

    for name in sys.argv[3:]:
        run = os.path.join(sys.argv[2], name), getattr(torch, name)
        assert fork(*run, "whole", [], None) == 0
        assert fork(*run, "killed", [Kill()], None) == -signal.SIGKILL
        assert sorted(os.listdir(os.path.join(run[0], "killed"))) == ["checkpoint-10", "checkpoint-5"]
        assert fork(*run, "killed", [], True) == 0
"""
_DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory):
    """Of each dtype 20 steps, whole, and killed after 13 and resumed from 10 in another process."""
    folder = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        [sys.executable, "-c", _RUNS, str(Path(__file__).parent), str(folder), *_DTYPES],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("dtype", _DTYPES)
def test_killed_and_resumed_it_is_the_uninterrupted_run(killed_runs, dtype):
    """Losses, weights and state to the bit."""
    folder = killed_runs / dtype
    whole, killed = (json.loads((folder / name / "final.json").read_text()) for name in ("whole", "killed"))
    assert len(whole["losses"]) == 20
    assert whole == killed
    assert whole["losses"][-1] < whole["losses"][0]

    states = [torch.load(folder / n / "checkpoint-20" / "optimizer.pt", weights_only=True) for n in ("whole", "killed")]
    for key, expected in states[0]["state"].items():
        found = states[1]["state"][key]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(value, found[name])
            assert value.dtype == torch.float32

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "killed", output_loading_info=True, dtype=getattr(torch, dtype)
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert model(torch.arange(10)[None]).logits.tolist() == whole["logits"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole" / "checkpoint-10", dtype=torch.float32)
    assert not is_fresh(model.model.layers[0].mlp.down_proj.weight)


_SHARDED = """if True:
    import json, os, sys, torch
    sys.path.insert(0, sys.argv[1])
    from accelerate_cpu import shard_on_cpus
    from test_hf import arguments, trainer
    shard_on_cpus()
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        for resume in (None, True):
            args = arguments(os.path.join(sys.argv[2], kind), save_strategy="steps", save_steps=2, fsdp=True,
                             fsdp_config={"version": 2, "state_dict_type": kind}, save_total_limit=2)
            run = trainer(args)
            last = os.path.join(args.output_dir, "checkpoint-4")
            run.train(resume_from_checkpoint=last if resume else None)
            assert isinstance(next(run.model.parameters()), torch.distributed.tensor.DTensor)
            if run.is_world_process_zero():
                print(json.dumps([(r["loss"], r["grad_norm"]) for r in run.state.log_history if "loss" in r]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_sharded_over_two_processes_it_is_the_same_run_and_resumes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_SHARDED)
    (said,) = forked.outputs(forked.TRAINER, [(2, (str(script), str(Path(__file__).parent), str(tmp_path)))])
    run = trainer(arguments(tmp_path, per_device_train_batch_size=8))
    run.train()
    whole = [x for r in run.state.log_history if "loss" in r for x in (r["loss"], r["grad_norm"])]
    histories = [json.loads(line) for line in said.splitlines() if line.startswith("[[")]
    assert len(histories) == 4
    for history in histories:
        assert [x for pair in history for x in pair] == pytest.approx(whole, rel=1e-4)
