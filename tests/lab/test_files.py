import csv
import os

import pytest

from symexplin.lab import files
from symexplin.lab.files import JsonLines, format_columns, read_json, read_json_lines, replace_file, write_csv


def test_writes_text_and_bytes(tmp_path):
    replace_file(tmp_path / "a", "naïve")
    replace_file(tmp_path / "b", b"\x00\xff")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "naïve"
    assert (tmp_path / "b").read_bytes() == b"\x00\xff"
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}


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


def test_a_reader_never_sees_half_a_file(tmp_path, monkeypatch):
    """At the moment of the rename the whole content is on disk under another name."""
    path = tmp_path / "a"
    path.write_text("old")
    seen = []
    fsync = os.fsync
    monkeypatch.setattr(files.os, "fsync", lambda handle: (seen.append(path.read_text()), fsync(handle)))
    replace_file(path, "new")
    assert seen == ["old"]
    assert path.read_text() == "new"


def test_lines_are_on_disk_as_they_are_written(tmp_path):
    with JsonLines(tmp_path / "a") as lines:
        lines.write(step=1, loss=0.1)
        assert read_json_lines(tmp_path / "a") == [{"step": 1, "loss": 0.1}]
        lines.write(step=2)
        assert lines.length == (tmp_path / "a").stat().st_size


def test_lines_go_on_after_a_length(tmp_path):
    path = tmp_path / "a"
    with JsonLines(path) as lines:
        lines.write(step=1)
        length = lines.length
        lines.write(step=2)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')  # what a kill leaves
    assert [r["step"] for r in read_json_lines(path)] == [1, 2]
    with JsonLines(path, length) as lines:
        lines.write(step=2, again=True)
    assert read_json_lines(path) == [{"step": 1}, {"step": 2, "again": True}]


def test_a_file_shorter_than_was_written_is_damaged(tmp_path):
    path = tmp_path / "a"
    with JsonLines(path) as lines:
        lines.write(step=1)
    with pytest.raises(ValueError, match="is damaged: it has 12 bytes, and 13 were written"):
        JsonLines(path, 13)
    assert read_json_lines(path) == [{"step": 1}]


def test_not_a_number_is_refused(tmp_path):
    with JsonLines(tmp_path / "a") as lines, pytest.raises(ValueError, match="JSON"):
        lines.write(loss=float("nan"))
    assert (tmp_path / "a").read_bytes() == b""


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_damaged_json_is_named(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"x.json' is damaged"):
        read_json(tmp_path / "x.json")


def test_rows_come_back_to_seven_digits(tmp_path):
    file = tmp_path / "rows.csv"
    rows = [{"name": 'a, "b"\nc', "n": 123456789, "x": 123.456789012}, {"name": None, "n": True, "x": 1.23456789e-9}]
    write_csv(file, rows)
    with file.open(newline="") as lines:
        found = list(csv.DictReader(lines))
    assert [row["name"] for row in found] == ['a, "b"\nc', ""]
    assert [row["n"] for row in found] == ["123456789", "True"]
    assert [row["x"] for row in found] == ["123.4568", "1.234568e-09"]


def test_rows_with_other_keys_leave_the_old_file(tmp_path):
    file = tmp_path / "rows.csv"
    write_csv(file, [{"a": 1}])
    with pytest.raises(ValueError, match="b"):
        write_csv(file, [{"a": 1}, {"b": 2}])
    assert file.read_text() == "a\n1\n"
    write_csv(file, [])
    assert file.read_text() == ""
    assert list(tmp_path.iterdir()) == [file]


def test_columns_are_aligned():
    rows = [("name", "kind", "loss"), ("a", "b", "10.25")]
    assert format_columns(rows, left=2, gap=" ") == "name kind  loss\na    b    10.25"
    assert format_columns(rows, left=3).splitlines()[0] == "name  kind  loss"  # nothing after the last cell
