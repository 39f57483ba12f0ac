import subprocess
import sys

import pytest

from symexplin.lab.folders import LOCK, claimed, read_facts

MARKS = {"run.json"}
HOLD = """if True:
    import sys
    from symexplin.lab.folders import claimed
    try:
        with claimed(sys.argv[1], "run", {"run.json"}):
            print("held", flush=True)
            sys.stdin.read()
    except ValueError as error:
        print(error)
"""


def hold(folder):
    command = [sys.executable, "-c", HOLD, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_one_process_at_a_time_and_a_killed_one_lets_go(tmp_path):
    folder = tmp_path / "a" / "b"
    with hold(folder) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="in which another process works"), claimed(folder, "run", MARKS):
            pass
        other.kill()
    assert [path.name for path in folder.iterdir()] == [LOCK]
    with claimed(folder, "demo", MARKS), claimed(folder, "comparison", MARKS):  # again within
        (folder / "run.json").touch()
        with hold(folder) as other:
            assert "out must be free, got " in other.communicate(timeout=60)[0]
    assert {path.name for path in folder.iterdir()} == {LOCK, "run.json"}


def test_folders_of_others_are_left_alone(tmp_path):
    name = ".git"
    (tmp_path / name).write_text("mine")
    refused = rf"out must be a new folder or that of an earlier run, got .* with '{name}'"
    with pytest.raises(ValueError, match=refused), claimed(tmp_path, "run", MARKS):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]
    (tmp_path / "run.json.tmp").touch()  # a mark half-written
    with claimed(tmp_path, "run", MARKS):
        pass


@pytest.mark.parametrize(("name", "message"), [("file", "a folder, got the file"), ("", "name a"), (" ", "name a")])
def test_files_and_nameless_folders_are_refused(tmp_path, name, message):
    (tmp_path / "file").touch()
    out = tmp_path / name if name == "file" else name
    with pytest.raises(ValueError, match=f"out must (be )?{message}"), claimed(out, "run", MARKS):
        pass


@pytest.mark.parametrize("text", ["{", "{}", '{"data": "", "config": 3, "provenance": {}}'])
def test_a_run_whose_facts_are_damaged_is_named(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json' is damaged: "):
        read_facts(tmp_path)
