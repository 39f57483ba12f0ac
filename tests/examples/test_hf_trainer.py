"""The Trainer's example runs, resumes, and runs in two processes."""

import re
from pathlib import Path

import pytest

import forked

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer.py"


def losses_of(text):
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", text, re.MULTILINE)]


@pytest.mark.distributed
def test_it_trains_and_resumes_and_two_processes_train_together(tmp_path):
    one, two = ((str(EXAMPLE), "--output", str(tmp_path / name), "--cpu", "--steps") for name in ("one", "two"))
    jobs = [(1, (*one, "16")), (1, (*one, "20", "--resume")), (2, (*two, "8"))]
    said = forked.outputs(forked.TRAINER, jobs)
    losses, resumed, together = map(losses_of, said)
    assert len(losses) == 16
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "one" / "model.safetensors").exists()
    assert len(resumed) == 20
    assert resumed[:16] == losses
    assert len(together) == 8
    assert together[-1] < together[0]
