import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from symexplin.lab.folders import LOCK, claimed

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
    with claimed(folder, "run", MARKS):
        (folder / "run.json").touch()
        with hold(folder) as other:
            assert "out must be free, got " in other.communicate(timeout=60)[0]
    with hold(folder) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="in which another process works"), claimed(folder, "run", MARKS):
            pass
        other.kill()
        other.wait()
        with claimed(folder, "run", MARKS):
            pass


def test_a_process_may_claim_again_within(tmp_path):
    with claimed(tmp_path, "demo", MARKS), claimed(tmp_path, "comparison", MARKS), hold(tmp_path) as other:
        assert "another process works" in other.communicate(timeout=60)[0]


def test_a_mistake_leaves_no_trace(tmp_path):
    with pytest.raises(KeyError), claimed(tmp_path / "new" / "deep", "run", MARKS):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    with pytest.raises(KeyError), claimed(tmp_path / "old", "run", MARKS):
        raise KeyError
    assert list((tmp_path / "old").iterdir()) == []


def test_what_a_process_killed_at_its_start_leaves_may_be_used(tmp_path):
    with hold(tmp_path / "new") as other:
        assert other.stdout.readline() == "held\n"
        other.kill()
    assert [path.name for path in (tmp_path / "new").iterdir()] == [LOCK]
    with claimed(tmp_path / "new", "run", MARKS) as folder:
        (folder / "run.json").touch()


def test_what_is_written_stays(tmp_path):
    with claimed(tmp_path / "new", "run", MARKS) as folder:
        (folder / "run.json").touch()
    assert {path.name for path in (tmp_path / "new").iterdir()} == {LOCK, "run.json"}


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", ".git"])
def test_folders_of_others_are_left_alone(tmp_path, name):
    (tmp_path / name).write_text("mine")
    refused = pytest.raises(
        ValueError, match=rf"out must be a new folder or that of an earlier run, got .* with '{name}'"
    )
    with refused, claimed(tmp_path, "run", MARKS):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_earlier_one_may_have_notes_beside_it_and_a_mark_half_written(tmp_path):
    (tmp_path / "run.json.tmp").touch()
    with claimed(tmp_path, "run", MARKS):
        pass
    (tmp_path / "notes.txt").touch()
    with claimed(tmp_path, "run", MARKS):
        pass


def test_files_and_nameless_folders_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match="out must be a folder, got the file"),
        claimed(tmp_path / "file", "run", MARKS),
    ):
        pass
    for name in ("", " "):
        with pytest.raises(ValueError, match="out must name a folder"), claimed(name, "run", MARKS):
            pass


@pytest.mark.skipif(os.name != "posix", reason="takes away the right to write")
@pytest.mark.parametrize("name", ["", "new"])
def test_a_read_only_folder_is_one_line(name):
    """Root may write everywhere, so that the process becomes nobody."""
    code = """if True:
        import os, sys
        from symexplin.lab.folders import claimed
        if os.geteuid() == 0:
            os.setgroups([]), os.setgid(65534), os.setuid(65534)
        try:
            with claimed(sys.argv[1], "run", {"run.json"}):
                pass
        except OSError as error:
            print(error)
    """
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o555)
        command = [sys.executable, "-c", code, str(Path(place, name))]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert "Permission denied" in done.stdout, done
        assert len(done.stdout.splitlines()) == 1
        assert list(Path(place).iterdir()) == []
        Path(place).chmod(0o755)
