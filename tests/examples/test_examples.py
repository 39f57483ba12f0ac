"""The examples, as a user runs them: losses fall, runs go on where they stopped, stock code loads what they save."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
pytest.importorskip("peft")

import forked  # noqa: E402
from scripts import run, stop_at_second  # noqa: E402

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"


@pytest.fixture
def example(capsys, monkeypatch):
    """Run an example in this process; return what it printed."""
    return lambda name, *options: run(EXAMPLES / name, *options, capsys=capsys, monkeypatch=monkeypatch)


@pytest.fixture
def resumed(example, monkeypatch):
    """Stop an example in the midst of its second save, and start it again; return what it printed then."""

    def twice(*command):
        with monkeypatch.context() as patch:
            stop_at_second(patch, torch, "save")
            with pytest.raises(KeyboardInterrupt):
                example(*command)
        return example(*command)

    return twice


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern, text, re.MULTILINE)]


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A folder and what each job printed; all are forked from one process, which has imported what is slow."""
    folder = tmp_path_factory.mktemp("jobs")

    def job(processes, example, name, *options, launcher=()):
        out = ("--cpu", "--output") if example in ("hf_trainer.py", "accelerate_fsdp2.py") else ("--out",)
        return processes, (*launcher, str(EXAMPLES / example), *out, str(folder / name), *options)

    def loop(name, steps):
        return job(1, "plain_loop.py", name, "--steps", steps, "--total-steps", "60")

    def gpt(processes, name, *options, steps="8"):
        return job(processes, "nanogpt_style.py", name, "--steps", steps, *options)

    def trainer(*options):
        return job(1, "hf_trainer.py", "trainer", "--steps", *options)

    def fsdp2(name, *options, **launcher):
        return job(2, "accelerate_fsdp2.py", name, "--total-steps", "8", "--steps", *options, **launcher)

    sharded = {"launcher": (str(TESTS / "accelerate_cpu.py"),)}
    lines = {
        **{"loop": loop("loop", "60"), "loop, first": loop("parts", "30"), "loop, second": loop("parts", "60")},
        **{"gpt": gpt(1, "one"), "two gpts": gpt(2, "two"), "bfloat16": gpt(1, "half", "--dtype", "bfloat16")},
        "float16": gpt(1, "less", "--dtype", "float16", "--optimizer", "adamw"),
        "paper": gpt(1, "paper", "--optimizer", "paper", steps="20"),
        **{"trainer": trainer("8"), "trainer, resumed": trainer("10", "--resume"), "whole": fsdp2("whole", "8")},
        "sharded": fsdp2("sharded", "3", **sharded),
        "sharded, resumed": fsdp2("sharded", "8", "--resume", **sharded),
    }
    modules = [*forked.TRAINER, "transformers.models.gpt2.modeling_gpt2"]
    return folder, dict(zip(lines, forked.outputs(modules, list(lines.values())), strict=True))


def test_plain_loop(jobs):
    folder, said = jobs
    losses = numbers(r"'loss': ([\d.]+)", said["loop"])
    assert len(losses) == 3
    assert losses[-1] < 0.7 * losses[0]
    assert "20 {" in said["loop, first"]
    assert said["loop"].splitlines()[-2:] == said["loop, second"].splitlines()[-2:]  # the figures after 40 and 60 steps
    whole, parts = (torch.load(folder / name / "model.pt", weights_only=True) for name in ("loop", "parts"))
    assert_same_bits(whole, parts)
    plain = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    plain.load_state_dict(whole)


def test_nanogpt_style_resumes_after_a_stop_in_the_midst_of_a_save(example, resumed, tmp_path):
    whole = example("nanogpt_style.py", "--out", tmp_path / "whole", "--steps", 45)
    losses = numbers(r"val loss (\S+)", whole)
    assert len(losses) == 3  # after 20, 40 and 45 steps
    assert losses[-1] < 0.95 * losses[0] < 4.2  # log(vocabulary) is 4.3
    parts = resumed("nanogpt_style.py", "--out", tmp_path / "parts", "--steps", 45)
    assert parts.splitlines() == whole.splitlines()[1:]  # from step 20, the last whole checkpoint
    assert_same_bits(*(load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts")))
    loaded, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not any(report.values())
    assert loaded.config.n_embd == 64


@pytest.mark.distributed
def test_nanogpt_style_on_two_processes_and_in_half_precision(jobs):
    kinds = ("gpt", "two gpts", "bfloat16", "float16", "paper")
    losses = [numbers(r"val loss (\S+)", jobs[1][kind]) for kind in kinds]
    assert [len(printed) for printed in losses] == [1, 1, 1, 1, 1]  # the second process prints nothing
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2:4] == [pytest.approx(losses[0], rel=0.02)] * 2
    assert losses[4][0] < 4.2


def test_peft_lora(example, resumed, tmp_path):
    printed = example("peft_lora.py", "--out", tmp_path, "--steps", 41)
    parts = resumed("peft_lora.py", "--out", tmp_path / "parts", "--steps", 41)
    assert numbers(r"loss (\S+)", parts) == numbers(r"loss (\S+)", printed)[1:]
    assert_same_bits(*(load_file(path / "merged" / "model.safetensors") for path in (tmp_path, tmp_path / "parts")))
    losses = numbers(r"step \d+ loss (\S+)", printed)
    assert losses[-1] < 0.5 * losses[0]
    assert "curved: 28 tensors" in printed  # two factors of seven projections in two blocks
    differences = numbers(r"logits differ by (\S+)", printed)
    assert len(differences) == 2
    assert max(differences) < 1e-4
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert (tmp_path / "merged" / "model.safetensors").exists()


def test_trl_sft_clips_once(example, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    accelerator = accelerate.Accelerator
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    measure = accelerator.clip_grad_norm_

    def seen(self, parameters, limit, *rest):
        assert limit == float("inf")  # the trainer measures the norm
        return measure(self, parameters, limit, *rest)

    monkeypatch.setattr(accelerator, "clip_grad_norm_", seen)
    printed = example("trl_sft.py", "--out", tmp_path, "--steps", 50, "--cpu")
    losses = numbers(r"'loss': '([\d.]+)'", printed)
    assert len(losses) == 5
    assert losses[-1] < 0.7 * losses[0]
    assert re.search(r"answer: 3 \+ 4 =", printed)


@pytest.mark.slow
def test_hf_trainer_resumes(jobs):
    folder, said = jobs
    losses, resumed = (numbers(r"^step \d+ loss (\S+)", said[name]) for name in ("trainer", "trainer, resumed"))
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0]
    assert (folder / "trainer" / "model.safetensors").exists()
    assert (len(resumed), resumed[:8]) == (10, losses)


@pytest.mark.distributed
def test_accelerates_sharded_and_whole_runs_are_one_trajectory_also_when_resumed(jobs):
    folder, said = jobs
    names = ("whole", "sharded", "sharded, resumed")
    assert ["FSDP: saved and loaded" in said[name] for name in names] == [False, True, True]
    whole, first, rest = (numbers(r"(?:loss|norm) (\S+)", said[name]) for name in names)
    assert (len(whole), len(first)) == (16, 6)
    assert whole[-2] < 0.95 * whole[0]
    assert first + rest == pytest.approx(whole, rel=1e-4)
    load = transformers.LlamaForCausalLM.from_pretrained
    weights = load(folder / "sharded").state_dict()
    for name, value in load(folder / "whole").state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5, msg=name)
