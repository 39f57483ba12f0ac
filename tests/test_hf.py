"""Hugging Face's Trainer: the same steps as a plain loop, its clipping moved, resumed to the same bits."""

import contextlib
import fnmatch
import functools
import inspect
import json
import logging
import types
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import forked  # noqa: E402
import symexplin as sel  # noqa: E402
from networks import strong  # noqa: E402
from training import SELSGD, assert_same_bits, same  # noqa: E402

CONFIG = strong("paper")


def tiny(dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False}
    return transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**sizes, **heads), dtype=dtype)


def rows(count=64):
    starts = torch.randint(0, 32, (count, 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(10)) % 32]


def arguments(folder, **changes):
    settings = {
        **{"output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 3e-3},
        **{"weight_decay": 0.1, "adam_beta1": 0.8, "adam_epsilon": 1e-6, "max_grad_norm": 0.5, "warmup_steps": 2},
        **{"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True},
        "train_sampling_strategy": "sequential",
    }
    return transformers.TrainingArguments(**{**settings, **changes})


def trainer(args, model=None, setup=None, config=CONFIG, callbacks=(), **more):
    given = setup if setup is not None else sel.hf.setup(args, config, callbacks=callbacks)
    model = {} if "model_init" in more else {"model": model or tiny()}
    return transformers.Trainer(train_dataset=rows(), **model, **given, **more)


class Seen(transformers.TrainerCallback):
    """The logs that a callback sees, and a way to break a run off in the midst of a step."""

    def __init__(self, breaks_at=None):
        self.breaks_at, self.logs = breaks_at, []

    def on_step_begin(self, args, state, control, **kwargs):  # noqa: ARG002
        if state.global_step + 1 == self.breaks_at:
            raise KeyboardInterrupt

    def on_log(self, args, state, control, logs, **kwargs):  # noqa: ARG002
        self.logs.append(dict(logs))


def losses(history):
    return [record["loss"] for record in history if "loss" in record]


def settings_of(run, *keys):
    """The settings of the groups of a Trainer's optimizer, each once."""
    return {tuple(group[key] for key in keys) for group in run.optimizer.param_groups}


def decays(run):
    groups = run.optimizer.param_groups
    return {name: group["weight_decay"] for group in groups for name in group["param_names"]}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_takes_the_very_steps_of_a_plain_loop(tmp_path, accumulation):
    batches = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    run = trainer(arguments(tmp_path, **batches))
    run.train()
    model, data, expected = tiny(), rows(), []
    undecayed = [name for name, _ in model.named_parameters() if name.endswith("bias") or "norm" in name]
    groups = sel.param_groups(model, lr=3e-3, weight_decay=0.1, config=CONFIG, no_decay=undecayed)
    optimizer = sel.SELAdamW(groups, betas=(0.8, 0.999), eps=1e-6, total_steps=6, max_grad_norm=0.5)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 6)
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
    for (name, ours), right in zip(run.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-8, msg=name)
    assert settings_of(run, "total_steps") == {(6,)}
    assert decays(run) == {name: 0.0 if name in undecayed else 0.1 for name, _ in model.named_parameters()}


def test_the_number_of_steps_and_the_clipping_norm_are_each_runs_own(tmp_path):
    epochs = {"max_steps": -1, "num_train_epochs": 2, "save_steps": 3, "save_strategy": "steps"}
    run = trainer(arguments(tmp_path, per_device_train_batch_size=16, **epochs))
    run.train()
    assert settings_of(run, "total_steps") == {(8,)}
    saved = str(tmp_path / "checkpoint-6")
    more = trainer(arguments(tmp_path, max_steps=10, per_device_train_batch_size=16, max_grad_norm=0.05))
    more.train(resume_from_checkpoint=saved)
    assert settings_of(more, "total_steps", "steps", "max_grad_norm") == {(10, 10, 0.05)}
    more.args.max_steps = 4
    more.train()  # anneals from the beginning
    assert settings_of(more, "total_steps", "steps") == {(4, 4)}
    with pytest.raises(ValueError, match="state_dict is of another map: beta is "):
        trainer(arguments(tmp_path), config=strong("paper", beta=9)).train(resume_from_checkpoint=saved)


def test_what_is_printed_and_logged(tmp_path, caplog, capsys):
    """The map, the routing once, and figures of training steps alone."""
    run = trainer(arguments(tmp_path, max_steps=2), config=None)
    run.log({"loss": 1.0})
    assert not any(name.startswith("sel/") or name == "grad_norm" for name in run.state.log_history[0])
    with caplog.at_level(logging.INFO, logger="symexplin.hf"):
        run.train()
    assert "map: exp_only, beta 0.9375; width 16\n" in capsys.readouterr().out
    (table,) = [record.getMessage() for record in caplog.records if record.name == "symexplin.hf"]
    assert str(sel.routing(tiny(), lr=3e-3, weight_decay=0.1, no_decay=["*bias", "*norm*"])) in table
    has_figures = ["sel/slope/mean" in record for record in run.state.log_history]
    assert has_figures == [True, True, False]  # the last is a summary


def test_betas_and_eps_are_the_optimizers_own_unless_given(tmp_path):
    """By the arguments, if these are not the Trainer's defaults, or to `setup`, which counts first."""
    own = functools.partial(sel.SELAdamW, betas=(0.9, 0.99))

    def made(changes, **options):
        args = arguments(tmp_path, **{"adam_beta1": 0.9, "adam_epsilon": 1e-8, **changes})
        given = sel.hf.setup(args, CONFIG, optimizer=own, **options)
        group = trainer(args, setup=given).create_optimizer().param_groups[0]
        return group["betas"], group["eps"]

    assert made({}) == ((0.9, 0.99), 1e-8)
    assert made({"adam_beta2": 0.95}) == ((0.9, 0.95), 1e-8)
    assert made({"adam_beta2": 0.95}, betas=(0.5, 0.6), eps=1e-5) == ((0.5, 0.6), 1e-5)
    assert made({"adam_epsilon": 1e-6}) == ((0.9, 0.99), 1e-6)


class Strict(SELSGD):
    """An optimizer that takes no further arguments, as examples/sel_muon.py."""

    def __init__(self, params, momentum=0.9, total_steps=None, max_grad_norm=None):
        super().__init__(params, momentum=momentum, total_steps=total_steps, max_grad_norm=max_grad_norm)


class Passing(sel.SELAdamW):
    """An optimizer that hands further arguments on."""

    def __init__(self, params, mine=1.0, **others):
        super().__init__(params, **others)
        self.mine = mine


RAW_SPACE = r"optimizer must be a subclass of symexplin\.RawSpaceOptimizer, such as SELAdamW, got "
SGD = torch.optim.SGD([torch.zeros(2)])
REFUSED = [  # arguments of setup, and what its error says
    ({"max_grad_norm": 1.0}, r"max_grad_norm must be left to args: TrainingArguments\(max_grad_norm=\.\.\.\)"),
    ({"total_steps": 100}, "total_steps must be left out: the Trainer knows its steps"),
    ({"optimizer": functools.partial(sel.SELAdamW, max_grad_norm=1.0)}, "max_grad_norm must be left to args"),
    ({"optimizer": functools.partial(sel.SELAdamW, lr=1.0)}, r"lr must be an argument of setup.*setup\(args, lr="),
    ({"weigth_decay": 0.1}, "SELAdamW has no argument 'weigth_decay'; did you mean 'weight_decay'"),
    ({"beta": 7.5}, r"SELAdamW .* config=symexplin\.SELConfig\(beta=7\.5\)"),
    ({"fused": True}, "fused must be left out"),
    ({"optimizer": functools.partial(sel.SELAdamW, bettas=(0.9, 0.99))}, "SELAdamW .*'bettas'; did you mean 'betas'"),
    ({"optimizer": Passing, "wieght_decay": 0.1}, "Passing .*'wieght_decay'; did you mean 'weight_decay'"),
    ({"optimizer": Strict, "momentun": 0.9}, "Strict .*'momentun'; did you mean 'momentum'"),
    ({"optimizer": Strict, "nesterov": True}, "Strict has no argument 'nesterov'"),
    ({"optimizer": torch.optim.Adagrad}, RAW_SPACE + "Adagrad$"),
    ({"optimizer": functools.partial(torch.optim.Adagrad, eps=1e-8)}, RAW_SPACE + "Adagrad$"),
    ({"optimizer": sel.SELAdamW(torch.nn.Linear(2, 2))}, RAW_SPACE + "an instance of SELAdamW: pass the class"),
    *(({"optimizer": x}, f"{RAW_SPACE}an instance of {type(x).__name__}$") for x in (SGD, "muon")),
    ({"callbacks": transformers.EarlyStoppingCallback(3)}, "callbacks must be a list, got EarlyStoppingCallback"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_setup_refuses_what_could_not_train(given, message, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message):
        sel.hf.setup(arguments(tmp_path), **given)


def test_setup_refuses_a_wrong_type_of_every_option_by_its_name(tmp_path):
    """So that no run ends at the start of training, on a machine that was waited for."""
    before = torch.get_rng_state()
    names = {*inspect.signature(sel.SELAdamW).parameters, *inspect.signature(sel.hf.setup).parameters}
    for name in names - {"params", "others", "kwargs", "args"}:
        wrong = [object(), "some"] + [{"*": "some"}, [1e-3]] * (name in ("lr", "weight_decay"))
        for value in wrong:
            with pytest.raises(ValueError, match=f"^{name} "):
                sel.hf.setup(arguments(tmp_path), **{name: value})
    for given in ({"betas": 0.9}, {"eps": -1.0}, {"lr": {"*": -1.0}}, {"weight_decay": -0.1}, {"no_decay": [0]}):
        with pytest.raises(ValueError, match=f"^{next(iter(given))} "):
            sel.hf.setup(arguments(tmp_path), **given)
    with pytest.raises(ValueError, match=r"^betas .*0\.9$"):
        sel.hf.setup(arguments(tmp_path), optimizer=functools.partial(sel.SELAdamW, betas=0.9))
    assert torch.equal(torch.get_rng_state(), before)


def test_setup_refuses_other_arguments_than_the_trainers(tmp_path):
    with pytest.raises(ValueError, match=r"args\.optim .* got 'adafactor': remove optim: SEL replaces the optimizer"):
        sel.hf.setup(arguments(tmp_path, optim="adafactor"))
    with pytest.raises(ValueError, match=r"args .* got Qwen3ForCausalLM: the model goes to Trainer\(model=\.\.\.\)"):
        sel.hf.setup(tiny())


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (Strict, {"momentum": 0.5}),
        (SELSGD, {"mine": 2.0}),
        (Passing, {"mine": 2.0, "eps": 1e-6}),
        (lambda *a, **kw: Passing(*a, **kw), {"mine": 2.0}),
    ],
)
def test_optimizers_of_ones_own_get_their_arguments(optimizer, options, tmp_path):
    args = arguments(tmp_path, adam_beta1=0.9, adam_epsilon=1e-8)
    made = trainer(args, setup=sel.hf.setup(args, optimizer=optimizer, **options)).create_optimizer()
    assert {**made.param_groups[0], **vars(made)}.items() >= options.items()


# Arguments of setup, and the name patterns of the parameters without decay.
UNDECAYED = [
    ({}, ("*norm*", "*bias")),
    ({"weight_decay": 0.2}, ("*norm*", "*bias")),
    ({"weight_decay": {"*norm*": 0.5, "*": 0.01}}, ()),
    ({"weight_decay": {"*norm*": 0.5, "*": 0.01}, "no_decay": ["*bias"]}, ("*bias",)),
    ({"no_decay": "vectors"}, ("*norm*", "*bias")),
    ({"no_decay": "usual"}, ("*norm*", "*bias", "*embed_tokens*")),
    ({"no_decay": ()}, ()),
]


@pytest.mark.parametrize(("given", "undecayed"), UNDECAYED)
def test_weight_decay_by_name_is_the_whole_word_and_no_decay_a_word(given, undecayed, tmp_path):
    args = arguments(tmp_path)
    run = trainer(args, setup=sel.hf.setup(args, **given))
    run.create_optimizer()
    decay = given.get("weight_decay", args.weight_decay)
    by_name = decay if isinstance(decay, dict) else {"*norm*": decay, "*": decay}
    for name, found in decays(run).items():
        is_free = any(fnmatch.fnmatch(name, pattern) for pattern in undecayed)
        assert found == (0.0 if is_free else by_name["*norm*" if "norm" in name else "*"]), name


def test_misuse(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    with pytest.raises(ValueError, match="nothing to curve"):
        trainer(args, tiny().requires_grad_(False)).train()
    setup = sel.hf.setup(args)
    other = sel.hf.setup(args, optimizer=lambda groups, **_: torch.optim.AdamW(groups))
    for wrong in ({**setup, "optimizer_cls_and_kwargs": None}, other):
        with pytest.raises(TypeError):
            trainer(args, setup=wrong).train()
    with pytest.raises(TypeError, match="multiple values for keyword argument 'args'"):
        transformers.Trainer(model=tiny(), args=args, **setup)
    with pytest.raises(ValueError, match="args must be the copy that"):
        trainer(args, setup={**setup, "args": args}).train()
    run, state = trainer(arguments(tmp_path)), sel.hf.AcceleratorState._shared_state
    for name, plugin in (("deepspeed_plugins", {"": object()}), ("fsdp_plugin", types.SimpleNamespace(fsdp_version=1))):
        monkeypatch.setitem(state, name, plugin)
        with pytest.raises(ValueError, match="ask for DeepSpeed or FSDP1"):
            run.create_optimizer()
        monkeypatch.setitem(state, name, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_off_and_resumed_it_is_the_uninterrupted_run(dtype, tmp_path):
    """Losses, weights and state to the bit; examples/test_examples.py resumes in other processes."""
    half = dtype == torch.bfloat16  # the default map, with a master copy
    changes = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random"}

    def ended(name, breaks_at=None, resume=None):
        args = arguments(tmp_path / name, **changes)
        run = trainer(args, tiny(dtype), config=None if half else CONFIG, callbacks=[Seen(breaks_at)])
        with pytest.raises(KeyboardInterrupt) if breaks_at else contextlib.nullcontext():
            run.train(resume_from_checkpoint=resume)
        return run

    whole = ended("whole")
    ended("parts", breaks_at=6)
    resumed = ended("parts", resume=True)
    assert losses(resumed.state.log_history) == losses(whole.state.log_history)
    assert_same_bits(resumed.model, whole.model)
    assert same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())
    stored = [value for state in whole.optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in stored} == {torch.float32}
    assert all(("master" in state) == half for state in whole.optimizer.state.values())
    whole.save_model()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", output_loading_info=True, dtype=dtype
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(model(torch.arange(10)[None]).logits, whole.model(torch.arange(10)[None]).logits)


_SHARDED = """if True:
    import json, os, sys, torch
    sys.path.insert(0, sys.argv[1])
    from accelerate_cpu import shard_on_cpus
    from test_hf import arguments, trainer
    shard_on_cpus()
    for resume in (None, os.path.join(sys.argv[2], "checkpoint-4")):
        args = arguments(sys.argv[2], save_strategy="steps", save_steps=2, fsdp=True,
                         fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}, save_total_limit=2)
        run = trainer(args)
        run.train(resume_from_checkpoint=resume)
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
    assert len(histories) == 2
    for history in histories:
        assert [x for pair in history for x in pair] == pytest.approx(whole, rel=1e-4)


# ---- clipping: the optimizer's; what the user passed in stays as it was ----


def state_of(args):
    return dict(vars(args)), args.to_json_string()


def baseline(args):
    """The model after a run of AdamW."""
    run = transformers.Trainer(model=tiny(), args=args, train_dataset=rows())
    run.train()
    return run.model


def test_the_users_arguments_stay_as_they_are_and_every_saved_file_names_their_norm(tmp_path):
    """After a run, after one that breaks off in the midst of a step, and for AdamW with the same arguments."""
    args, seen = arguments(tmp_path, save_strategy="steps", save_steps=2, max_grad_norm=0.01), Seen(breaks_at=4)
    before, expected = state_of(args), baseline(arguments(tmp_path / "other", max_grad_norm=0.01))
    run = trainer(args, callbacks=[seen])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.save_model(tmp_path / "broken")
    assert state_of(args) == before
    assert_same_bits(baseline(args), expected)
    seen.breaks_at = None
    run.train()
    run.save_model(tmp_path / "whole")
    for saved in ("broken", "whole", "checkpoint-2", "checkpoint-6"):
        saved_args = torch.load(tmp_path / saved / "training_args.bin", weights_only=False)
        assert saved_args.to_dict() == args.to_dict()
        assert (type(saved_args), type(saved_args.max_grad_norm)) == (type(args), float)
    saved_args = sel.hf.setup(saved_args)  # trains on with the same norm
    assert trainer(args, setup=saved_args).create_optimizer().param_groups[0]["max_grad_norm"] == 0.01
    assert settings_of(run, "max_grad_norm") == {(0.01,)}
    assert state_of(args) == before


def test_rates_by_name_pattern_another_rule_and_what_is_passed_to_setup_is_copied(tmp_path):
    """Changed between setup and training, it does not count; used again, it is as before."""
    args = arguments(tmp_path, max_steps=1, lr_scheduler_type="constant", warmup_steps=0)
    given = {"callbacks": [Seen()], "no_decay": ["*bias"]}
    given |= {"lr": {"*.mlp.*": 1e-3, "*": 2e-3}, "weight_decay": {"*.mlp.*": 0.2, "*": 0.1}}
    setup = sel.hf.setup(args, CONFIG, optimizer=SELSGD, momentum=0.9, **given)
    for value in given.values():
        value.clear()
    args.weight_decay = 0.3
    for _ in range(2):
        run = trainer(args, setup=setup)
        run.train()
        assert type(run.optimizer.optimizer) is SELSGD
        assert {decay for name, decay in decays(run).items() if name.endswith("bias")} == {0.0}
        rates = {name: group["lr"] for group in run.optimizer.param_groups for name in group["param_names"]}
        assert rates == {name: 1e-3 if "mlp" in name else 2e-3 for name in rates}
        assert settings_of(run, "lr", "weight_decay") == {(1e-3, 0.2), (2e-3, 0.1), (2e-3, 0.0)}
        assert settings_of(run, "momentum", "betas") == {(0.9, (0.8, 0.999))}
        assert any(isinstance(callback, Seen) for callback in run.callback_handler.callbacks)


def test_the_rate_can_be_changed_until_training_starts_and_clipping_between_runs(tmp_path):
    for more in ({}, {"model_init": lambda: tiny()}):  # the optimizer is kept; made anew, as a search does
        run = trainer(arguments(tmp_path, max_steps=1), **more)
        run.args.learning_rate = 1e-3
        for norm, expected in ((2.0, 2.0), (0.0, None), (0.25, 0.25)):
            run.args.max_grad_norm = norm
            run.train()
            assert settings_of(run, "max_grad_norm") == {(expected,)}
            assert run.optimizer.optimizer.defaults["max_grad_norm"] == expected
            assert (run.args.max_grad_norm, type(run.args.max_grad_norm)) == (norm, float)
            assert settings_of(run, "initial_lr") == {(1e-3,)}
            owned = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
            assert owned == {id(p) for p in run.model.parameters()}


# ---- reporters, which the Trainer puts before the callbacks that it is given ----


def test_reporters_get_what_the_console_prints(tmp_path, monkeypatch):
    """One like W&B's, which reads the arguments when training starts."""
    from transformers.integrations import integration_utils

    class Reporter(Seen):
        def on_train_begin(self, args, state, control, **kwargs):  # noqa: ARG002
            self.settings = args.to_sanitized_dict()

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "fake", Reporter)
    own = Seen()
    args = arguments(tmp_path, report_to=["fake"], max_steps=3)
    run = trainer(args, callbacks=[own])
    run.train()
    printed = [{k: v for k, v in record.items() if k != "step"} for record in run.state.log_history]
    assert sum(name.startswith("sel/") for name in printed[0]) > 5
    (reporter,) = [callback for callback in run.callback_handler.callbacks if type(callback) is Reporter]
    assert reporter.logs == own.logs == printed
    assert reporter.settings == args.to_sanitized_dict()
