"""Hugging Face's Trainer by its recipe: the steps of a plain loop, resumed to the same bits, sharded, in a search."""

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import forked  # noqa: E402
import symexplin as sel  # noqa: E402
from networks import strong  # noqa: E402
from scripts import load  # noqa: E402
from training import assert_same_bits, same  # noqa: E402

CONFIG = strong("paper")
Steps = load(Path(__file__).parents[2] / "examples" / "hf_trainer.py").Steps


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
        **{"weight_decay": 0.1, "max_grad_norm": 0.0, "warmup_steps": 2, "logging_steps": 1, "save_strategy": "no"},
        **{"report_to": "none", "disable_tqdm": True, "use_cpu": True, "train_sampling_strategy": "sequential"},
    }
    return transformers.TrainingArguments(**{**settings, **changes})


def trainer(args, **more):
    """The recipe of the page and the example."""

    def optimizer(model):
        rates = {"lr": run.args.learning_rate, "weight_decay": run.args.weight_decay, "no_decay": "vectors"}
        return sel.SELAdamW(model, **rates, config=CONFIG, max_grad_norm=0.5, total_steps="later")

    given = {"model": tiny(), "args": args, "train_dataset": rows(), "callbacks": [Steps()]} | more
    if "model_init" in given:
        del given["model"]
    run = transformers.Trainer(**given, optimizer_cls_and_kwargs=(lambda: optimizer, {}))
    return run


def losses(run):
    return [record["loss"] for record in run.state.log_history if "loss" in record]


def test_the_trainer_takes_the_steps_of_a_plain_loop(tmp_path):
    run = trainer(arguments(tmp_path))
    run.train()
    model, data, expected = tiny(), rows(), []
    undecayed = [name for name, _ in model.named_parameters() if name.endswith("bias") or "norm" in name]
    settings = {"lr": 3e-3, "weight_decay": 0.1, "config": CONFIG, "no_decay": undecayed}
    optimizer = sel.SELAdamW(model, **settings, total_steps=6, max_grad_norm=0.5)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 6)
    for step in range(6):
        ids = torch.stack([row["input_ids"] for row in data[4 * step : 4 * step + 4]])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
        assert float(optimizer.grad_norm) > 0.5  # it is clipped
    assert losses(run) == pytest.approx(expected, rel=1e-6)
    for (name, ours), right in zip(run.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_off_and_resumed_it_is_the_uninterrupted_run(dtype, tmp_path):
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
