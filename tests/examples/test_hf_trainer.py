"""The Trainer's example runs, resumes, and runs in two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forked

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer.py"


def losses_of(text):
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", text, re.MULTILINE)]


def test_it_trains_and_resumes(tmp_path):
    commands = [(str(EXAMPLE), "--output", str(tmp_path), "--cpu", "--steps", steps) for steps in ("16", "20")]
    said = forked.outputs(
        ["torch._dynamo", "transformers", "accelerate"], [(1, commands[0]), (1, (*commands[1], "--resume"))]
    )
    losses, resumed = map(losses_of, said)
    assert len(losses) == 16
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "model.safetensors").exists()
    assert len(resumed) == 20
    assert resumed[:16] == losses


@pytest.mark.distributed
def test_two_processes_train_together(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    command += ["--steps", "8", "--output", str(tmp_path), "--cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    losses = losses_of(done.stdout)
    assert len(losses) == 8
    assert losses[-1] < losses[0]
