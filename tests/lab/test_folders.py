import subprocess
import sys

import pytest

from symexplin.lab.files import read_json_lines
from symexplin.lab.folders import LOCK, METRICS, TIMING, Recorder, claimed

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
        with pytest.raises(ValueError, match="wait for the process that works in it"), claimed(folder, "run", MARKS):
            pass
        other.kill()
    assert [path.name for path in folder.iterdir()] == [LOCK]
    with claimed(folder, "run", MARKS):
        (folder / "run.json").touch()
        with hold(folder) as other:
            assert "out must not be in use, got " in other.communicate(timeout=60)[0]
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


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"), claimed(tmp_path / "file", "run", MARKS):
        pass


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_a_resumed_record_goes_on_where_its_checkpoint_was(tmp_path):
    with Recorder(tmp_path, tensorboard=True) as recorder:
        recorder.update(1, {"loss": 2.0}, tokens=8)
        recorder.evaluation(1, 3.0, {}, {"seconds": 0.5})
        assert len(read_json_lines(tmp_path / METRICS)) == 2  # on the disk as it is written
        lengths = recorder.sync()
        for step in (2, 3):
            recorder.update(step, {"loss": 2.0 / step}, tokens=8 * step)
        recorder.evaluation(3, 2.5, {"e/mean": 1.0}, {"seconds": 1.0})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4, "lo')  # what a kill leaves
    assert [r["step"] for r in read_json_lines(tmp_path / METRICS)] == [1, 1, 2, 3, 3]
    with Recorder(tmp_path, tensorboard=True, step=1, lengths=lengths) as recorder:
        recorder.update(2, {"loss": 20.0}, tokens=16)
    assert read_json_lines(tmp_path / METRICS) == [
        {"step": 1, "loss": 2.0, "tokens": 8},
        {"step": 1, "eval_loss": 3.0},
        {"step": 2, "loss": 20.0, "tokens": 16},
    ]
    assert read_json_lines(tmp_path / TIMING) == [{"step": 1, "seconds": 0.5}]
    assert events(tmp_path)["loss"] == [(1, 2.0), (2, 20.0)]
    (tmp_path / METRICS).unlink()
    with pytest.raises(ValueError, match=rf"{METRICS}' has 0 bytes, but \d+ were written"):
        Recorder(tmp_path, lengths=lengths)
