"""The recipe for Hugging Face's Trainer, as its page has it: a plain loop's steps, resumed, sharded, in a search."""

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import forked  # noqa: E402
import symexplin as sel  # noqa: E402
from fenced import blocks  # noqa: E402
from networks import strong  # noqa: E402
from training import assert_same_bits, same  # noqa: E402

CONFIG = strong("paper")
RECIPE, DECAY, LOGGING = blocks(Path(__file__).parents[2] / "docs" / "how-to" / "trainers.md", "python")[:3]


def tiny(dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False}
    return transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**sizes, **heads), dtype=dtype)


def rows(count=64):
    starts = torch.randint(0, 32, (count, 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(10)) % 32]


def arguments(folder, **changes):
    return {
        **{"output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 3e-3},
        **{"warmup_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
        **{"use_cpu": True, "train_sampling_strategy": "sequential"},
        **changes,
    }


def trainer(changes, kind=transformers.Trainer, **more):
    """The page's trainer, with other arguments, and a function of the model if `more` has one."""

    def make(model, **given):
        return kind(**given | ({} if "model_init" in more else {"model": model}) | more)

    names = {
        **{"sel": sel, "config": CONFIG, "model": tiny(), "data": rows(), "Trainer": make},
        "TrainingArguments": lambda **given: transformers.TrainingArguments(**given | changes),
        "TrainerCallback": transformers.TrainerCallback,
    }
    exec(RECIPE, names)
    return names["trainer"]


def losses(run):
    return [record["loss"] for record in run.state.log_history if "loss" in record]


def test_the_trainer_takes_the_steps_of_a_plain_loop(tmp_path):
    run = trainer(arguments(tmp_path))
    run.train()
    model, data, expected = tiny(), rows(), []
    undecayed = [name for name, _ in model.named_parameters() if name.endswith("bias") or "norm" in name]
    settings = {"lr": 3e-3, "weight_decay": 0.1, "config": CONFIG, "no_decay": undecayed}
    optimizer = sel.SELAdamW(model, **settings, total_steps=6, max_grad_norm=1.0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 6)
    for step in range(6):
        ids = torch.stack([row["input_ids"] for row in data[4 * step : 4 * step + 4]])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
        assert float(optimizer.grad_norm) > 1.0  # it is clipped
    assert losses(run) == pytest.approx(expected, rel=1e-6)
    norm = float(run.optimizer.optimizer.grad_norm)  # smaller if the Trainer had clipped before
    assert norm == pytest.approx(float(optimizer.grad_norm), rel=1e-5)
    for (name, ours), right in zip(run.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_from_a_checkpoint_it_is_the_uninterrupted_run(dtype, tmp_path):
    whole = trainer(arguments(tmp_path / "whole"), model=tiny(dtype))
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer(arguments(tmp_path / "parts", **saving), model=tiny(dtype)).train()
    resumed = trainer(arguments(tmp_path / "parts"), model=tiny(dtype))
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.add_(1.0)  # the checkpoint has the weights
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert losses(resumed)[3:] == losses(whole)[3:]
    assert_same_bits(resumed.model, whole.model)
    assert same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())
    whole.save_model()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=dtype)
    assert_same_bits(loaded, whole.model)


def test_a_model_of_a_function_trains_alike_each_time(tmp_path):
    run, expected = trainer(arguments(tmp_path), model_init=lambda: tiny()), trainer(arguments(tmp_path))
    expected.train()
    for _ in range(2):
        run.train()
        assert_same_bits(run.model, expected.model)


def test_a_second_run_of_the_same_model_begins_its_annealing_anew(tmp_path):
    run = trainer(arguments(tmp_path))
    run.train()
    run.train()
    assert "total_steps 6, max_grad_norm 1.0; 6 steps taken" in repr(run.optimizer.optimizer)


def test_a_search_over_the_rate_trains_each_trial_at_its_own(tmp_path):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    run, ends = trainer(arguments(tmp_path), model_init=lambda: tiny(), eval_dataset=rows(8)), {}

    def objective(metrics):
        ends[run.args.learning_rate] = run.model.state_dict()
        return metrics["eval_loss"]

    rates = {"learning_rate": [1e-3, 1e-2]}
    run.hyperparameter_search(
        lambda trial: {name: trial.suggest_categorical(name, values) for name, values in rates.items()},
        compute_objective=objective,
        n_trials=2,
        sampler=optuna.samplers.GridSampler(rates),
    )
    assert set(ends) == {1e-3, 1e-2}
    for rate, weights in ends.items():
        alone = trainer(arguments(tmp_path, learning_rate=rate))
        alone.train()
        assert all(torch.equal(weights[name], value) for name, value in alone.model.state_dict().items())


def test_names_without_decay_are_those_of_the_trainers_adamw(tmp_path):
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    names = {
        "model": model,
        "trainer": transformers.Trainer(model, transformers.TrainingArguments(tmp_path, weight_decay=0.1)),
    }
    exec(DECAY, names)
    optimizer = sel.SELAdamW(model, weight_decay=0.1, no_decay=names["no_decay"])
    ours, theirs = (
        {id(p): group["weight_decay"] > 0.0 for group in groups for p in group["params"]}
        for groups in (optimizer.param_groups, names["trainer"].create_optimizer().param_groups)
    )
    assert ours == theirs


def test_a_reporter_gets_the_raw_norm_and_the_statistics(tmp_path, monkeypatch):
    seen = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):  # noqa: ARG002
            seen.append(dict(logs))

    integrations = transformers.integrations.integration_utils
    monkeypatch.setitem(integrations.INTEGRATION_TO_CALLBACK, "fake", Reporter)
    names = {"sel": sel, "Trainer": transformers.Trainer}
    exec(LOGGING, names)
    run = trainer(arguments(tmp_path, max_steps=2, report_to=["fake"]), kind=names["LoggingTrainer"])
    run.train()
    figures = {"raw_norm": float(run.optimizer.optimizer.grad_norm), **sel.stats(run.model, run.optimizer)}
    assert seen[1].items() >= figures.items()
    assert ["raw_norm" in logs for logs in seen] == [True, True, False]  # the last is a summary


_SHARDED = """if True:
    import json, os, sys, torch
    sys.path[:0] = sys.argv[1:3]
    from accelerate_cpu import shard_on_cpus
    from test_hf_trainer import arguments, losses, trainer
    shard_on_cpus()
    for resume in (None, os.path.join(sys.argv[3], "checkpoint-4")):
        args = arguments(sys.argv[3], save_strategy="steps", save_steps=2, fsdp=True,
                         fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}, save_total_limit=2)
        run = trainer(args)
        run.train(resume_from_checkpoint=resume)
        assert isinstance(next(run.model.parameters()), torch.distributed.tensor.DTensor)
        if run.is_world_process_zero():
            print(json.dumps(losses(run)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_sharded_over_two_processes_it_is_the_same_run_and_resumes(tmp_path):
    script, here = tmp_path / "script.py", Path(__file__).parent
    script.write_text(_SHARDED)
    job = (2, (str(script), str(here.parent), str(here), str(tmp_path)))
    (said,) = forked.outputs(forked.TRAINER, [job])
    run = trainer(arguments(tmp_path, per_device_train_batch_size=8))
    run.train()
    histories = [json.loads(line) for line in said.splitlines() if line.startswith("[")]
    assert len(histories) == 2
    for history in histories:
        assert history == pytest.approx(losses(run), rel=1e-4)
