"""Time the variants of every case in turns, and write their rows, rounds, settings and plot into a folder."""

import dataclasses
import datetime
import functools
import gc
import json
import math
import os
import timeit
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.benchmark import set_torch_threads, timer
from tqdm import tqdm

from symexplin import kernels
from symexplin.lab.bench.config import BenchConfig, Case
from symexplin.lab.bench.work import BASELINES, PHASES, Work, make_work, peak_in_child
from symexplin.lab.files import replace_file, replacing
from symexplin.lab.folders import LOCK, claimed
from symexplin.lab.provenance import cores, provenance
from symexplin.lab.settings import dump_toml, to_table
from symexplin.lab.tables import format_columns, write_csv

__all__ = ["CONFIG", "FACTS", "PLOT", "RESULTS", "ROUNDS", "Row", "Timing", "measure", "rows_of", "run_bench", "spread"]

Echo = Callable[[str], None]
Row = dict[str, Any]

CONFIG, RESULTS, ROUNDS, PLOT = "config.toml", "results.csv", "rounds.jsonl", "bench"
# Columns of the measurement as a whole, after those of each row.
FACTS = (
    *("context", "vocab_size", "heads", "preset", "map", "seed", "compile", "recompute", "loss_chunk", "fresh"),
    *("device", "kernels", "malloc", "processor", "instructions", "cores", "threads"),
    *("system", "python", "torch", "symexplin", "commit", "date"),
)
_PRINTED = ("variant", "ms", "ms_p10", "ms_p90", "baseline", "ratio", "ratio_p10", "ratio_p90", "peak_mib")
_LEAST_MS, _MOST_CALLS = 20.0, 200  # shorter work is repeated within its turn
_MALLOC = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")  # variables that set or replace malloc


class Timing(NamedTuple):
    """One turn: milliseconds per call and per phase of it, and on CUDA the peak of the variant's memory in bytes."""

    ms: float
    phases: dict[str, float]
    peak: int | None = None


Round = dict[str, Timing]


class _Turn:
    """A variant ready to be timed: built, called twice, with its number of calls per turn."""

    def __init__(self, make: Callable[[], Work], device: torch.device) -> None:
        on_cuda, held = device.type == "cuda", 0
        if on_cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        self._work, self._calls = make(), 1
        self._peak: int | None = None
        self.take()  # creates states, compiles code
        self._calls = min(_MOST_CALLS, math.ceil(_LEAST_MS / self.take().ms))
        if on_cuda:
            self._peak = torch.cuda.max_memory_allocated(device) - held

    def take(self) -> Timing:
        work, phases = self._work, self._work.phases
        phases.update(dict.fromkeys(phases, 0.0))
        # torch's own Timer calls the work twice more per measurement. Its clock waits for the device.
        seconds = timeit.Timer(work.run, work.prepare, timer).timeit(self._calls)
        spent = {phase: 1e3 * part / self._calls for phase, part in phases.items()}
        return Timing(1e3 * seconds / self._calls, spent, self._peak)


def measure(
    arms: Mapping[str, Callable[[], Work]],
    device: torch.device,
    repeats: int,
    warmup: int = 1,
    fresh: bool = False,
    tick: Callable[[], object] = lambda: None,
) -> Iterator[Round]:
    """Yield the timings of each round by variant.

    In a round each variant has one turn, in an order that rotates. A machine that slows down affects all alike.

    Args:
        arms: functions that build the work of each variant.
        device: where the work runs.
        repeats: rounds that count.
        warmup: rounds before them.
        fresh: build a variant for each of its turns. Otherwise all exist side by side.
        tick: called after each turn.

    >>> rounds = measure({"a": lambda: Work(lambda: None), "b": lambda: Work(lambda: None)}, torch.device("cpu"), 3)
    >>> [list(found) for found in rounds]
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


def rows_of(case: Case, rounds: Sequence[Round], peaks: Mapping[str, int | None]) -> list[Row]:
    """Return the rows of a case, one per variant. None stands for what does not apply or was not measured.

    Args:
        case: what was measured.
        rounds: its timings.
        peaks: bytes of memory by variant.
    """
    rows: list[Row] = []
    for name, baseline in BASELINES[case.part, case.dtype].items():
        own, peak = [found[name] for found in rounds], peaks.get(name)
        ratios = spread("ratio", [found[name].ms / found[baseline].ms for found in rounds])
        phases = {p: float(np.median([timing.phases[p] for timing in own])) for p in own[0].phases}
        rows.append(
            {
                **{"part": case.part, "variant": name, "baseline": baseline},
                **case._asdict(),
                "shape": case.shape and "x".join(map(str, case.shape)),
                "rounds": len(rounds),
                **spread("ms", [timing.ms for timing in own]),
                **ratios,
                "overhead_percent": None if case.part == "map" else 100.0 * (ratios["ratio"] - 1.0),
                "peak_mib": None if peak is None else peak / 2**20,
                **{f"{phase}_ms": phases.get(phase) for phase in PHASES},
            }
        )
    return rows


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 10th and 90th percentile, as columns.

    >>> spread("ms", [1.0, 2.0, 3.0])
    {'ms': 2.0, 'ms_p10': 1.2, 'ms_p90': 2.8}
    """
    middle, low, high = np.percentile(values, (50, 10, 90)).tolist()
    return {name: middle, f"{name}_p10": low, f"{name}_p90": high}


def _format(rows: Sequence[Row]) -> str:
    def cell(value: object) -> str:
        return f"{value:,.3f}" if isinstance(value, float) else str(value or "-")

    return format_columns([_PRINTED, *([cell(row[name]) for name in _PRINTED] for row in rows)])


def run_bench(config: BenchConfig, out: str | Path, echo: Echo = lambda _: None, progress: bool = False) -> list[Row]:
    """Measure everything that a configuration asks for, and write it into a folder.

    results.csv has a row per variant, rounds.jsonl the times of every round, config.toml the settings with device and
    threads resolved, bench.svg and bench.png the plot. The rows of a case are written when it is timed, and again with
    the memory of each variant. An interrupted measurement keeps the cases that it has timed, without a plot.

    Args:
        config: what to measure.
        out: a new folder.
        echo: takes the table of each case, and a line for each memory that could not be measured.
        progress: show a bar on a terminal.

    Raises:
        ValueError: The device is not there, the folder is not new, or the map has no inverse at the weights.

    >>> import tempfile
    >>> config = BenchConfig(("map",), widths=(16,), dtypes=("fp32",), repeats=2, device="cpu")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = run_bench(config, folder)
    ...     sorted(path.name for path in Path(folder).iterdir() if path.suffix)
    ['bench.png', 'bench.svg', 'config.toml', 'results.csv', 'rounds.jsonl']
    """
    compute = config.run(next(config.cases())).compute
    config = dataclasses.replace(config, device=compute.device, threads=compute.threads)
    with (
        claimed(out, "benchmark", (RESULTS, ROUNDS)) as folder,
        set_torch_threads(compute.threads or 1),
        warnings.catch_warnings(),
    ):
        if any(path.name != LOCK for path in folder.iterdir()):
            raise ValueError(f"out must be a new folder, got {str(out)!r}, which has an earlier measurement")
        bench = _Bench(config, folder, echo, progress)
        for case in config.cases():
            bench.measure(case)
        bench.plot()
    return bench.rows


class _Bench:
    """A measurement in its folder, which stays empty until the first case is timed."""

    def __init__(self, config: BenchConfig, folder: Path, echo: Echo, progress: bool) -> None:
        self._config, self._folder, self._echo, self._progress = config, folder, echo, progress
        self._device = torch.device(config.device)
        self._facts = _facts(config, self._device)
        self._rounds: list[str] = []
        self.rows: list[Row] = []

    def measure(self, case: Case) -> None:
        rounds = self._time(case)
        for number, found in enumerate(rounds, start=1):
            times = {name: timing._asdict() for name, timing in found.items()}
            self._rounds.append(json.dumps({**case._asdict(), "round": number, "times": times}))
        replace_file(self._folder / CONFIG, dump_toml(to_table(self._config)))
        replace_file(self._folder / ROUNDS, "\n".join([*self._rounds, ""]))
        peaks = {name: timing.peak for name, timing in rounds[0].items()} if self._config.memory else {}
        rows = self._write(rows_of(case, rounds, peaks))
        if self._config.memory and case.part == "step" and self._device.type == "cpu":
            for name in rounds[0]:
                peaks[name] = self._peak(name, case)
                rows = self._write(rows_of(case, rounds, peaks))
        self.rows += rows
        self._echo(f"{case}\n{_format(rows)}")

    def _time(self, case: Case) -> list[Round]:
        config, names = self._config, list(BASELINES[case.part, case.dtype])
        if config.compile:
            torch.compiler.reset()  # torch runs one code uncompiled from the eighth model on

        def make(name: str) -> Work:
            if config.compile and config.fresh:
                torch.compiler.reset()
            return make_work(name, config, case, self._device)

        arms = {name: functools.partial(make, name) for name in names}
        turns = (config.warmup + config.repeats) * len(names)
        disable = None if self._progress else True
        with tqdm(total=turns, desc=str(case), unit="turn", leave=False, disable=disable) as bar:
            return list(measure(arms, self._device, config.repeats, config.warmup, config.fresh, bar.update))

    def _write(self, rows: list[Row]) -> list[Row]:
        write_csv(self._folder / RESULTS, [row | self._facts for row in (*self.rows, *rows)])
        return rows

    def _peak(self, name: str, case: Case) -> int | None:
        try:
            return peak_in_child(name, self._config, case)
        except OSError as error:  # the process failed, or there was no memory to start it
            self._echo(f"memory of {name}, {case}, is left out: {error}")
            return None

    def plot(self) -> None:
        from symexplin.lab.bench.plot import draw  # matplotlib takes its time

        known = self._facts
        place = known["processor"] if known["device"] == "cpu" else known["device"]
        commit = f", commit {known['commit'][:8]}" if known["commit"] else ""
        figure = draw(self.rows, f"{place}, threads: {known['threads']}, torch {known['torch']}{commit}")
        for kind in ("svg", "png"):
            with replacing(self._folder / f"{PLOT}.{kind}") as temporary:
                figure.savefig(temporary, format=kind, dpi=150)


def _facts(config: BenchConfig, device: torch.device) -> Row:
    malloc = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_MALLOC)}
    known = {
        **dataclasses.asdict(config),
        **provenance(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "kernels": kernels.describe(device),
        "malloc": " ".join(f"{name}={value}" for name, value in malloc.items()),
        "cores": cores(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return {name: known[name] for name in FACTS}
