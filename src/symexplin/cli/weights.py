"""The commands for files of weights: fold, invert, inspect."""

import argparse

from symexplin.cli.command import Arguments, Command, say
from symexplin.cli.parser import add_keys, given

__all__ = ["COMMANDS"]


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a safetensors file, or a folder of them")
    parser.add_argument("target", metavar="TARGET", help="the safetensors file to write, a new one")


# Keys of [sel] that say how scales learn, which a file of weights does not.
_OF_RUNS = ("multiplier_lr", "anneal_steps")


def _add_map(parser: argparse.ArgumentParser, start: bool) -> None:
    from symexplin.lab.maps import LAB_PRESETS, CurveConfig

    # "carried", the default of runs, goes with a model's width.
    presets = [name for name in LAB_PRESETS if name != "carried"]
    text = "the map: one of the paper's, or beta by matrix (default: "
    text += "default)" if start else "the one that the model was trained with, else default)"
    parser.add_argument("--preset", choices=presets, default=argparse.SUPPRESS, metavar="PRESET", help=text)
    add_keys(parser, CurveConfig, leave_out=("home", "preset", *_OF_RUNS, *(() if start else ("start",))))


def _fold(arguments: Arguments) -> None:
    from symexplin.lab.weights.folding import fold_file

    fold_file(arguments.source, arguments.target, echo=say)


def _add_invert(parser: argparse.ArgumentParser) -> None:
    _add_files(parser)
    _add_map(parser, start=True)


def _invert(arguments: Arguments) -> None:
    from symexplin.lab.maps import CurveConfig, named_map
    from symexplin.lab.settings import build
    from symexplin.lab.weights.folding import invert_file

    curve = build(CurveConfig, {"preset": "default", **given(arguments, CurveConfig)})
    invert_file(arguments.source, arguments.target, named_map(curve.preset, curve.map), curve.start, echo=say)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a safetensors file, or a folder of them")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--figures", metavar="FOLDER", help="draw weight_distribution and heavy_tail there")
    _add_map(parser, start=False)


def _inspect(arguments: Arguments) -> None:
    from symexplin.lab.files import write_json
    from symexplin.lab.maps import CurveConfig, named_map
    from symexplin.lab.settings import build
    from symexplin.lab.weights.inspect import format_inspection, inspect_file

    config, flags = None, given(arguments, CurveConfig)
    if flags:
        curve = build(CurveConfig, {"preset": "default", **flags})
        config = named_map(curve.preset, curve.map)
    found = inspect_file(arguments.source, config=config, progress=True)
    say(format_inspection(found))
    if arguments.json is not None:
        write_json(arguments.json, found.to_dict())
    if arguments.figures is not None:
        from symexplin.experiments.figures import draw, save_figure

        for name in ("weight_distribution", "heavy_tail"):
            save_figure(draw(name, [arguments.source]), arguments.figures, name)


COMMANDS = {
    "inspect": Command(_add_inspect, _inspect),
    "invert": Command(_add_invert, _invert),
    "fold": Command(_add_files, _fold),
}
