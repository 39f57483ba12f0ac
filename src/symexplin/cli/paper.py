"""The commands for what the paper shows: its tables and its figures."""

import argparse
from pathlib import Path

from symexplin.cli.command import Arguments, Command, log, say
from symexplin.cli.parser import add_keys, given

__all__ = ["COMMANDS"]


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
            say(f"{name:22} {title}")
        return
    config = build(ReproduceConfig, given(arguments, ReproduceConfig))
    out = arguments.out
    if out is None:
        out = Path("runs", "reproduce", f"{Path(arguments.name).stem}-{config.scale}")
    if arguments.plan:
        for line in plan_lines(config.table(arguments.name, out), config.panels):
            say(line)
        return
    reproduce(arguments.name, out, config, resume=arguments.resume, results=arguments.results, echo=log)


def _add_figure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [NAME [SOURCE ...]] [--out FOLDER]"
    parser.add_argument("name", nargs="?", metavar="NAME", help="which one; without a name all are listed")
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="runs, comparisons or weights, as the list says")
    parser.add_argument("--out", default="figures", metavar="FOLDER", help="for both files (default: %(default)s)")


def _figure(arguments: Arguments) -> None:
    from symexplin.experiments.figures import draw, format_figures, save_figure

    if arguments.name is None:
        say(format_figures())
        return
    for path in save_figure(draw(arguments.name, arguments.sources), arguments.out, arguments.name):
        say(str(path))


COMMANDS = {
    "reproduce": Command(_add_reproduce, _reproduce),
    "figure": Command(_add_figure, _figure),
}
