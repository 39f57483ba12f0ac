import csv

import pytest

from symexplin.lab.tables import format_columns, write_csv


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
