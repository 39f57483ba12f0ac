import pytest

from symexplin.lab.files import read_json_lines
from symexplin.lab.record import METRICS, TIMING, Recorder


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_a_resumed_record_goes_on_where_its_checkpoint_was(tmp_path):
    with Recorder(tmp_path, tensorboard=True) as recorder:
        recorder.update(1, {"loss": 2.0}, tokens=8)
        recorder.evaluation(1, 3.0, {}, {"seconds": 0.5})
        assert len(read_json_lines(tmp_path / METRICS)) == 2  # on the disk as it is written
        lengths = recorder.sync()
        for step in (2, 3):
            recorder.update(step, {"loss": 2.0 / step}, tokens=8 * step)
        recorder.evaluation(3, 2.5, {"e/mean": 1.0}, {"seconds": 1.0})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4, "lo')  # what a kill leaves
    assert [r["step"] for r in read_json_lines(tmp_path / METRICS)] == [1, 1, 2, 3, 3]
    with Recorder(tmp_path, tensorboard=True, step=1, lengths=lengths) as recorder:
        recorder.update(2, {"loss": 20.0}, tokens=16)
    assert read_json_lines(tmp_path / METRICS) == [
        {"step": 1, "loss": 2.0, "tokens": 8},
        {"step": 1, "eval_loss": 3.0},
        {"step": 2, "loss": 20.0, "tokens": 16},
    ]
    assert read_json_lines(tmp_path / TIMING) == [{"step": 1, "seconds": 0.5}]
    assert events(tmp_path)["loss"] == [(1, 2.0), (2, 20.0)]
    (tmp_path / METRICS).write_bytes(b"{}\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl' is damaged: it has 3 bytes, and \d+ were written"):
        Recorder(tmp_path, lengths=lengths)


def test_without_a_folder_nothing_is_written():
    with Recorder(None, tensorboard=True) as recorder:
        recorder.update(1, {"loss": 1.0}, tokens=0)
        recorder.evaluation(1, 1.0, {}, {})
        assert recorder.sync() == {}
