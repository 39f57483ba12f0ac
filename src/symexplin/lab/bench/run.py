"""Measure case after case into a folder: every round as it comes, the rows of every case, the plot at the end."""

import datetime
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import symexplin as sel
from symexplin.lab.bench.config import BenchConfig, Case
from symexplin.lab.bench.floors import peak_flops
from symexplin.lab.bench.measure import measure
from symexplin.lab.bench.memory import peak_in_child
from symexplin.lab.bench.table import Row, Size, format_rows, rows_of, to_csv
from symexplin.lab.bench.variants import BASELINES
from symexplin.lab.bench.work import Work, make_work, shapes
from symexplin.lab.files import JsonLines, replace_file, replacing
from symexplin.lab.folders import claimed
from symexplin.lab.malloc import keep_freed_memory
from symexplin.lab.model import Transformer
from symexplin.lab.provenance import cores, provenance

__all__ = ["PLOT", "RESULTS", "ROUNDS", "run_bench"]

Echo = Callable[[str], None]
Shape = tuple[int, int]

RESULTS, ROUNDS, PLOT = "results.csv", "rounds.jsonl", "bench"


def run_bench(config: BenchConfig, out: str | Path, echo: Echo = lambda _: None, progress: bool = False) -> list[Row]:
    """Measure everything that a configuration asks for, in this process, and write what was found.

    FOLDER/results.csv has one row a variant; rounds.jsonl the times of every round; bench.svg and bench.png the plot.
    A measurement that is interrupted keeps the cases it has finished, without a plot.

    Args:
        config: what to measure.
        out: a new folder.
        echo: takes the table of each case.
        progress: show a bar on a terminal.

    Raises:
        ValueError: a device that is not there, a folder that is not new, a map without an inverse at the weights.

    >>> import tempfile
    >>> config = BenchConfig(("map",), widths=(16,), dtypes=("fp32",), repeats=2, device="cpu")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = run_bench(config, folder)
    ...     sorted(path.name for path in Path(folder).iterdir() if path.suffix)
    ['bench.png', 'bench.svg', 'results.csv', 'rounds.jsonl']
    """
    compute = config.run(next(config.cases())).compute
    device, threads = torch.device(compute.device), torch.get_num_threads()
    rows: list[Row] = []
    keep_freed_memory()  # as every run of the lab does
    with claimed(out, "benchmark", (RESULTS, ROUNDS)) as folder, warnings.catch_warnings():
        if (folder / ROUNDS).exists():
            raise ValueError(f"out must be a new folder, got {str(out)!r}, which has an earlier measurement")
        torch.set_num_threads(compute.threads or threads)
        try:
            facts = _facts(config, device)
            with JsonLines(folder / ROUNDS) as log:
                bench = _Bench(config, device, log, progress)
                for case in config.cases():
                    for shape in shapes(case.width) if case.part == "map" else [None]:
                        found = bench.case(case, shape)
                        rows += found
                        replace_file(folder / RESULTS, to_csv(rows, facts))
                        echo(f"{case}{'' if shape is None else f', {_name(shape)}'}\n{format_rows(found)}")
            _draw(rows, folder, _caption(facts))
        finally:
            torch.set_num_threads(threads)
    return rows


class _Bench:
    """What all cases share: the device, its FLOP/s once known, and the log of rounds."""

    def __init__(self, config: BenchConfig, device: torch.device, log: JsonLines, progress: bool) -> None:
        self._config, self._device, self._log, self._progress = config, device, log, progress
        self._flops: dict[str, tuple[float, str]] = {}

    def case(self, case: Case, shape: Shape | None) -> list[Row]:
        """Measure one case."""
        config, names = self._config, list(BASELINES[case.part, case.dtype])
        arms = {name: self._maker(name, case, shape) for name in names}
        if config.compile:
            torch.compiler.reset()  # torch runs one code uncompiled from the eighth model on
        rounds = []
        turns = (config.warmup + config.repeats) * len(names)
        disable = None if self._progress else True
        with tqdm(total=turns, desc=str(case), unit="turn", leave=False, disable=disable) as bar:
            for found in measure(arms, self._device, config.repeats, config.warmup, config.fresh, bar.update):
                rounds.append(found)
                times = {name: timing._asdict() for name, timing in found.items()}
                self._log.write(**case._asdict(), shape=shape and _name(shape), round=len(rounds), times=times)
        peaks = {name: max(filter(None, (found[name].peak for found in rounds)), default=None) for name in names}
        flops = None
        if case.part == "step":
            if config.memory and self._device.type == "cpu":
                peaks = {name: peak_in_child(name, config, case) for name in names}
            if case.dtype not in self._flops:
                self._flops[case.dtype] = peak_flops(self._device, case.dtype)
            flops = self._flops[case.dtype]
        return rows_of(config, case, self._size(case, shape), rounds, peaks if config.memory else {}, flops)

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
        "map": ";".join(f"{key}={value}" for key, value in config.map.items()),
        "compile": config.compile,
        "recompute": config.recompute,
        "fresh": config.fresh,
        "device": torch.cuda.get_device_name(device) if graphics else str(device),
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
