import sys

import pytest

from symexplin.lab.record import Recorder


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_reads_the_numbers_but_those_after_the_step_resumed_from(tmp_path):
    with Recorder(tmp_path, tensorboard=True) as recorder:
        for step in (1, 2, 3):
            recorder.update(step, {"loss": 2.0 / step, "lr": 0.5}, tokens=0)
    assert events(tmp_path)["loss"] == [(1, 2.0), (2, 1.0), (3, pytest.approx(2 / 3))]
    with Recorder(tmp_path, tensorboard=True, step=1) as recorder:
        recorder.update(2, {"loss": 20.0}, tokens=0)
    assert events(tmp_path)["loss"] == [(1, 2.0), (2, 20.0)]


def test_without_a_folder_nothing_is_written():
    with Recorder(None, tensorboard=True) as recorder:
        recorder.update(1, {"loss": 1.0}, tokens=0)
        recorder.evaluation(1, {"eval_loss": 1.0}, {}, {})
        assert recorder.sync() == {}


def test_a_missing_tensorboard_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard, or add --no-tensorboard"):
        Recorder(tmp_path, tensorboard=True)
