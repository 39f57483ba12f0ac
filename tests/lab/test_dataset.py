import subprocess
import sys

import pytest

from symexplin.lab.dataset import DATASET, PARTS, check_same, claimed, read_json


def test_a_folder_is_claimed_once(tmp_path):
    folder = tmp_path / "a" / "b"
    with claimed(folder, []):
        (folder / DATASET).touch()
        with (
            pytest.raises(ValueError, match=r"out must be free, got .*, which another process prepares"),
            claimed(folder, []),
        ):
            pass
        code = f"import pathlib, symexplin.lab.dataset as d\nwith d.claimed(pathlib.Path({str(folder)!r}), []): pass"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "which another process prepares" in other.stderr
    with claimed(folder, []):
        pass


def test_a_mistake_leaves_no_folder(tmp_path):
    with pytest.raises(KeyError), claimed(tmp_path / "new", []):
        raise KeyError
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / PARTS).mkdir()
    with pytest.raises(KeyError), claimed(tmp_path / "old", []):
        raise KeyError
    assert (tmp_path / "old" / PARTS).exists()


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json", "train.safetensors"])
def test_other_folders_are_refused(tmp_path, name):
    (tmp_path / name).write_text("mine")
    refused = pytest.raises(ValueError, match=f"out must be a new folder or an earlier dataset's, got .* with '{name}'")
    with refused, claimed(tmp_path, []):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_foreign_file_beside_a_dataset_is_named(tmp_path):
    for name in (DATASET, "tokenizer.json", "tokenizer.json.tmp", "notes.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"with 'notes.txt'"), claimed(tmp_path, []):
        pass
    (tmp_path / "notes.txt").unlink()
    with claimed(tmp_path, []):
        pass


def test_bad_names_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="out must be a folder, got the file"), claimed(tmp_path / "file", []):
        pass
    for inside in (tmp_path, tmp_path / "out"):
        with pytest.raises(ValueError, match="out must lie outside the sources"), claimed(inside, [str(tmp_path)]):
            pass
    assert not (tmp_path / "out").exists()


def test_differences_are_told(tmp_path):
    check_same(tmp_path, {"a": [1]}, {"a": [1]})
    with pytest.raises(ValueError, match="a was 1, now None; b was None, now 2"):
        check_same(tmp_path, {"a": 1}, {"b": 2})


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_damaged_json_is_named(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"x.json' is damaged"):
        read_json(tmp_path / "x.json")
