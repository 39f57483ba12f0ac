from pathlib import Path

import pytest

from symexplin.lab.files import replace_file


def test_writes_text_and_bytes(tmp_path):
    path = tmp_path / "file"
    replace_file(path, "größer")
    assert path.read_bytes() == "größer".encode()
    replace_file(str(path), b"\0\1")
    assert path.read_bytes() == b"\0\1"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace_file(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        replace_file(path, "new")
    assert path.read_text() == "old"


def test_a_failed_move_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace_file(path, "old")

    def fail(self, target):
        raise OSError(f"cannot move {self} to {target}")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="cannot move"):
        replace_file(path, "new")
    assert path.read_text() == "old"
