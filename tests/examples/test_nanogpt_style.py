"""nanoGPT's loop: the loss falls, and a run that stopped while it saved continues to the same bits."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts import run

transformers = pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "nanogpt_style.py"


def test_it_trains_and_continues_after_a_stop_in_the_midst_of_a_save(tmp_path, capsys, monkeypatch):
    def start(name):
        return run(EXAMPLE, "--out", tmp_path / name, "--steps", 45, capsys=capsys, monkeypatch=monkeypatch)

    whole = start("whole")
    losses = [float(loss) for loss in re.findall(r"val loss (\S+)", whole)]
    assert len(losses) == 3  # after 20, 40 and 45 steps
    assert losses[-1] < 0.95 * losses[0] < 4.2  # log(vocabulary) is 4.3

    save, calls = torch.save, []

    def broken(state, path):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        save(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", broken)
        with pytest.raises(KeyboardInterrupt):
            start("parts")
    assert start("parts").splitlines() == whole.splitlines()[1:]  # from step 20, the last whole checkpoint
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    loaded, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not any(report.values())
    assert loaded.config.n_embd == 64
