"""Whether a gain is that of a larger learning rate."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

import symexplin as sel
from symexplin.experiments.comparison import Evidence
from symexplin.experiments.figures.sheet import finish, sheet
from symexplin.experiments.figures.sources import comparisons
from symexplin.lab.begin import check_weights
from symexplin.lab.build import build_model
from symexplin.lab.config import RunConfig
from symexplin.lab.report.charts import draw_chart
from symexplin.lab.report.figures import Sweep, sweep_lines
from symexplin.lab.report.probe import read_run
from symexplin.validation import naming

__all__ = ["learning_rates", "start_slope"]

_LOSS = "final held-out loss (nats per token)"


def learning_rates(sources: Sequence[Path]) -> Figure:
    """Draw final losses by learning rate, and by the step that it makes of effective weights.

    Adam's steps are about a learning rate long in raw weights, and longer by the slope in effective ones. Where a gain
    is that of a larger step, the lines of the right axes coincide.
    """
    found = comparisons(sources)
    figure, rows = sheet(len(found), 2, size=(6.8, 4.8))
    for (left, right), compared in zip(rows, found, strict=True):
        slopes = {arm: _slope_of(compared, arm) for arm in compared.arms}
        scaled = [Sweep(arm, f"{compared.label(arm)} (× {slope:.2f})", slope) for arm, slope in slopes.items()]
        for axes, sweeps in ((left, [sweep._replace(factor=1.0) for sweep in scaled]), (right, scaled)):
            draw_chart(axes, sweep_lines(compared.found["runs"], sweeps), log="x", ticks=compared.lrs)
        title = "width {}, depth {}: by learning rate".format(*compared.size)
        finish(left, title, "peak learning rate (log)", _LOSS, columns=0)
        label = "peak learning rate × mean slope at the start (log)"
        finish(right, "By the step in effective weights", label, _LOSS, columns=0)
        right.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), title="map (× slope)", alignment="left")
    return figure


def _slope_of(compared: Evidence, arm: str) -> float:
    folder = compared.folder / next(run["folder"] for run in compared.found["runs"] if run["arm"] == arm)
    run = read_run(folder)
    with naming(str(folder)):
        check_weights(folder, run.facts, run.config.train.weights)
    return start_slope(run.config)


def start_slope(config: RunConfig) -> float:
    """Return the mean slope, d w_eff / d w, of the curved matrices at the start of a run; 1 for ordinary weights.

    Drawn weights are those of one block, since all blocks are drawn alike. Given weights are those of all blocks.

    >>> start_slope(RunConfig("data"))  # preset "carried" at width 128
    1.17...
    """
    if config.sel.home == "none":
        return 1.0
    curve = dataclasses.replace(config.sel, home="module")  # layers have the map before any step
    compute = dataclasses.replace(config.compute, device="cpu")
    model = config.model if config.train.weights else dataclasses.replace(config.model, depth=1)
    with torch.random.fork_rng(devices=[]):  # layers draw weights before they get theirs
        built = build_model(dataclasses.replace(config, model=model, sel=curve, compute=compute))
        return sel.stats(built)["slope/mean"]
