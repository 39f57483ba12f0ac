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

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from torch.utils.benchmark import set_torch_threads, timer
from tqdm import tqdm

from symexplin import kernels
from symexplin.lab.bench import RESULTS, BenchConfig, Case
from symexplin.lab.bench.work import BASELINES, CURVED, PHASES, Work, make_work, peak_in_child
from symexplin.lab.files import format_columns, replace_file, replacing, write_csv
from symexplin.lab.folders import LOCK, claimed
from symexplin.lab.provenance import cores, provenance
from symexplin.lab.report.charts import GUIDE_LINE, STYLE
from symexplin.lab.settings import dump_toml, to_table

__all__ = ["Timing", "draw", "measure", "rows_of", "run_bench", "spread"]

Echo = Callable[[str], None]
Row = dict[str, Any]

_CONFIG, _ROUNDS, _PLOT = "config.toml", "rounds.jsonl", "bench.svg"
_SWEPT = ("parts", "dtypes", "widths", "depths", "microbatches", "tokens")  # settings that rows have
_PRINTED = (
    *("variant", "ms", "ms_p10", "ms_p90", "baseline", "ratio", "ratio_p10", "ratio_p90", "peak_mib"),
    "wall_clock_speedup",
)
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
) -> Iterator[Round]:
    """Yield the timings of each round that counts, by variant.

    In a round each variant has one turn, in an order that rotates. A machine that slows down affects all alike. With
    `fresh` a variant is built for each of its turns. Otherwise all exist side by side.
    """
    turns = {} if fresh else {name: _Turn(make, device) for name, make in arms.items()}
    names = list(arms)
    for number in range(-warmup, repeats):
        first = number % len(names)
        found: Round = {}
        for name in names[first:] + names[:first]:
            found[name] = (turns[name] if turns else _Turn(arms[name], device)).take()
        if number >= 0:
            yield {name: found[name] for name in names}


def rows_of(
    case: Case, rounds: Sequence[Round], peaks: Mapping[str, int | None], step_speedup: float | None = None
) -> list[Row]:
    """Return the rows of a case, one per variant; None: does not apply, or was not measured.

    `peaks` are in bytes. `step_speedup` is that of the curved variants in steps. Over the ratio of a step it is their
    speedup in time (table 11).
    """
    rows: list[Row] = []
    for name, baseline in BASELINES[case.part, case.dtype].items():
        own, peak = [found[name] for found in rounds], peaks.get(name)
        ratio = spread("ratio", [found[name].ms / found[baseline].ms for found in rounds])
        fewer = step_speedup if case.part == "step" and name in CURVED else None
        phases = {p: float(np.median([timing.phases[p] for timing in own])) for p in own[0].phases}
        rows.append(
            {
                **{"part": case.part, "variant": name, "baseline": baseline},
                **case._asdict(),
                "rounds": len(rounds),
                **spread("ms", [timing.ms for timing in own]),
                **ratio,
                "peak_mib": None if peak is None else peak / 2**20,
                **{f"{phase}_ms": phases.get(phase) for phase in PHASES},
                "wall_clock_speedup": None if fewer is None else fewer / ratio["ratio"],
            }
        )
    return rows


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 10th and 90th percentile, as columns."""
    middle, low, high = np.percentile(values, (50, 10, 90)).tolist()
    return {name: middle, f"{name}_p10": low, f"{name}_p90": high}


def _format(rows: Sequence[Row]) -> str:
    shown = [name for name in _PRINTED if any(row[name] is not None for row in rows)]
    cells = [[row[name] for name in shown] for row in rows]
    texts = [[f"{cell:,.3f}" if isinstance(cell, float) else str(cell or "-") for cell in row] for row in cells]
    return format_columns([shown, *texts])


def run_bench(config: BenchConfig, out: str | Path, echo: Echo = lambda _: None, progress: bool = False) -> list[Row]:
    """Measure everything that a configuration asks for, and write it into a folder.

    results.csv has a row per variant, rounds.jsonl the times of every round, config.toml the settings with device and
    threads resolved, bench.svg the plot. An interrupted measurement keeps the cases that it has measured.

    `echo` takes the table of each case, and a line for each memory that could not be measured. `out` is a new folder.

    Raises:
        ValueError: The device is not there, the folder is not new, or the map has no inverse at the weights.
    """
    compute = config.run(next(config.cases())).compute
    config = dataclasses.replace(config, device=compute.device, threads=compute.threads)
    with (
        claimed(out, "benchmark", (RESULTS, _ROUNDS)) as folder,
        set_torch_threads(compute.threads or 1),
        warnings.catch_warnings(),
    ):
        if any(path.name != LOCK for path in folder.iterdir()):
            raise ValueError(f"out must be a new folder, got {str(out)!r}, which has an earlier measurement")
        facts = _facts(config, torch.device(config.device))
        lines: list[str] = []
        rows: list[Row] = []
        for case in config.cases():
            rounds = _timed(config, case, progress)
            for number, found in enumerate(rounds, start=1):
                times = {name: timing._asdict() for name, timing in found.items()}
                lines.append(json.dumps({**case._asdict(), "round": number, "times": times}))
            replace_file(folder / _CONFIG, dump_toml(to_table(config)))
            replace_file(folder / _ROUNDS, "\n".join([*lines, ""]))
            peaks = _peaks(config, case, rounds[0], echo) if config.memory else {}
            own = rows_of(case, rounds, peaks, config.step_speedup)
            rows += own
            write_csv(folder / RESULTS, [row | facts for row in rows])
            echo(f"{case}\n{_format(own)}")
        caption = f"{facts['device']}, {facts['processor']}, threads: {facts['threads']}, torch {facts['torch']}"
        with replacing(folder / _PLOT) as temporary:
            draw(rows, caption).savefig(temporary, format="svg")
    return rows


def _timed(config: BenchConfig, case: Case, progress: bool) -> list[Round]:
    device = torch.device(config.device)
    if config.compile:
        torch.compiler.reset()  # torch runs one code uncompiled from the eighth model on

    def make(name: str) -> Work:
        if config.compile and config.fresh:
            torch.compiler.reset()
        return make_work(name, config, case, device)

    arms = {name: functools.partial(make, name) for name in BASELINES[case.part, case.dtype]}
    rounds = measure(arms, device, config.repeats, config.warmup, config.fresh)
    shown = None if progress else True
    return list(tqdm(rounds, str(case), config.repeats, unit="round", leave=False, disable=shown))


def _peaks(config: BenchConfig, case: Case, first: Round, echo: Echo) -> dict[str, int | None]:
    """Return the peak memory of each variant; on a CPU each takes a few steps in a process of its own."""
    if case.part != "step" or config.device != "cpu":
        return {name: timing.peak for name, timing in first.items()}
    peaks: dict[str, int | None] = {}
    for name in first:
        try:
            peaks[name] = peak_in_child(name, config, case)
        except OSError as error:  # the process failed, or there was no memory to start it
            echo(f"memory of {name}, {case}, is left out: {error}")
    return peaks


def _facts(config: BenchConfig, device: torch.device) -> Row:
    """Return the columns of the measurement as a whole: settings, machine and versions."""
    malloc = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_MALLOC)}
    return {
        **{name: value for name, value in dataclasses.asdict(config).items() if name not in _SWEPT},
        **provenance(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "kernels": kernels.describe(device),
        "malloc": " ".join(f"{name}={value}" for name, value in malloc.items()),
        "cores": cores(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def draw(rows: Sequence[Row], caption: str) -> Figure:
    """Return the figure: for each part the median ratios to the baseline, with their 10th and 90th percentile."""
    curved = [row for row in rows if row["variant"] != row["baseline"]]
    parts = list(dict.fromkeys(row["part"] for row in curved))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 1.0 + len(parts) + 0.25 * len(curved)), layout="constrained")
        for axes, part in zip(figure.subplots(len(parts), squeeze=False).flat, parts, strict=True):
            own = [row for row in curved if row["part"] == part]
            names = [
                f"{Case(*(row[key] for key in Case._fields))}, {row['variant']} / {row['baseline']}" for row in own
            ]
            ratio, low, high = np.array([[row[key] for key in ("ratio", "ratio_p10", "ratio_p90")] for row in own]).T
            axes.errorbar(ratio, range(len(own)), xerr=(ratio - low, high - ratio), fmt="o", capsize=3)
            axes.axvline(1.0, **GUIDE_LINE)
            axes.set_yticks(range(len(own)), names)
            axes.invert_yaxis()
            axes.set_xlabel(f"{part}: time / time of the baseline")
        figure.suptitle(caption, fontsize=9)
    return figure
