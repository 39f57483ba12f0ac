"""Whether a gain is that of a larger learning rate: final losses over the rate, and over the step that it makes."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import symexplin as sel
from symexplin.experiments.figures.sheet import finish, sheet
from symexplin.experiments.figures.sources import Panel, comparisons
from symexplin.lab.build import build_model
from symexplin.lab.config import RunConfig
from symexplin.lab.report.charts import draw_chart
from symexplin.lab.report.figures import Sweep, sweep_lines
from symexplin.lab.report.probe import read_run
from symexplin.lab.run import check_weights
from symexplin.validation import naming

__all__ = ["learning_rates", "start_slope"]

_LOSS = "final held-out loss (nats a token)"


def learning_rates(sources: Sequence[Path]) -> Figure:
    """Draw every arm's final loss over its learning rate, and over that times its map's mean slope at the start.

    Adam's steps are about a learning rate long in raw weights, and longer by the slope in effective ones. Where a gain
    is that of a larger step, the lines of the right panel lie on each other.

    Raises:
        FileNotFoundError, ValueError: sources without a finished comparison, or without the runs' configurations.
    """
    panels = comparisons(sources)
    figure, rows = sheet(len(panels), 2, panel=(6.8, 4.8))
    for (left, right), panel in zip(rows, panels, strict=True):
        slopes = {arm: _slope_of(panel, arm) for arm in panel.arms}
        scaled = [Sweep(arm, f"{panel.label(arm)} (× {slope:.2f})", slope) for arm, slope in slopes.items()]
        _draw(left, panel, [sweep._replace(factor=1.0) for sweep in scaled])
        title = "width {}, depth {}: by learning rate".format(*panel.size)
        finish(left, title, "peak learning rate (log)", _LOSS, columns=0)
        _draw(right, panel, scaled)
        label = "peak learning rate × mean slope at the start (log)"
        finish(right, "By the step in effective weights", label, _LOSS, columns=0)
        right.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), title="map (× slope)", alignment="left")
    return figure


def _draw(axes: Axes, panel: Panel, sweeps: Sequence[Sweep]) -> None:
    draw_chart(axes, sweep_lines(panel.found["runs"], sweeps), log="x", ticks=panel.lrs)


def _slope_of(panel: Panel, arm: str) -> float:
    folder = panel.folder / next(run["folder"] for run in panel.found["runs"] if run["arm"] == arm)
    run = read_run(folder)
    with naming(str(folder)):
        check_weights(folder, run.facts, run.config.train.weights)
    return start_slope(run.config)


def start_slope(config: RunConfig) -> float:
    """Return the mean slope, d w_eff / d w, of the curved matrices at the start of a run; 1 for ordinary weights.

    Drawn weights are those of one block, for all blocks are drawn alike; given ones all.

    >>> start_slope(RunConfig("data"))  # preset "carried" at width 128
    1.17...
    """
    if config.sel.home == "none":
        return 1.0
    curve = dataclasses.replace(config.sel, home="module")  # one map in both homes; layers have it before any step
    compute = dataclasses.replace(config.compute, device="cpu")
    model = config.model if config.train.weights else dataclasses.replace(config.model, depth=1)
    with torch.random.fork_rng(devices=[]):  # layers draw weights before they get theirs
        return sel.stats(build_model(dataclasses.replace(config, model=model, sel=curve, compute=compute)))[
            "slope/mean"
        ]
