"""LoRA's example: the loss falls, the base stays, and the adapter and the merged model compute what was trained."""

import re
from pathlib import Path

import pytest

from scripts import run

pytest.importorskip("peft")

EXAMPLE = Path(__file__).parents[2] / "examples" / "peft_lora.py"


def test_it_trains_merges_and_loads(tmp_path, capsys, monkeypatch):
    printed = run(EXAMPLE, "--out", tmp_path, "--steps", 41, capsys=capsys, monkeypatch=monkeypatch)
    losses = [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", printed)]
    assert losses[-1] < 0.5 * losses[0]
    assert "curved: 28 tensors" in printed  # two factors of seven projections in two blocks
    differences = [float(difference) for difference in re.findall(r"logits differ by (\S+)", printed)]
    assert len(differences) == 2
    assert max(differences) < 1e-4
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert (tmp_path / "merged" / "model.safetensors").exists()
