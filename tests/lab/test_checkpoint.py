import errno
import io
import os
import shutil
import threading

import pytest
import safetensors.torch
import torch

from symexplin.lab import checkpoint as module
from symexplin.lab.checkpoint import CheckpointWriter, load_checkpoint, newest, newest_intact, tidy, write_shards
from symexplin.lab.files import file_digest
from symexplin.lab.parallel import ALONE


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parts_are_those_of_the_call_and_all_of_them_are_synced(tmp_path, monkeypatch):
    changed, synced, before = threading.Event(), [], os.fsync

    def wait(path, mode):
        assert changed.wait(timeout=10)
        return io.FileIO(path, mode)

    def sync(file):
        synced.append(os.fstat(file).st_size)
        before(file)

    monkeypatch.setattr(module, "FileIO", wait)
    monkeypatch.setattr(os, "fsync", sync)
    tensors = {"weight": torch.randn(30, 4), "step": torch.tensor(3.0)}
    tensors["part"] = tensors["weight"][2:5]
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    digests = write_shards(tmp_path, tensors, ALONE)
    for tensor in tensors.values():
        tensor.zero_()
    changed.set()
    ((name, digest),) = digests.result(timeout=10).items()
    assert digest == file_digest(tmp_path / name)
    assert synced == [(tmp_path / name).stat().st_size]
    found = safetensors.torch.load_file(tmp_path / name)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


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
