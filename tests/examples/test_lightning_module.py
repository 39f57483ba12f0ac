"""The example of a LightningModule, run as a user runs it; `tests/test_lightning.py` has what it must do."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_module.py"


def test_it_trains(tmp_path):
    pytest.importorskip("lightning")
    command = [sys.executable, str(EXAMPLE), "--out", str(tmp_path), "--epochs", "12"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout.split()[-1]) < 0.5  # 0.81 after the first epoch
    assert (tmp_path / "last.ckpt").exists()
