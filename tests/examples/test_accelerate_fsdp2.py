"""Accelerate's example runs sharded and whole: the same losses, and the same again after a resume."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TESTS = Path(__file__).parents[1]
EXAMPLE = TESTS.parent / "examples" / "accelerate_fsdp2.py"
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def run(folder, *options, steps, sharded=True, processes=2):
    script = [str(TESTS / "accelerate_cpu.py"), str(EXAMPLE)] if sharded else [str(EXAMPLE)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [*script, "--steps", str(steps), "--total-steps", "12", "--output", str(folder), "--cpu", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{'FSDP' if sharded else 'MULTI_CPU'}: saved and loaded" in done.stdout
    return [tuple(map(float, pair)) for pair in re.findall(r"loss (\S+) raw gradient norm (\S+)", done.stdout)]


def weights(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()


def test_sharded_and_whole_are_one_trajectory_also_when_resumed(tmp_path):
    whole = run(tmp_path / "whole", steps=12, sharded=False)
    assert len(whole) == 12
    assert whole[-1][0] < 0.95 * whole[0][0]
    sharded = run(tmp_path / "sharded", steps=5) + run(tmp_path / "sharded", "--resume", steps=12)
    assert sum(sharded, ()) == pytest.approx(sum(whole, ()), rel=1e-4)
    for name, value in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(tmp_path / "sharded")[name], value, rtol=1e-3, atol=1e-5, msg=name)
