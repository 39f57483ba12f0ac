from symexplin.lab.data.sources import find_source
from symexplin.lab.data.stdlib import STDLIB, parts_of

SOURCE = '''"""Module text."""
import os  # a remark


class Box:
    """Class text."""


def f(x):
    """Function text.

        indented
    """
    return "a string stays", x


async def g():
    "Alone."
'''


def test_code_and_docstrings_have_nothing_in_common_and_the_code_runs_alike():
    (code,), (docs,) = parts_of([SOURCE], "stdlib-code"), parts_of([SOURCE], "stdlib-docs")
    for words in ("Module text", "Class text", "Function text", "Alone."):
        assert words in docs
        assert words not in code
    assert "remark" not in code + docs
    assert "a string stays" in code
    assert "a string stays" not in docs
    place = {}
    exec(compile(code, "code", "exec"), place)
    assert place["f"](2) == ("a string stays", 2)
    assert list(parts_of([SOURCE], "stdlib")) == [SOURCE]


def test_a_file_that_does_not_parse_is_left_out():
    assert list(parts_of(["print 'old'", "x = 1"], "stdlib-code")) == ["x = 1\n"]
    assert list(parts_of(['"""Only words."""'], "stdlib-code")) == ["\n"]


def test_the_sources_are_the_files_of_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", {"stdlib": tmp_path}.get)
    (tmp_path / "test").mkdir()
    for name in ("a.py", "test/a.py", "a.txt"):
        (tmp_path / name).write_text(SOURCE)
    for name in STDLIB:
        found = list(find_source(name, "text", "train", [])())
        assert found == [text.encode() for text in parts_of([SOURCE], name)]
