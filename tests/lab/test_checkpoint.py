import shutil

import pytest

from symexplin.lab.checkpoint import newest, remove_incomplete, save_checkpoint
from symexplin.lab.files import read_json


def save(folder, step, keep=2, text="weights"):
    def write(place):
        (place / "model.safetensors").write_text(text)
        return {"seconds": 1.5}

    save_checkpoint(folder, step, keep, write)
    return newest(folder)[0]


def test_the_newest_stay_and_a_step_is_saved_once(tmp_path):
    for step in (5, 10, 100, 2000):
        path = save(tmp_path, step, keep=2)
    assert [path.name for path in newest(tmp_path)] == ["step-00002000", "step-00000100"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000100", "step-00002000"]
    assert (save(tmp_path, 2000, text="again") / "model.safetensors").read_text() == "weights"
    assert read_json(path / "state.json") == {"step": 2000, "seconds": 1.5}


def test_failures_and_kills_leave_the_earlier_ones(tmp_path):
    path = save(tmp_path, 5)

    def fail(place):
        (place / "model.safetensors").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, 6, 1, fail)
    assert list((tmp_path / "checkpoints").iterdir()) == [path]
    shutil.copytree(path, path.with_name("step-00000006.tmp"))
    assert newest(tmp_path) == [path]
    remove_incomplete(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == [path]
