import pytest
import torch

from symexplin.lab.bench import measure as module
from symexplin.lab.bench.measure import measure
from symexplin.lab.bench.work import Marks, Work

CPU = torch.device("cpu")


class Machine:
    """A clock that only work moves on, and a record of what was built and run."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.built, self.ran, self.seconds = 0.0, [], [], seconds
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    def arms(self):
        return {name: self._make(name) for name in self.seconds}

    def _make(self, name):
        def run():
            self.now += self.seconds[name]
            self.ran.append(name)

        def prepare():
            self.now += 1000.0
            self.ran.append(f"({name})")

        def make():
            self.built.append(name)
            return Work(run, prepare)

        return make


def test_times_are_those_of_the_work_alone(monkeypatch):
    machine = Machine(monkeypatch, {"a": 0.5, "b": 0.003})
    rounds = list(measure(machine.arms(), CPU, repeats=3))
    assert [sorted(found) for found in rounds] == [["a", "b"]] * 3
    for found in rounds:
        assert found["a"].ms == pytest.approx(500.0)
        assert found["b"].ms == pytest.approx(3.0)
        assert (found["a"].calls, found["b"].calls) == (1, 7)  # 7 x 3 ms are more than 20 ms


def test_turns_rotate_and_each_is_prepared(monkeypatch):
    machine = Machine(monkeypatch, dict.fromkeys("abc", 0.1))
    list(measure(machine.arms(), CPU, repeats=3, warmup=1))
    assert machine.built == ["a", "b", "c"]
    warm_up = ["(a)", "a"] * 2 + ["(b)", "b"] * 2 + ["(c)", "c"] * 2
    rounds = [word for name in "cababcbcacab" for word in (f"({name})", name)]
    assert machine.ran == warm_up + rounds


def test_fresh_ones_are_built_for_every_turn(monkeypatch):
    machine = Machine(monkeypatch, dict.fromkeys("ab", 0.1))
    rounds = list(measure(machine.arms(), CPU, repeats=2, warmup=0, fresh=True))
    assert machine.built == ["a", "b", "b", "a"]
    assert [list(found) for found in rounds] == [["a", "b"]] * 2


def test_phases_are_summed_within_a_call(monkeypatch):
    machine, marks = Machine(monkeypatch, {}), Marks()

    def run():
        for phase, seconds in (("forward", 0.001), ("backward", 0.002), ("forward", 0.001)):
            machine.now += seconds
            marks.end(phase)
        machine.now += 0.001  # of no phase

    (found,) = measure({"a": lambda: Work(run, marks=marks)}, CPU, repeats=1)
    assert (found["a"].calls, found["a"].ms) == (4, pytest.approx(5.0))
    # What comes after the last phase of a call counts as the next call's first.
    assert found["a"].phases == pytest.approx({"forward": 2.0 + 3 / 4, "backward": 2.0})


def test_every_turn_is_told(monkeypatch):
    machine, ticks = Machine(monkeypatch, dict.fromkeys("ab", 0.1)), []
    list(measure(machine.arms(), CPU, repeats=2, warmup=1, tick=lambda: ticks.append(1)))
    assert len(ticks) == 2 * 3
