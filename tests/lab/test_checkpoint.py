import errno
import os
import shutil

import pytest
import safetensors.torch
import torch

from symexplin.lab.checkpoint import load_checkpoint, newest, newest_intact, save_checkpoint, tidy, write_shards
from symexplin.lab.files import file_digest


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
    state = load_checkpoint(path)
    assert (state["step"], state["seconds"]) == (2000, 1.5)


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parts_of_tensors_may_be_views_and_all_files_are_synced(tmp_path, monkeypatch):
    synced, before = [], os.fsync

    def sync(file):
        synced.append(os.fstat(file).st_size)
        before(file)

    tensors = {"weight": torch.randn(30, 4), "step": torch.tensor(3.0)}
    tensors["part"] = tensors["weight"][2:5]

    def write(place):
        write_shards(place, tensors)
        synced.clear()
        return {}

    monkeypatch.setattr(os, "fsync", sync)
    save_checkpoint(tmp_path, 1, 1, write)
    (name, digest), *others = load_checkpoint(newest(tmp_path)[0])["files"].items()
    file = newest(tmp_path)[0] / name
    assert (digest, others) == (file_digest(file), [])
    assert file.stat().st_size in synced
    found = safetensors.torch.load_file(file)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_file_that_cannot_be_read_is_no_damage(tmp_path, monkeypatch):
    """As after ESTALE on a network file system: nothing is deleted."""
    for step in (3, 6):
        save(tmp_path, step)
    before = newest(tmp_path)

    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("symexplin.lab.checkpoint.file_digest", stale)
        with pytest.raises(OSError, match="Stale file handle"):
            tidy(tmp_path, print)
    assert newest(tmp_path) == before
    assert tidy(tmp_path, print)[0] == before[0]
