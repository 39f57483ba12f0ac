"""Every table and picture of differences in README, docs and results, from the rows of results/mini.csv.

    python benchmarks/evidence.py            # write them
    python benchmarks/evidence.py --check    # fail if a page or a picture is not what the rows say

Each variant counts at its own best learning rate, and differences to the baseline are taken seed by seed, as in every
comparison (symexplin.lab.compare.comparison); symexplin.lab.compare.interval has the rule for words. `tables.py` says
what the tables of README and docs show; `results/experiments.md` has every variant.
"""

import argparse
import functools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory
from rows import Compared, Difference, Experiment, Key, Place, Rows, by_key, difference, experiments
from tables import (
    AUTHOR,
    AUTHOR_512,
    AUTHOR_OURS,
    AUTHOR_WIDE,
    ONE,
    ONE_LAYER_NORM,
    ONE_NO_BIAS,
    PAGES,
    TWELVE,
    TWELVE_INIT,
    TWELVE_LAYER_NORM,
    written,
)

from symexplin.lab.compare.comparison import Comparison
from symexplin.lab.compare.grid import LABELS
from symexplin.lab.report.charts import COLORS, GUIDE, STYLE, UNDATED, draw_sweep, sheet, styles

ROOT = Path(__file__).parents[1]
PAGE, IMAGES = ROOT / "results/experiments.md", ROOT / "docs/images"


def lines(rows: Rows, experiment: Experiment, comparison: Comparison) -> Iterator[str]:
    """Yield a line for each variant: the setting with the baseline's loss, the variant, its difference."""
    base, *others = comparison.best
    title = f"**{experiment.setting}**<br>{base.variant}, {base.lr:g}: {base.loss:.4f} ({experiment.key.commit})"
    for row in others:
        rate = "" if row.lr is None else f", {row.lr:g}"
        place = Place(experiment.key, row.variant, base.variant)
        yield f"| {title} | {row.variant}{rate} | {difference(rows, place) if row.interval else 'diverged'} |"
        title = "..."


def page(text: str, compared: Sequence[Compared]) -> str:
    """Return the page with its tables replaced; the comment before each names the tables that its rows are of."""
    rows, left = by_key(compared), {experiment.key.table for experiment, _ in compared}

    def table(place: re.Match[str]) -> str:
        names = place[1].split(", ")
        left.difference_update(names)
        body = ["| trained; baseline | variant, learning rate | difference |", "|---|---|---|"]
        for name in names:
            body += [line for pair in compared if pair[0].key.table == name for line in lines(rows, *pair)]
        return f"<!-- rows of {place[1]} -->\n\n" + "\n".join(body) + "\n"

    text = re.sub(r"(?m)^<!-- rows of (.*) -->\n\n?(?:\|.*\n)*", table, text)
    if left:
        raise SystemExit(f"{PAGE} has no table for the rows of {', '.join(sorted(left))}")
    return text


# The picture of README: by setting what was trained; for each method the experiment (table, panel, commit, steps) and
# the variant of it that is this method. All are compared with the AdamW of the first experiment.
METHODS = {
    "default": "default",
    "paper": "paper's method",
    "paper-init": "paper's method + init.",
    "number": "one scale per matrix",
    "qk-bias": "QK-bias AdamW",
}
STYLES = styles(["AdamW", *METHODS])
SHOWN: Mapping[str, Mapping[str, tuple[Key, str]]] = {
    "width 1024, 1 layer, 1,500 steps": {
        "default": (ONE, "exp"),
        "paper": (ONE, "matched"),
        "paper-init": (ONE, "paper"),
        "number": (ONE, "number"),
        "qk-bias": (ONE, "qk_all"),
    },
    "the same without biases": {
        "default": (ONE_NO_BIAS, "default"),
        "paper": (ONE_NO_BIAS, "matched"),
        "number": (ONE_NO_BIAS, "number"),
    },
    "the same with biases, LayerNorm": {
        "paper": (ONE_LAYER_NORM, "matched"),
        "paper-init": (ONE_LAYER_NORM, "paper"),
        "number": (ONE_LAYER_NORM, "number"),
    },
    "width 1024, 1 layer, the author's model": {
        "paper": (AUTHOR_WIDE, "matched"),
        "number": (AUTHOR_WIDE, "number"),
    },
    "width 1024, 12 layers, 1,000 steps": {
        "default": (TWELVE, "default"),
        "paper": (TWELVE, "matched"),
        "paper-init": (TWELVE_INIT, "paper"),
        "number": (TWELVE, "number"),
        "qk-bias": (TWELVE, "qk_all"),
    },
    "the same, LayerNorm": {
        "paper": (TWELVE_LAYER_NORM, "matched"),
        "paper-init": (TWELVE_LAYER_NORM, "paper"),
    },
    "width 256, 8 layers, 300 steps": {
        "paper": (AUTHOR_OURS, "matched"),
        "paper-init": (AUTHOR_OURS, "paper"),
        "number": (AUTHOR_OURS, "number"),
        "qk-bias": (AUTHOR_OURS, "qk_all"),
    },
    "the same, the author's model": {
        "paper": (AUTHOR, "matched"),
        "paper-init": (AUTHOR, "paper"),
        "number": (AUTHOR, "number"),
        "qk-bias": (AUTHOR, "qk_all"),
    },
    "width 512, 8 layers, the author's model": {
        "paper": (AUTHOR_512, "matched"),
        "number": (AUTHOR_512, "number"),
    },
    "width 64, 2 layers, 200 steps": {
        "default": (Key("widths", "64x2", "ff759b9", 200), "default"),
        "paper-init": (Key("widths", "64x2", "7a0cb4d", 200), "mismatch"),
    },
    "width 64, 3 layers, 600 steps": {
        "number": (Key("attempts", "64x3", "f8f95e5", 600), "number"),
    },
    "width 128, 2 layers, 700 steps": {
        "default": (Key("widths", "128x2", "ff759b9", 700), "default"),
        "paper-init": (Key("widths", "128x2", "7a0cb4d", 700), "mismatch"),
    },
    "width 128, 4 layers, 600 steps": {
        "default": (Key("exp_only", "128x4", "d3fc95d", 600), "exp_only-ff"),
        "paper-init": (Key("exp_only", "128x4", "d3fc95d", 600), "full"),
        "number": (Key("structured_linear", "128x4", "d3fc95d", 600), "linear-global"),
    },
    "the same, technical English, 1,800 steps": {"default": (Key("default", "128x4", "ff759b9", 1800), "default")},
    "width 256, 2 layers, 2,600 steps": {
        "default": (Key("widths", "256x2", "ff759b9", 2600), "default"),
        "paper-init": (Key("widths", "256x2", "7a0cb4d", 2600), "mismatch"),
    },
}


class Picture(NamedTuple):
    """A figure, and in words the numbers that it shows, by which the file is checked."""

    figure: Figure
    numbers: str

    def save(self, path: Path) -> None:
        """Write an SVG whose description has the numbers; its paths may differ with the version of matplotlib."""
        self.figure.savefig(path, metadata={**UNDATED, "Description": self.numbers})


def numbers_of(path: Path) -> str | None:
    """Return the numbers of a picture's file."""
    return ElementTree.parse(path).findtext(".//{http://purl.org/dc/elements/1.1/}description")


LOW, HIGH = -0.27, 0.25  # of the axis; what lies outside is written
HEADING, LINE = 0.27, 0.19  # inches
SIZE = 10  # points
LOOKS: Mapping[str, Mapping[str, Any]] = {
    "seed that did not choose a learning rate": {"marker": "o", "linestyle": ""},
    "seed that also chose one": {"marker": "o", "linestyle": "", "markerfacecolor": "white"},
    "99% interval over seeds that did not choose": {"linewidth": 5, "alpha": 0.4},
}


def forest(compared: Sequence[Compared]) -> Picture:
    """Draw how the methods of SHOWN differ from AdamW."""
    rows = by_key(compared)
    figure = Figure(figsize=(5.6, 13.0))
    axes = figure.add_axes((0.35, 0.122, 0.545, 0.859))
    write = functools.partial(axes.text, transform=blended_transform_factory(figure.transFigure, axes.transData))
    y, numbers = 0.0, []
    for setting, places in SHOWN.items():
        y += HEADING
        first, _ = next(iter(places.values()))
        adamw = rows[first].best[0].loss
        write(0.01, y, setting, weight="bold", va="center", fontsize=SIZE)
        write(0.99, y, f"AdamW {adamw:.3f}", ha="right", va="center", fontsize=SIZE)
        numbers.append(f"{setting}: AdamW {adamw:.4f}")
        for method, (key, variant) in places.items():
            y += LINE
            ours = difference(rows, Place(key, variant, against=first))
            assert ours is not None
            write(0.03, y, METHODS[method], va="center", fontsize=SIZE)
            write(0.99, y, minus(f"{ours.interval.mean:+.3f}"), ha="right", va="center", fontsize=SIZE)
            draw_difference(axes, y, ours, COLORS[STYLES[method] % len(COLORS)])
            numbers.append(f"{METHODS[method]}, lr {rows[key].best_lr(variant):g}: {described(ours)}")
    axes.axvline(0.0, color=COLORS[STYLES["AdamW"]], linewidth=1.2, zorder=1)
    axes.set(xlim=(LOW, HIGH), ylim=(y + HEADING, 0.0), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.tick_params(labelsize=SIZE)
    axes.set_xlabel("held-out loss minus AdamW's: nats per token\n(last six settings: per byte)", fontsize=SIZE)
    axes.text(-0.012, -0.06, "← better than AdamW", ha="right", fontsize=SIZE)
    axes.text(0.012, -0.06, "worse →", fontsize=SIZE)
    write(0.99, -0.06, "mean", ha="right", fontsize=SIZE)
    for label, look in LOOKS.items():
        axes.plot([], [], color=GUIDE, label=label, **look)
    figure.legend(loc="lower left", bbox_to_anchor=(0.01, 0.005), ncols=1, fontsize=SIZE)
    return Picture(figure, "\n".join(numbers))


def described(ours: Difference) -> str:
    """Return what is drawn of a difference."""
    seeds = (f"{seed}{'*' * (seed in ours.chose)} {value:+.4f}" for seed, value in sorted(ours.by_seed.items()))
    return f"{ours.interval}; seeds (* chose): {', '.join(seeds)}"


def draw_difference(axes: Axes, y: float, ours: Difference, color: str) -> None:
    """Draw a dot for each seed and a bar for the interval, if there is one."""
    full, hollow, bar = LOOKS.values()
    interval = ours.interval
    if interval.has_verdict:
        axes.plot([interval.low, interval.high], [y, y], color=color, solid_capstyle="butt", zorder=2, **bar)
    for seed, value in ours.by_seed.items():
        look = hollow if seed in ours.chose else full
        axes.plot([value], [y], color=color, markersize=4.5, markeredgewidth=1.1, zorder=3, **look)
    if beyond := sorted(value for value in ours.by_seed.values() if value > HIGH):
        words = f"{beyond[0]:+.2f} to {beyond[-1]:+.2f} →"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.text(HIGH, y, words, color=color, ha="right", va="center", fontsize=SIZE, bbox=box)


def minus(number: str) -> str:
    """Return a number with the sign that is as wide as a plus."""
    return number.replace("-", "\N{MINUS SIGN}")


def rates(compared: Sequence[Compared]) -> Picture:
    """Draw the final loss of seed 0 by learning rate, with one layer of width 1024."""
    names = {"AdamW": "AdamW", "exp": "default", "paper": "paper-init", "number": "number", "qk_all": "qk-bias"}
    whole = by_key(compared)[ONE]
    runs = [replace(run, variant=names[run.variant]) for run in whole.runs if run.variant in names and not run.seed]
    runs.sort(key=lambda run: (list(names.values()).index(run.variant), run.lr, run.seed))
    figure, (axes,) = sheet(1, 1, (5.4, 5.2))
    one = Comparison(tuple(runs), "AdamW", unit="nats per token")
    labels = {"AdamW": "AdamW"} | METHODS | LABELS
    draw_sweep(axes, "", one, {name: labels[name] for name in names.values()})
    return Picture(figure, "\n".join(f"{run.variant}, lr {run.lr:g}, seed {run.seed}: {run.loss:.4f}" for run in runs))


def main() -> None:
    """Write or check the pages and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a file is not up to date")
    options = parser.parse_args()
    compared = experiments()
    rows = by_key(compared)
    pages = {PAGE: page(PAGE.read_text(), compared)}
    pages |= {ROOT / name: written(rows, (ROOT / name).read_text()) for name in PAGES}
    with mpl.rc_context(STYLE):
        pictures = {IMAGES / "evidence.svg": forest(compared), IMAGES / "width-1024.svg": rates(compared)}
        if not options.check:
            for path, text in pages.items():
                path.write_text(text)
            for path, picture in pictures.items():
                picture.save(path)
    old = [path for path, text in pages.items() if path.read_text() != text]
    old += [path for path, picture in pictures.items() if numbers_of(path) != picture.numbers]
    for path in old:
        print(f"{path.relative_to(ROOT)} is not up to date: run python benchmarks/evidence.py", file=sys.stderr)
    sys.exit(bool(old))


if __name__ == "__main__":
    main()
