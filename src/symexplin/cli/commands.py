"""What each command takes and does; the work is the laboratory's, which is imported when a command runs."""

import argparse
from pathlib import Path

from symexplin.cli import paper, weights
from symexplin.cli.command import Arguments, Command, configured, log, say
from symexplin.cli.parser import add_keys, given
from symexplin.lab.launch import launch

__all__ = ["COMMANDS"]


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
    prepare(config, arguments.out, echo=log)


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
    config = configured(arguments, RunConfig, saved)
    result = train(config, arguments.out, resume=arguments.resume, echo=log)
    if launch().rank == 0:
        log(f"{result.final_loss:.4f} nats a token; plain weights: {Path(arguments.out, MODEL)}")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    from symexplin.lab.compare.grid import CompareConfig

    _add_run(parser, CompareConfig, leave_out=("lr", "seed", "home", "preset", "start", "map"))


def _compare(arguments: Arguments) -> None:
    from symexplin.lab.compare.grid import CONFIG, CompareConfig
    from symexplin.lab.compare.sweep import compare_runs
    from symexplin.lab.settings import load_toml

    file = Path(arguments.out, CONFIG)
    saved = load_toml(file) if arguments.resume and file.exists() else {}
    config = configured(arguments, CompareConfig, saved)
    compare_runs(config, arguments.out, resume=arguments.resume, echo=log)


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
    say(sample(model, tokenizer, arguments.prompt, arguments.length, **options))


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="a new folder")


def _export(arguments: Arguments) -> None:
    from symexplin.lab.trained import load_trained
    from symexplin.lab.weights.export import export_transformers

    model, tokenizer, file = load_trained(arguments.model)
    export_transformers(model, arguments.out, file, tokenizer.end, echo=say)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="of a run, a comparison or a table of symexplin reproduce")


def _report(arguments: Arguments) -> None:
    from symexplin.experiments.report import report_table
    from symexplin.experiments.tables import TABLE
    from symexplin.lab.report.pages import report

    is_table = Path(arguments.folder, TABLE).exists()
    say(str(report_table(arguments.folder) if is_table else report(arguments.folder)))


# --- the rest --------------------------------------------------------------------------------------------------------


def _add_demo(parser: argparse.ArgumentParser) -> None:
    from symexplin.lab.demo import DemoConfig

    parser.add_argument("--out", default="runs/demo", metavar="FOLDER", help="for the results (default: %(default)s)")
    add_keys(parser, DemoConfig)


def _demo(arguments: Arguments) -> None:
    from symexplin.lab.demo import DemoConfig, run_demo
    from symexplin.lab.settings import build

    run_demo(arguments.out, build(DemoConfig, given(arguments, DemoConfig)), echo=log)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from symexplin.lab.bench.config import BenchConfig

    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings; flags go before what it says")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="a new folder for the results")
    add_keys(parser, BenchConfig)


def _bench(arguments: Arguments) -> None:
    from symexplin.lab.bench.config import BenchConfig
    from symexplin.lab.bench.run import run_bench

    run_bench(configured(arguments, BenchConfig, {}), arguments.out, echo=log, progress=True)


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh", "fish"), metavar="SHELL", help="bash, zsh, tcsh, fish")


def _completion(arguments: Arguments) -> None:
    import shtab

    from symexplin.cli import make_parser

    say(shtab.complete(make_parser(), arguments.shell))


COMMANDS = {
    "prepare": Command(_add_prepare, _prepare),
    "train": Command(_add_train, _train, parallel=True),
    "compare": Command(_add_compare, _compare, parallel=True),
    "sample": Command(_add_sample, _sample),
    "export": Command(_add_export, _export),
    "report": Command(_add_report, _report),
    **weights.COMMANDS,
    **paper.COMMANDS,
    "demo": Command(_add_demo, _demo),
    "bench": Command(_add_bench, _bench),
    "completion": Command(_add_completion, _completion),
}
