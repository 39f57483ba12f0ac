import sys
from types import SimpleNamespace

import pytest

from symexplin.lab.config import LogConfig, RunConfig
from symexplin.lab.record import Trackers


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def config(**log):
    return RunConfig("data", log=LogConfig(**log))


def test_tensorboard_reads_the_numbers(tmp_path):
    with Trackers(tmp_path, config(), 0) as trackers:
        for step in (1, 2, 3):
            trackers.log(step, {"loss": 2.0 / step, "lr": 0.5})
    assert events(tmp_path) == {
        "loss": [(1, 2.0), (2, 1.0), (3, pytest.approx(2 / 3))],
        "lr": [(s, 0.5) for s in (1, 2, 3)],
    }


def test_events_after_the_step_resumed_from_are_dropped(tmp_path):
    with Trackers(tmp_path, config(), 0) as trackers:
        for step in (1, 2, 3):
            trackers.log(step, {"loss": float(step)})
    with Trackers(tmp_path, config(), 1) as trackers:
        trackers.log(2, {"loss": 20.0})
    assert events(tmp_path)["loss"] == [(1, 1.0), (2, 20.0)]


def test_no_tracker_no_file(tmp_path):
    with Trackers(tmp_path, config(tensorboard=False), 0) as trackers:
        trackers.log(1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_wandb_gets_project_settings_and_numbers(tmp_path, monkeypatch):
    calls = []

    def init(**options):
        calls.append(options)
        return SimpleNamespace(
            log=lambda values, step: calls.append((step, values)), finish=lambda exit_code: calls.append(exit_code)
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with Trackers(tmp_path, config(tensorboard=False, wandb="mine"), 0) as trackers:
        trackers.log(4, {"loss": 1.0})
    options, logged, ended = calls
    assert (options["project"], options["name"], options["resume"]) == ("mine", tmp_path.name, "allow")
    assert options["config"]["train"]["lr"] == 3e-3
    assert (logged, ended) == ((4, {"loss": 1.0}), 0)


@pytest.mark.parametrize(
    ("module", "log", "words"),
    [
        ("wandb", {"tensorboard": False, "wandb": "mine"}, "wandb is not installed: pip install wandb"),
        ("torch.utils.tensorboard", {}, "tensorboard is not installed.*--no-tensorboard"),
    ],
)
def test_a_missing_tracker_is_named(tmp_path, monkeypatch, module, log, words):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=words):
        Trackers(tmp_path, config(**log), 0)
