"""Accelerate's example runs sharded and whole: the same losses, and the same again after a resume."""

import re
from pathlib import Path

import pytest
import torch

import forked

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TESTS = Path(__file__).parents[1]
EXAMPLE = TESTS.parent / "examples" / "accelerate_fsdp2.py"
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def command(folder, *options, steps, sharded=True):
    script = [str(TESTS / "accelerate_cpu.py"), str(EXAMPLE)] if sharded else [str(EXAMPLE)]
    return [*script, "--steps", str(steps), "--total-steps", "12", "--output", str(folder), "--cpu", *options]


def run(*commands):
    """Return the (loss, norm) of each step of each run of two processes."""
    said = forked.outputs(forked.TRAINER, [(2, line) for line in commands])
    for line, text in zip(commands, said, strict=True):
        assert f"{'FSDP' if str(EXAMPLE) == line[1] else 'MULTI_CPU'}: saved and loaded" in text
    found = (re.findall(r"loss (\S+) raw gradient norm (\S+)", text) for text in said)
    return [[tuple(map(float, pair)) for pair in pairs] for pairs in found]


def weights(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()


def test_sharded_and_whole_are_one_trajectory_also_when_resumed(tmp_path):
    whole, first, rest = run(
        command(tmp_path / "whole", steps=12, sharded=False),
        command(tmp_path / "sharded", steps=5),
        command(tmp_path / "sharded", "--resume", steps=12),
    )
    assert len(whole) == 12
    assert whole[-1][0] < 0.95 * whole[0][0]
    assert len(first) == 5
    assert sum(first + rest, ()) == pytest.approx(sum(whole, ()), rel=1e-4)
    for name, value in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(tmp_path / "sharded")[name], value, rtol=1e-3, atol=1e-5, msg=name)
