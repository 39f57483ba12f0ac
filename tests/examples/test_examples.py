"""The examples, as a user runs them: losses fall, runs go on where they stopped, stock code loads what they save."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import forked
from scripts import run, stop_at_second

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


def test_plain_loop(tmp_path):
    lines = [
        (str(EXAMPLES / "plain_loop.py"), "--out", str(tmp_path / name), "--steps", steps, "--total-steps", "60")
        for name, steps in (("whole", "60"), ("parts", "30"), ("parts", "60"))
    ]
    printed, first, second = forked.outputs(["torch._dynamo", "symexplin.optim"], [(1, line) for line in lines])
    losses = numbers(r"'loss': ([\d.]+)", printed)
    assert len(losses) == 3
    assert losses[-1] < 0.7 * losses[0]
    assert "20 {" in first
    assert printed.splitlines()[-2:] == second.splitlines()[-2:]  # the figures after 40 and 60 steps
    whole, parts = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "parts"))
    assert_same_bits(whole, parts)
    plain = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    plain.load_state_dict(whole)


def test_nanogpt_style_resumes_after_a_stop_in_the_midst_of_a_save(example, resumed, tmp_path):
    transformers = pytest.importorskip("transformers")
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
def test_nanogpt_style_on_two_processes_and_in_half_precision(tmp_path):
    pytest.importorskip("transformers")

    def job(processes, name, *more, steps="8"):
        return processes, (str(EXAMPLES / "nanogpt_style.py"), "--out", str(tmp_path / name), "--steps", steps, *more)

    half = ("--dtype", "bfloat16"), ("--dtype", "float16", "--optimizer", "adamw")
    jobs = [job(1, "one"), job(2, "two"), *(job(1, more[1], *more) for more in half)]
    jobs += [job(1, "paper", "--optimizer", "paper", steps="20")]
    said = forked.outputs(["torch._dynamo", "transformers.models.gpt2.modeling_gpt2", "symexplin.optim"], jobs)
    losses = [numbers(r"val loss (\S+)", text) for text in said]
    assert [len(printed) for printed in losses] == [1, 1, 1, 1, 1]  # the second process prints nothing
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2:4] == [pytest.approx(losses[0], rel=0.02)] * 2
    assert losses[4][0] < 4.2


def test_peft_lora(example, resumed, tmp_path):
    pytest.importorskip("peft")
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
    accelerator = pytest.importorskip("accelerate").Accelerator
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


@pytest.mark.distributed
@pytest.mark.slow
def test_hf_trainer_and_accelerate_fsdp2(tmp_path):
    """Resumed, and on two processes; Accelerate's sharded and whole runs are one trajectory, also when resumed."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def trainer(name, steps, *more):
        return (str(EXAMPLES / "hf_trainer.py"), "--output", str(tmp_path / name), "--cpu", "--steps", steps, *more)

    def fsdp2(name, steps, *more):
        script = [str(TESTS / "accelerate_cpu.py")] if name == "sharded" else []
        options = ("--steps", steps, "--total-steps", "8", "--output", str(tmp_path / name), "--cpu", *more)
        return [*script, str(EXAMPLES / "accelerate_fsdp2.py"), *options]

    jobs = [(1, trainer("one", "8")), (1, trainer("one", "10", "--resume")), (2, trainer("two", "4"))]
    jobs += [(2, fsdp2("whole", "8")), (2, fsdp2("sharded", "3")), (2, fsdp2("sharded", "8", "--resume"))]
    said = forked.outputs(forked.TRAINER, jobs)
    losses, resumed, together = (numbers(r"^step \d+ loss (\S+)", text) for text in said[:3])
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "one" / "model.safetensors").exists()
    assert (len(resumed), resumed[:8]) == (10, losses)
    assert len(together) == 4
    assert together[-1] < together[0]
    assert ["FSDP: saved and loaded" in text for text in said[3:]] == [False, True, True]
    whole, first, rest = (numbers(r"(?:loss|norm) (\S+)", text) for text in said[3:])
    assert (len(whole), len(first)) == (16, 6)
    assert whole[-2] < 0.95 * whole[0]
    assert first + rest == pytest.approx(whole, rel=1e-4)
    load = transformers.LlamaForCausalLM.from_pretrained
    weights = load(tmp_path / "sharded").state_dict()
    for name, value in load(tmp_path / "whole").state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5, msg=name)
