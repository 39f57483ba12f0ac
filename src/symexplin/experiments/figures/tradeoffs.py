"""Figures beyond the paper: loss by sparsity, old against new text, and the difference by size."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from symexplin.experiments.comparison import Evidence, spread_of
from symexplin.experiments.figures.common import comparisons, panel, sheet
from symexplin.experiments.measures import compressions, fronts, size_of
from symexplin.lab.report.charts import Line

__all__ = ["compression", "forgetting", "trend"]

_LOSS = "held-out loss (nats per token)"
_WHEN = {"once": "at once", "retrained": "after a tenth of the steps"}
_TALLEST = 1.4  # times the lowest loss: plain weights that lose most of the model leave the panel
_BETWEEN = 40  # points of a line between two ends


def compression(sources: Sequence[Path]) -> Figure:
    """Draw the loss by the share of weights set to zero, at once and after retraining."""
    compared = comparisons(sources)[0]
    rows = [(share, row) for row in compressions(compared) if (share := _share_of(row["level"])) is not None]
    if not rows:
        raise ValueError("sources must name a comparison whose runs have compressed.json ([log] compress = true)")
    figure, places = sheet(2, 2, (6.8, 6.4))
    families = list(dict.fromkeys(row["family"] for _, row in rows))
    ceiling = _TALLEST * min(row["loss"] for _, row in rows)
    for axes, (when, words) in zip(places, _WHEN.items(), strict=True):
        lines = []
        for style, family in enumerate(families):
            points = sorted(
                (share, row["loss"])
                for share, row in rows
                if row["family"] == family and (row["when"] == when or share == 0.0)
            )
            lines.append(Line(family, [share for share, _ in points], [loss for _, loss in points], style))
        panel(axes, f"Pruned by magnitude, {words}", "share of zeros", _LOSS, lines, columns=2)
        axes.set_ylim(top=min(axes.get_ylim()[1], ceiling))
    return figure


def _share_of(level: str) -> float | None:
    """Return the share of zeros of a level of compression; None where it is another kind."""
    if level == "dense":
        return 0.0
    return float(level) if level.replace(".", "").isdigit() else None


def forgetting(sources: Sequence[Path]) -> Figure:
    """Draw the loss on the old text by that on the new, along each family's best points."""
    compared = comparisons(sources)[0]
    known = fronts(compared)
    if not known:
        raise ValueError("sources must name a comparison whose runs measured an old text ([log] old)")
    figure, places = sheet(2, 2, (6.8, 6.4))
    between = [front for front in known if front.family.endswith("interpolated")]
    for axes, title, chosen in zip(
        places,
        ("Last weights", "Interpolated from the first weights too"),
        ([front for front in known if front not in between], between),
        strict=True,
    ):
        lines = []
        for style, front in enumerate(chosen):
            low = max(points[0][0] for points in front.points.values())
            high = min(points[-1][0] for points in front.points.values())
            news = [low + (high - low) * i / _BETWEEN for i in range(_BETWEEN + 1)] if high > low else []
            olds = [statistics.fmean(front.at(new).values()) for new in news]
            lines.append(Line(front.family.removesuffix(", interpolated"), news, olds, style))
        panel(axes, title, "loss on the new text", "loss on the old text", lines, columns=2)
    return figure


def trend(sources: Sequence[Path]) -> Figure:
    """Draw the difference from the baseline by width, or by steps, each arm at its own best learning rate."""
    found = comparisons(sources)
    scale, sizes = size_of(found)
    figure, (axes,) = sheet(1, 1, (7.0, 4.8))
    arms = [arm for arm in found[0].arms[1:] if all(arm in compared.arms for compared in found)]
    lines = [Line("", sizes, [0.0] * len(sizes), kind="guide")]
    for style, arm in enumerate(arms):
        spreads = [_spread(compared, arm) for compared in found]
        means = [mean for mean, _ in spreads]
        band = [mean - error for mean, error in spreads], [mean + error for mean, error in spreads]
        lines.append(Line(found[0].label(arm), sizes, means, style, band=band))
    label = f"difference from {found[0].label(found[0].arms[0])} (nats per token)"
    with mpl.rc_context({"axes.formatter.min_exponent": 6}):
        panel(axes, f"By {scale}", f"{scale} (log)", label, lines, columns=2, log="x", ticks=sizes)
    return figure


def _spread(compared: Evidence, arm: str) -> tuple[float, float]:
    """Return mean and standard error of an arm's differences at its own best learning rate; NaN if not finite."""
    deltas = compared.best(arm)["deltas"]
    if any(delta is None for delta in deltas):
        return math.nan, math.nan
    spread = spread_of(deltas)
    return spread.mean, spread.error or 0.0
