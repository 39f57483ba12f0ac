"""Distances of weights from their start, and the steps that these take: figure 15 of the paper."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from matplotlib.figure import Figure

from symexplin.experiments.figures.sheet import finish, sheet
from symexplin.experiments.figures.sources import is_run, run_of, weights_at_end, weights_of
from symexplin.experiments.figures.weights import curved_parts
from symexplin.lab.report.charts import GUIDE_LINE, Floats, Line, draw_chart, outline
from symexplin.lab.report.probe import read_run

__all__ = ["Distances", "optimization_distance"]

# Twenty bins per decade; smaller and larger distances count in the first and the last.
_EDGES: Floats = np.geomspace(1e-9, 1e3, 12 * 20 + 1)
_PAPER_LR = 3e-4  # for files without a configuration


class Distances(NamedTuple):
    """Distances in bins between :data:`_EDGES`, their mean and the largest."""

    counts: Floats
    mean: float
    largest: float

    @classmethod
    def of(cls, parts: Iterable[tuple[Floats, float]]) -> Self:
        """Count (distances, number of weights that each of them represents).

        >>> found = Distances.of([(np.array([0.1, 0.3]), 2.0), (np.array([0.0]), 4.0)])
        >>> float(found.counts.sum()), found.mean, found.largest
        (8.0, 0.1, 0.3)
        """
        counts, total, largest = np.zeros(len(_EDGES) - 1), 0.0, 0.0
        for values, each in parts:
            counts += each * np.histogram(np.clip(values, _EDGES[0], _EDGES[-1]), _EDGES)[0]
            total += each * float(values.sum())
            largest = max(largest, float(values.max(initial=0.0)))
        return cls(counts, total / max(1.0, float(counts.sum())), largest)

    def ranks(self) -> tuple[Floats, Floats]:
        """Return the number of weights at each distance or beyond, and the distance, the farthest weight first."""
        beyond = np.cumsum(self.counts[::-1])
        far = self.largest > _EDGES[:-1][::-1]
        return np.append(1.0, beyond[far]), np.append(self.largest, _EDGES[:-1][::-1][far])


def optimization_distance(sources: Sequence[Path]) -> Figure:
    """Draw distances from the start, and the steps they take.

    The start of a run is drawn again from its configuration. That of another file is not known, so that a draw from
    Xavier's uniform distribution replaces it. A step of Adam's is about the learning rate long.
    """
    source = sources[0]
    folder = run_of(source, curved=False) if is_run(source) else None
    if folder is not None:
        lr, start = read_run(folder).config.train.lr, "its start"
        found = Distances.of(_of_run(folder))
    else:
        lr, start = _PAPER_LR, "a fresh Xavier start"
        found = Distances.of(_of_file(weights_of(source)))
    if not found.largest:
        raise ValueError(f"sources must name weights that have moved, got {str(source)!r}")
    figure, ((left, right),) = sheet(1, 2, size=(5.4, 4.2))
    seen = np.flatnonzero(found.counts)
    shown = slice(seen[0], seen[-1] + 1)
    outline(left, found.counts[shown], _EDGES[seen[0] : seen[-1] + 2], f"distance from {start}", 0, filled=True)
    left.axvline(found.mean, **GUIDE_LINE, label=f"mean {found.mean:.2g}")
    left.axvline(found.largest, **{**GUIDE_LINE, "linestyle": "-"}, label=f"largest {found.largest:.2g}")
    left.set_xscale("log")
    left.set_yscale("log")
    finish(left, "Distances", "|w − start| (log scale)", "weights per bin (log scale)")
    rank, distance = found.ranks()
    line, mean = Line("weights, the farthest first", rank, distance / lr), found.mean / lr
    guide = Line(f"mean: {mean:,.3g} steps", [1.0, rank[-1]], [mean, mean], kind="guide")
    draw_chart(right, [guide, line])
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_ylim(bottom=0.02 * mean)
    finish(right, f"The farthest takes {found.largest / found.mean:.3g} × the mean",
           "rank of the weight (log scale)", f"steps at lr {lr:g} (log scale)")  # fmt: skip
    return figure


def _of_run(folder: Path) -> Iterator[tuple[Floats, float]]:
    for role in weights_at_end(folder).roles.values():
        gone = (role.effective.double() - role.initial.double()).abs().numpy()
        yield gone, role.total / len(gone)


def _of_file(path: Path) -> Iterator[tuple[Floats, float]]:
    random = np.random.default_rng(0)
    for _, values, bound in curved_parts(path):
        yield np.abs(values - random.uniform(-bound, bound, len(values))), 1.0
