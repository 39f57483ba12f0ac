"""Timing in turns: every round has one turn of each variant, so that a machine that drifts touches all alike."""

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from symexplin.lab.bench.work import Work

__all__ = ["Round", "Timing", "measure"]

# What is timed takes at least so long; shorter work is repeated within its turn.
_LEAST_MS = 20.0
_MOST_CALLS = 200

Round = dict[str, "Timing"]
_Moment = float | torch.cuda.Event  # of the host; on CUDA, of the device, known once it is through


class Timing(NamedTuple):
    """One turn: milliseconds a call, those that the host took to issue it, and the peak of the device's memory.

    `peak` is bytes, on CUDA, of what the variant holds and what its calls need, without what others hold. `phases` has
    the milliseconds of each phase of a call, where the work marks any.
    """

    ms: float
    host_ms: float
    calls: int
    peak: int | None = None
    phases: Mapping[str, float] | None = None


class _Turn:
    """A variant ready to be timed: built, called twice, its calls a turn chosen."""

    def __init__(self, make: Callable[[], Work], device: torch.device) -> None:
        self._device = device
        before = self._held()
        self.work = make()
        self._time(1)  # states are created, code is compiled
        once = self._time(1).ms
        self.calls = min(_MOST_CALLS, max(1, math.ceil(_LEAST_MS / once)))
        self.peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None

    def _held(self) -> int:
        if self._device.type != "cuda":
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def take(self) -> Timing:
        return self._time(self.calls)._replace(peak=self.peak)

    def _time(self, calls: int) -> Timing:
        self.work.prepare()
        ends: list[tuple[str, _Moment]] = []
        if self.work.marks is not None:
            self.work.marks.end = lambda phase: ends.append((phase, self._now()))
        gc.disable()
        try:
            self._wait()
            start = time.perf_counter()
            first = self._now()
            for _ in range(calls):
                self.work.run()
            last = self._now()
            host_ms = 1e3 * (time.perf_counter() - start)
            self._wait()
        finally:
            gc.enable()
        phases: dict[str, float] = {}
        for (_, begin), (phase, end) in itertools.pairwise([("", first), *ends]):
            phases[phase] = phases.get(phase, 0.0) + _ms(begin, end) / calls
        return Timing(_ms(first, last) / calls, host_ms / calls, calls, phases=phases or None)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _now(self) -> _Moment:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _ms(begin: _Moment, end: _Moment) -> float:
    if isinstance(begin, float):
        assert isinstance(end, float)
        return 1e3 * (end - begin)
    assert isinstance(end, torch.cuda.Event)
    return float(begin.elapsed_time(end))


def measure(
    arms: Mapping[str, Callable[[], Work]],
    device: torch.device,
    repeats: int,
    warmup: int = 1,
    fresh: bool = False,
    tick: Callable[[], object] = lambda: None,
) -> Iterator[Round]:
    """Yield the timings of each round that counts, by variant.

    Args:
        arms: what builds the work of each variant.
        device: where it runs.
        repeats: rounds that count.
        warmup: rounds before them.
        fresh: build a variant for its turn alone; else all exist side by side.
        tick: called after each turn.

    >>> rounds = measure({"a": lambda: Work(lambda: None), "b": lambda: Work(lambda: None)}, torch.device("cpu"), 3)
    >>> [sorted(found) for found in rounds]
    [['a', 'b'], ['a', 'b'], ['a', 'b']]
    """
    turns = {} if fresh else {name: _Turn(make, device) for name, make in arms.items()}
    names = list(arms)
    for number in range(-warmup, repeats):
        first = number % len(names)
        found: Round = {}
        for name in names[first:] + names[:first]:
            found[name] = (turns[name] if turns else _Turn(arms[name], device)).take()
            tick()
        if number >= 0:
            yield {name: found[name] for name in names}
