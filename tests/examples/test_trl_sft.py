"""TRL's example: the loss falls, nobody but the optimizer clips, and stock code loads the model and answers."""

import re
from pathlib import Path

import pytest

from scripts import run

pytest.importorskip("trl")
accelerate = pytest.importorskip("accelerate")

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_sft.py"


def test_it_trains_clips_once_and_loads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    clip, limits = accelerate.Accelerator.clip_grad_norm_, set()
    monkeypatch.setattr(
        accelerate.Accelerator,
        "clip_grad_norm_",
        lambda self, parameters, limit, *rest: (limits.add(limit), clip(self, parameters, limit, *rest))[1],
    )
    printed = run(EXAMPLE, "--out", tmp_path, "--steps", 50, "--cpu", capsys=capsys, monkeypatch=monkeypatch)
    assert limits == {float("inf")}  # the trainer measures the norm
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", printed)]
    assert len(losses) == 5
    assert losses[-1] < 0.7 * losses[0]
    assert re.search(r"answer: 3 \+ 4 =", printed)
