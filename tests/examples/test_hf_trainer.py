"""The Trainer's example runs, resumes, and runs in two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer.py"


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", done.stdout, re.MULTILINE)]


def test_it_trains_and_resumes(tmp_path):
    options = ["--output", str(tmp_path), "--cpu"]
    losses = run(str(EXAMPLE), "--steps", "16", *options)
    assert len(losses) == 16
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "model.safetensors").exists()
    assert run(str(EXAMPLE), "--steps", "20", "--resume", *options)[:16] == losses


@pytest.mark.distributed
def test_two_processes_train_together(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = run(*torchrun, str(EXAMPLE), "--steps", "8", "--output", str(tmp_path), "--cpu")
    assert len(losses) == 8
    assert losses[-1] < losses[0]
