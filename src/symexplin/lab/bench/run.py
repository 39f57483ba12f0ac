"""Measure case after case into a folder: every round as it comes, the rows of every case, the plot at the end."""

import contextlib
import dataclasses
import datetime
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import symexplin as sel
from symexplin import kernels
from symexplin.lab.bench.config import BenchConfig, Case
from symexplin.lab.bench.floors import peak_flops
from symexplin.lab.bench.measure import Round, measure
from symexplin.lab.bench.memory import peak_in_child
from symexplin.lab.bench.table import Row, Size, format_rows, rows_of, to_csv
from symexplin.lab.bench.variants import BASELINES
from symexplin.lab.bench.work import Work, make_work, shapes
from symexplin.lab.files import JsonLines, replace_file, replacing
from symexplin.lab.folders import LOCK, claimed
from symexplin.lab.malloc import keep_freed_memory
from symexplin.lab.model import Transformer
from symexplin.lab.provenance import cores, provenance
from symexplin.lab.settings import dump_toml, to_table

__all__ = ["CONFIG", "PLOT", "RESULTS", "ROUNDS", "run_bench"]

Echo = Callable[[str], None]
Shape = tuple[int, int]

CONFIG, RESULTS, ROUNDS, PLOT = "config.toml", "results.csv", "rounds.jsonl", "bench"


def run_bench(config: BenchConfig, out: str | Path, echo: Echo = lambda _: None, progress: bool = False) -> list[Row]:
    """Measure everything that a configuration asks for, in this process, and write what was found.

    FOLDER/results.csv has one row a variant; rounds.jsonl the times of every round; config.toml the settings with
    device and threads as they came to be; bench.svg and bench.png the plot. A measurement that is interrupted keeps the
    cases it has timed, without a plot; a variant whose memory cannot be measured has none, and `echo` says why.

    Memory on a CPU is measured in spawned processes, which import the main module again: a script that calls this, and
    not with `memory=False`, needs the guard `if __name__ == "__main__":`. As in every run of the lab, memory that is
    freed stays with this process, for good (glibc's malloc).

    Args:
        config: what to measure.
        out: a new folder.
        echo: takes the table of each case, and a line for each memory that could not be measured.
        progress: show a bar on a terminal.

    Raises:
        ValueError: a device that is not there, a folder that is not new, a map without an inverse at the weights.

    >>> import tempfile
    >>> config = BenchConfig(("map",), widths=(16,), dtypes=("fp32",), repeats=2, device="cpu")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = run_bench(config, folder)
    ...     sorted(path.name for path in Path(folder).iterdir() if path.suffix)
    ['bench.png', 'bench.svg', 'config.toml', 'results.csv', 'rounds.jsonl']
    """
    compute = config.run(next(config.cases())).compute
    device, threads = torch.device(compute.device), torch.get_num_threads()
    rows: list[Row] = []
    keep_freed_memory()  # as every run of the lab does
    with claimed(out, "benchmark", (RESULTS, ROUNDS)) as folder, warnings.catch_warnings():
        if any(path.name != LOCK for path in folder.iterdir()):
            raise ValueError(f"out must be a new folder, got {str(out)!r}, which has an earlier measurement")
        torch.set_num_threads(compute.threads or threads)
        try:
            facts = _facts(config, device)
            with _Log(folder, config) as log:
                bench = _Bench(config, device, log, echo, progress)
                for case in config.cases():
                    for shape in shapes(case.width) if case.part == "map" else [None]:
                        found: list[Row] = []
                        for found in bench.case(case, shape):
                            replace_file(folder / RESULTS, to_csv([*rows, *found], facts))
                        rows += found
                        echo(f"{case}{'' if shape is None else f', {_name(shape)}'}\n{format_rows(found)}")
            _draw(rows, folder, _caption(facts))
        finally:
            torch.set_num_threads(threads)
    return rows


class _Log(contextlib.ExitStack):
    """The settings and the rounds, written from the first round on: a mistake before it leaves the folder empty."""

    def __init__(self, folder: Path, config: BenchConfig) -> None:
        super().__init__()
        self._folder, self._config = folder, config
        self._lines: JsonLines | None = None

    def write(self, **record: Any) -> None:
        if self._lines is None:
            compute = self._config.run(next(self._config.cases())).compute
            said = dataclasses.replace(self._config, device=compute.device, threads=compute.threads)
            replace_file(self._folder / CONFIG, dump_toml(to_table(said)))
            self._lines = self.enter_context(JsonLines(self._folder / ROUNDS))
        self._lines.write(**record)


class _Bench:
    """What all cases share: the device, its FLOP/s once known, and the log of rounds."""

    def __init__(self, config: BenchConfig, device: torch.device, log: _Log, echo: Echo, progress: bool) -> None:
        self._config, self._device, self._log, self._echo, self._progress = config, device, log, echo, progress
        self._flops: dict[str, tuple[float, str]] = {}

    def case(self, case: Case, shape: Shape | None) -> Iterator[list[Row]]:
        """Measure one case: yield its rows when it is timed, and again with the memory of each variant."""
        flops = self._peak_flops(case.dtype) if case.part == "step" else None
        rounds, size = self._rounds(case, shape), self._size(case, shape)
        names = rounds[0]
        peaks: dict[str, int | None] = {}
        if self._config.memory:
            peaks = {name: max(filter(None, (found[name].peak for found in rounds)), default=None) for name in names}
        yield rows_of(self._config, case, size, rounds, peaks, flops)
        if self._config.memory and case.part == "step" and self._device.type == "cpu":
            for name in names:
                peaks[name] = self._peak(name, case)
                yield rows_of(self._config, case, size, rounds, peaks, flops)

    def _peak(self, name: str, case: Case) -> int | None:
        try:
            return peak_in_child(name, self._config, case)
        except OSError as error:  # the process failed, or there was no memory to start it
            self._echo(f"memory of {name}, {case}, is left out: {error}")
            return None

    def _peak_flops(self, dtype: str) -> tuple[float, str]:
        if dtype not in self._flops:
            self._flops[dtype] = peak_flops(self._device, dtype)
        return self._flops[dtype]

    def _rounds(self, case: Case, shape: Shape | None) -> list[Round]:
        config, names = self._config, list(BASELINES[case.part, case.dtype])
        arms = {name: self._maker(name, case, shape) for name in names}
        if config.compile:
            torch.compiler.reset()  # torch runs one code uncompiled from the eighth model on
        rounds: list[Round] = []
        turns = (config.warmup + config.repeats) * len(names)
        disable = None if self._progress else True
        with tqdm(total=turns, desc=str(case), unit="turn", leave=False, disable=disable) as bar:
            for found in measure(arms, self._device, config.repeats, config.warmup, config.fresh, bar.update):
                rounds.append(found)
                times = {name: timing._asdict() for name, timing in found.items()}
                self._log.write(**case._asdict(), shape=shape and _name(shape), round=len(rounds), times=times)
        return rounds

    def _maker(self, name: str, case: Case, shape: Shape | None) -> Callable[[], Work]:
        def make() -> Work:
            if self._config.compile and self._config.fresh:
                torch.compiler.reset()
            return make_work(name, self._config, case, self._device, shape)

        return make

    def _size(self, case: Case, shape: Shape | None) -> Size:
        if shape is not None:
            count = shape[0] * shape[1]
            return Size(count, count, count, _name(shape))
        with torch.device("meta"):
            model = Transformer(self._config.run(case).model)
        table = sel.routing(model, self._config.curve(case.width))
        whole = sum(parameter.numel() for parameter in model.parameters())
        curved = sum(route.parameter.numel() for route in table.curved)
        return Size(whole, curved, whole - model.embedding.weight.numel())


def _name(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _facts(config: BenchConfig, device: torch.device) -> dict[str, Any]:
    """Return what every row tells of the measurement as a whole."""
    known = provenance()
    graphics = device.type == "cuda"
    return {
        "context": config.context,
        "vocab_size": config.vocab_size,
        "preset": config.preset,
        "seed": config.seed,
        "map": ";".join(f"{key}={value}" for key, value in config.map.items()),
        "compile": config.compile,
        "recompute": config.recompute,
        "fresh": config.fresh,
        "device": torch.cuda.get_device_name(device) if graphics else str(device),
        "kernels": kernels.describe(device),
        "machine": known["processor"],
        "instructions": known["instructions"],
        "cores": cores(),
        "threads": torch.get_num_threads(),
        **{name: known[name] for name in ("system", "python", "torch", "symexplin", "commit")},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _caption(facts: dict[str, Any]) -> str:
    place = facts["machine"] if facts["device"] == "cpu" else facts["device"]
    threads = f"{facts['threads']} thread" + ("s" if facts["threads"] > 1 else "")
    known = str(facts["commit"] or "")
    commit = f", commit {known[:8]}{'+' if known.endswith('+') else ''}" if known else ""
    return f"{place}, {threads}, torch {facts['torch']}{commit}"


def _draw(rows: list[Row], folder: Path, caption: str) -> None:
    from symexplin.lab.bench.figure import draw  # matplotlib takes its time

    figure = draw(rows, caption)
    for kind in ("svg", "png"):
        with replacing(folder / f"{PLOT}.{kind}") as temporary:
            figure.savefig(temporary, format=kind, dpi=150)
