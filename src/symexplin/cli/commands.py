"""What each command takes and does; the work is the laboratory's, which is imported when a command runs."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from symexplin.cli.parser import add_keys, given
from symexplin.lab.launch import launch

__all__ = ["COMMANDS", "Command"]

T = TypeVar("T")
Arguments = argparse.Namespace


class Command(NamedTuple):
    """One command: what gives its parser its flags, what runs it, and whether several processes may run it together."""

    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Arguments], None]
    parallel: bool = False


def _say(line: str) -> None:
    print(line, flush=True)


def _log(line: str) -> None:
    """Print a line of a long job, which goes on when nobody can read it any more."""
    try:
        _say(line)
    except OSError:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (for good)


# --- prepare ---------------------------------------------------------------------------------------------------------


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    from symexplin.lab.text.prepare import PrepareConfig

    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="stdlib, a file, a folder, or hf:NAME[:CONFIG]")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the tokens go")
    add_keys(parser, PrepareConfig, leave_out=("sources",))


def _prepare(arguments: Arguments) -> None:
    from symexplin.lab.settings import build
    from symexplin.lab.text.prepare import PrepareConfig, prepare

    config = build(PrepareConfig, given(arguments, PrepareConfig))
    prepare(config, arguments.out, echo=_log)


# --- train and compare -----------------------------------------------------------------------------------------------


def _add_run(parser: argparse.ArgumentParser, schema: type, leave_out: tuple[str, ...] = ()) -> None:
    parser.usage = "%(prog)s [CONFIG.toml] --out FOLDER [--resume] [--KEY VALUE ...]"
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings; flags go before what it says")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the folder of the run, new or to resume")
    parser.add_argument("--resume", action="store_true", help="go on in FOLDER, or start if nothing is there")
    add_keys(parser, schema, leave_out)


def _add_train(parser: argparse.ArgumentParser) -> None:
    from symexplin.lab.config import RunConfig

    _add_run(parser, RunConfig)


def _train(arguments: Arguments) -> None:
    from symexplin.lab.begin import saved_settings
    from symexplin.lab.config import RunConfig
    from symexplin.lab.run import MODEL, train

    saved = saved_settings(Path(arguments.out), launch().size) if arguments.resume else {}
    config = _configured(arguments, RunConfig, saved)
    result = train(config, arguments.out, resume=arguments.resume, echo=_log)
    if launch().rank == 0:
        _log(f"{result.final_loss:.4f} nats a token; plain weights: {Path(arguments.out, MODEL)}")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    from symexplin.lab.compare.sweep import CompareConfig

    _add_run(parser, CompareConfig, leave_out=("lr", "seed", "home", "preset", "start", "map"))


def _compare(arguments: Arguments) -> None:
    from symexplin.lab.compare.sweep import CONFIG, CompareConfig, compare_runs
    from symexplin.lab.settings import load_toml

    file = Path(arguments.out, CONFIG)
    saved = load_toml(file) if arguments.resume and file.exists() else {}
    config = _configured(arguments, CompareConfig, saved)
    compare_runs(config, arguments.out, resume=arguments.resume, echo=_log)


def _configured(arguments: Arguments, schema: type[T], table: dict[str, Any]) -> T:
    """Return the configuration of the run to resume, else the defaults, under the file and the flags given."""
    from symexplin.lab.settings import build, load_toml, merge

    if arguments.config is not None:
        table = merge(table, load_toml(arguments.config))
    return build(schema, merge(table, given(arguments, schema)))


# --- what a trained model can do -------------------------------------------------------------------------------------


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", help="a run's folder, one of its checkpoints, or a model.safetensors")


def _add_sample(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--prompt", default="", metavar="TEXT", help="the beginning; empty: a new document")
    parser.add_argument("--length", type=int, default=200, metavar="N", help="tokens to write (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens alone")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: %(default)s)")


def _sample(arguments: Arguments) -> None:
    from symexplin.lab.evaluate import sample
    from symexplin.lab.trained import load_trained

    model, tokenizer, _ = load_trained(arguments.model)
    options = {name: getattr(arguments, name) for name in ("temperature", "top_k", "seed")}
    _say(sample(model, tokenizer, arguments.prompt, arguments.length, **options))


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="a new folder")


def _export(arguments: Arguments) -> None:
    from symexplin.lab.trained import load_trained
    from symexplin.lab.weights.export import export_transformers

    model, tokenizer, file = load_trained(arguments.model)
    export_transformers(model, arguments.out, file, tokenizer.end, echo=_say)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="of a run, a comparison or a table of symexplin reproduce")


def _report(arguments: Arguments) -> None:
    from symexplin.experiments.report import report_table
    from symexplin.experiments.tables import TABLE
    from symexplin.lab.report.pages import report

    is_table = Path(arguments.folder, TABLE).exists()
    _say(str(report_table(arguments.folder) if is_table else report(arguments.folder)))


# --- files of weights ------------------------------------------------------------------------------------------------


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a safetensors file, or a folder of them")
    parser.add_argument("target", metavar="TARGET", help="the safetensors file to write, a new one")


# Keys of [sel] that say how scales learn, which a file of weights does not.
_OF_RUNS = ("multiplier_lr", "anneal_steps")


def _add_map(parser: argparse.ArgumentParser, start: bool) -> None:
    from symexplin.lab.maps import LAB_PRESETS, CurveConfig

    # "carried", the default of runs, goes with a model's width.
    presets = [name for name in LAB_PRESETS if name != "carried"]
    text = "the map: one of the paper's, or beta by matrix (default: default)"
    parser.add_argument("--preset", choices=presets, default=argparse.SUPPRESS, metavar="PRESET", help=text)
    add_keys(parser, CurveConfig, leave_out=("home", "preset", *_OF_RUNS, *(() if start else ("start",))))


def _fold(arguments: Arguments) -> None:
    from symexplin.lab.weights.folding import fold_file

    fold_file(arguments.source, arguments.target, echo=_say)


def _add_invert(parser: argparse.ArgumentParser) -> None:
    _add_files(parser)
    _add_map(parser, start=True)


def _invert(arguments: Arguments) -> None:
    from symexplin.lab.maps import CurveConfig, named_map
    from symexplin.lab.settings import build
    from symexplin.lab.weights.folding import invert_file

    curve = build(CurveConfig, {"preset": "default", **given(arguments, CurveConfig)})
    invert_file(arguments.source, arguments.target, named_map(curve.preset, curve.map), curve.start, echo=_say)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a safetensors file, or a folder of them")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--figures", metavar="FOLDER", help="draw histogram.png and growth.png there")
    _add_map(parser, start=False)


def _inspect(arguments: Arguments) -> None:
    from symexplin.lab.files import write_json
    from symexplin.lab.maps import CurveConfig, named_map
    from symexplin.lab.settings import build
    from symexplin.lab.weights.inspect import format_inspection, inspect_file
    from symexplin.lab.weights.inspect_figures import draw_inspection

    curve = build(CurveConfig, {"preset": "default", **given(arguments, CurveConfig)})
    found = inspect_file(arguments.source, config=named_map(curve.preset, curve.map), progress=True)
    _say(format_inspection(found))
    if arguments.json is not None:
        write_json(arguments.json, found.to_dict())
    if arguments.figures is not None:
        folder = Path(arguments.figures)
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in draw_inspection(found).items():
            figure.savefig(folder / f"{name}.png", dpi=150)


# --- figures of the paper --------------------------------------------------------------------------------------------


def _add_figure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [NAME [SOURCE ...]] [--out FOLDER]"
    parser.add_argument("name", nargs="?", metavar="NAME", help="which one; without a name all are listed")
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="runs, comparisons or weights, as the list says")
    parser.add_argument("--out", default="figures", metavar="FOLDER", help="for both files (default: %(default)s)")


def _figure(arguments: Arguments) -> None:
    from symexplin.experiments.figures import draw, format_figures, save_figure

    if arguments.name is None:
        _say(format_figures())
        return
    for path in save_figure(draw(arguments.name, arguments.sources), arguments.out, arguments.name):
        _say(str(path))


# --- the rest --------------------------------------------------------------------------------------------------------


def _add_demo(parser: argparse.ArgumentParser) -> None:
    from symexplin.lab.demo import DemoConfig

    parser.add_argument("--out", default="runs/demo", metavar="FOLDER", help="for the results (default: %(default)s)")
    add_keys(parser, DemoConfig)


def _demo(arguments: Arguments) -> None:
    from symexplin.lab.demo import DemoConfig, run_demo
    from symexplin.lab.settings import build

    run_demo(arguments.out, build(DemoConfig, given(arguments, DemoConfig)), echo=_log)


def _add_reproduce(parser: argparse.ArgumentParser) -> None:
    from symexplin.experiments.reproduce import ReproduceConfig

    parser.usage = "%(prog)s [NAME] [--scale SCALE] [--out FOLDER] [--resume] [--plan] [--KEY VALUE ...]"
    parser.add_argument("name", nargs="?", metavar="NAME", help="of a table, or a TOML file of one; none: list them")
    parser.add_argument("--out", metavar="FOLDER", help="new or to resume (default: runs/reproduce/NAME-SCALE)")
    parser.add_argument("--resume", action="store_true", help="go on in FOLDER, or start if nothing is there")
    parser.add_argument("--plan", action="store_true", help="print what would run and what is assumed, no more")
    parser.add_argument("--results", metavar="FILE.csv", help="append a row for each run there")
    add_keys(parser, ReproduceConfig)


def _reproduce(arguments: Arguments) -> None:
    from symexplin.experiments.reproduce import ReproduceConfig, plan_lines, reproduce
    from symexplin.experiments.tables import names
    from symexplin.lab.settings import build

    if arguments.name is None:
        for name, title in names().items():
            _say(f"{name:22} {title}")
        return
    config = build(ReproduceConfig, given(arguments, ReproduceConfig))
    out = arguments.out
    if out is None:
        out = Path("runs", "reproduce", f"{Path(arguments.name).stem}-{config.scale}")
    if arguments.plan:
        for line in plan_lines(config.table(arguments.name, out), config.panels):
            _say(line)
        return
    reproduce(arguments.name, out, config, resume=arguments.resume, results=arguments.results, echo=_log)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from symexplin.lab.bench.config import BenchConfig

    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings; flags go before what it says")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="a new folder for the results")
    add_keys(parser, BenchConfig)


def _bench(arguments: Arguments) -> None:
    from symexplin.lab.bench.config import BenchConfig
    from symexplin.lab.bench.run import run_bench

    run_bench(_configured(arguments, BenchConfig, {}), arguments.out, echo=_log, progress=True)


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh", "fish"), metavar="SHELL", help="bash, zsh, tcsh, fish")


def _completion(arguments: Arguments) -> None:
    import shtab

    from symexplin.cli import make_parser

    _say(shtab.complete(make_parser(), arguments.shell))


COMMANDS = {
    "prepare": Command(_add_prepare, _prepare),
    "train": Command(_add_train, _train, parallel=True),
    "compare": Command(_add_compare, _compare, parallel=True),
    "sample": Command(_add_sample, _sample),
    "export": Command(_add_export, _export),
    "report": Command(_add_report, _report),
    "inspect": Command(_add_inspect, _inspect),
    "invert": Command(_add_invert, _invert),
    "fold": Command(_add_files, _fold),
    "figure": Command(_add_figure, _figure),
    "demo": Command(_add_demo, _demo),
    "bench": Command(_add_bench, _bench),
    "reproduce": Command(_add_reproduce, _reproduce),
    "completion": Command(_add_completion, _completion),
}
