"""timm's example: the loss falls, and timm's own model loads the weights and classifies."""

import re
from pathlib import Path

from scripts import run
from vision import import_timm

import_timm()

EXAMPLE = Path(__file__).parents[2] / "examples" / "timm_vit.py"


def test_it_trains_and_loads(tmp_path, capsys, monkeypatch):
    options = ("--out", tmp_path, "--steps", 81, "--layer-decay", 0.9)
    printed = run(EXAMPLE, *options, capsys=capsys, monkeypatch=monkeypatch)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert losses[-1] < 0.5 * losses[0]
    assert float(re.search(r"accuracy (\S+)", printed)[1]) > 0.7  # one of four classes
