"""The example of a plain loop, run as a user runs it."""

import re
from pathlib import Path

import torch
from torch import nn

import forked

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_loop.py"


def test_it_trains_and_goes_on_from_its_checkpoint(tmp_path):
    lines = [
        (str(EXAMPLE), "--out", str(tmp_path / name), "--steps", steps, "--total-steps", "60")
        for name, steps in (("whole", "60"), ("parts", "30"), ("parts", "60"))
    ]
    printed, first, second = forked.outputs(["torch._dynamo", "symexplin.optim"], [(1, line) for line in lines])
    losses = [float(loss) for loss in re.findall(r"'loss': ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < 0.7 * losses[0]
    assert "20 {" in first
    assert printed.splitlines()[-2:] == second.splitlines()[-2:]  # the figures after 40 and 60 steps
    whole, parts = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    plain = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    plain.load_state_dict(whole)
