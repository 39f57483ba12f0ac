import shutil

import pytest

from symexplin.lab.checkpoint import CheckpointWriter, load_checkpoint, newest, newest_intact, tidy


def save(folder, step, keep=2, text="weights"):
    def write(place):
        (place / "model.safetensors").write_text(text)
        return {"seconds": 1.5}, None

    CheckpointWriter(folder, keep).begin(step, write)
    return newest(folder)[0]


def test_the_newest_stay_and_a_step_is_saved_once(tmp_path):
    for step in (5, 10, 100, 2000):
        path = save(tmp_path, step, keep=2)
    assert [path.name for path in newest(tmp_path)] == ["step-00002000", "step-00000100"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000100", "step-00002000"]
    assert (save(tmp_path, 2000, text="again") / "model.safetensors").read_text() == "weights"
    state = load_checkpoint(path)
    assert (state["step"], state["seconds"]) == (2000, 1.5)


def test_failures_and_kills_leave_the_earlier_ones(tmp_path):
    path = save(tmp_path, 5)

    def fail(place):
        (place / "model.safetensors").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        CheckpointWriter(tmp_path, keep=1).begin(6, fail)
    assert list((tmp_path / "checkpoints").iterdir()) == [path]
    shutil.copytree(path, path.with_name("step-00000006.tmp"))
    assert newest(tmp_path) == [path]
    assert tidy(tmp_path, print)[0] == path
    assert list((tmp_path / "checkpoints").iterdir()) == [path]


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
@pytest.mark.parametrize("gone", [True, False])
def test_damage_is_noticed(tmp_path, name, gone):
    file = save(tmp_path, 10) / name
    if gone:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes().replace(b"1.5", b"1.7").replace(b"weights", b"wrights"))
    with pytest.raises(ValueError, match=rf"step-00000010 is damaged: .*{name}"):
        load_checkpoint(file.parent)


def test_the_newest_intact_one_is_found_and_written_again(tmp_path):
    assert newest_intact(tmp_path, print) is None
    paths = [save(tmp_path, step, keep=9) for step in (5, 10, 15, 20)]
    for path in paths[2:]:
        (path / "model.safetensors").write_text("harmed")
    lines = []
    found, state = newest_intact(tmp_path, lines.append)
    assert (found, state["step"]) == (paths[1], 10)
    assert ["step-00000020" in lines[0], "step-00000015" in lines[1], len(lines)] == [True, True, 2]
    assert tidy(tmp_path, lines.append)[0] == found
    assert newest(tmp_path) == [paths[1], paths[0]]
    assert (save(tmp_path, 15, text="again") / "model.safetensors").read_text() == "again"
    for path in newest(tmp_path):
        (path / "state.json").unlink()
    with pytest.raises(ValueError, match=r"all checkpoints in .* are damaged: remove that folder to start"):
        newest_intact(tmp_path, lines.append)
