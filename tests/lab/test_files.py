import csv
import os

import pytest

from symexplin.lab import files
from symexplin.lab.files import format_columns, read_json, read_json_lines, replace_file, write_csv


def test_a_reader_never_sees_half_a_file(tmp_path, monkeypatch):
    """At the moment of the rename the whole content is on disk under another name."""
    path = tmp_path / "a"
    seen = []
    fsync = os.fsync
    monkeypatch.setattr(files.os, "fsync", lambda handle: (seen.append(path.read_bytes()), fsync(handle)))
    path.write_text("old")
    replace_file(path, "naïve")
    replace_file(path, b"\x00\xff")
    assert seen == [b"old", "naïve".encode()]
    assert path.read_bytes() == b"\x00\xff"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_whole_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_damaged_json_is_named(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"x.json' is damaged"):
        read_json(path)


def test_damaged_lines_are_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n{"step": 3}\n{"step": 4')  # a kill may leave the last line incomplete
    assert read_json_lines(path) == [{"step": 1}, {"step": 3}]
    path.write_text('{"step": 1}\n{"st\n')
    with pytest.raises(ValueError, match=r"x.jsonl' is damaged: line 2 is not JSON"):
        read_json_lines(path)


def test_rows_come_back_to_seven_digits(tmp_path):
    file = tmp_path / "rows.csv"
    rows = [{"name": 'a, "b"\nc', "n": 123456789, "x": 123.456789012}, {"name": None, "n": True, "x": 1.23456789e-9}]
    write_csv(file, rows)
    with file.open(newline="") as lines:
        found = list(csv.DictReader(lines))
    assert [row["name"] for row in found] == ['a, "b"\nc', ""]
    assert [row["n"] for row in found] == ["123456789", "True"]
    assert [row["x"] for row in found] == ["123.4568", "1.234568e-09"]
    write_csv(file, [])
    assert file.read_text() == ""


def test_columns_are_aligned():
    rows = [("name", "kind", "loss"), ("a", "b", "10.25")]
    assert format_columns(rows) == "name  kind   loss\na        b  10.25"
