"""What tables beyond the paper measure: loss after compression, forgetting, tolerance of the learning rate, trends.

Arms whose labels begin alike, up to a colon, are a family, such as "LoRA: 8" and "LoRA: 32". A family is shown
at its best: per level of compression the arm and rate with the lowest mean loss, and of forgetting the points that no
other of the family beats in both losses. Each family is compared with the best one without a curve, its rival.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from symexplin.experiments.comparison import Evidence, Row, interval_of, spread_of
from symexplin.lab.files import read_json, read_json_lines
from symexplin.lab.folders import COMPRESSED, INTERPOLATED
from symexplin.lab.record import METRICS

__all__ = ["CONFIDENCE", "Front", "Measure", "compressions", "family_of", "fronts", "measures", "size_of"]


CONFIDENCE = 0.99
_BOUNDED = f"Its rival is the best family without a curve; low and high: Student's t at {CONFIDENCE:.0%}."
_TARGETS = 6  # losses on the new text at which forgetting is compared
_WITHIN = (0.01, 0.03)  # nats from the best loss
_TREND = 3  # fewer panels show no trend

Losses = dict[int, float]  # by seed


class Measure(NamedTuple):
    """A table of results: NAME.csv, its title, a sentence on it, and its rows."""

    name: str
    title: str
    about: str
    rows: list[Row]


def measures(panels: Sequence[Evidence]) -> list[Measure]:
    """Return all measures that the finished panels of a table have; none of most tables."""
    found = [
        Measure(
            "compression",
            "After compression",
            f"Each family at its best arm and learning rate per level, and its difference from its rival. {_BOUNDED}",
            [row for panel in panels for row in compressions(panel)],
        ),
        Measure(
            "forgetting",
            "Loss on the old text at equal loss on the new",
            "Each family along the points that none of its own beats in both losses, linearly between them, and its "
            f"difference from its rival. {_BOUNDED}",
            [row for panel in panels for row in _forgettings(panel)],
        ),
        Measure(
            "tolerance",
            "Tolerance of the learning rate",
            "How far apart the rates are, in factors of two, between which the loss stays within a bound of the arm's "
            "own best: mean and standard error over seeds. 'at least': the sweep ended first, in some seed.",
            [row for panel in panels for row in _tolerances(panel)],
        ),
        Measure(
            "trend",
            "Trends",
            f"Slope of the difference from the baseline per doubling, each arm at its own best rate. {_BOUNDED}",
            list(_trends(panels)),
        ),
    ]
    return [measure for measure in found if measure.rows]


def family_of(label: str) -> str:
    """Return the part of a label before its colon.

    >>> family_of("LoRA: rank 8"), family_of("AdamW")
    ('LoRA', 'AdamW')
    """
    return label.partition(":")[0]


def _is_rival(panel: Evidence, arm: str) -> bool:
    """Whether an arm has no curve of the method, so that its family is one to be compared with."""
    config = panel.map_of(arm)
    return config is None or config.mode == "linear"


def _files(panel: Evidence, name: str) -> Iterator[tuple[Row, Mapping[str, Any]]]:
    """Yield (run, content) of a JSON file that all finite runs of a panel have, or none."""
    paths = {panel.folder / run["folder"] / name: run for run in panel.found["runs"]}
    if not any(path.exists() for path in paths):
        return
    for path, run in paths.items():
        if path.exists():
            yield run, read_json(path)
        elif path.parent.exists() and run["final_loss"] is not None:
            raise FileNotFoundError(f"{str(path)!r} is missing: remove its folder, and --resume trains that run again")


# --- compression -----------------------------------------------------------------------------------------------------


def compressions(panel: Evidence) -> list[Row]:
    """Return a row per family, level of compression and whether it was retrained."""
    losses: dict[tuple[str, str], dict[tuple[str, float], Losses]] = {}
    for run, found in _files(panel, COMPRESSED):
        levels = {("once", "dense"): found["dense"]}
        levels |= {(when, level): loss for when in ("once", "retrained") for level, loss in found[when].items()}
        for place, loss in levels.items():
            losses.setdefault(place, {}).setdefault((run["arm"], run["lr"]), {})[run["seed"]] = loss
    return [row for (when, level), cells in losses.items() for row in _families(panel, when, level, cells)]


def _families(panel: Evidence, when: str, level: str, cells: Mapping[tuple[str, float], Losses]) -> Iterator[Row]:
    """Yield the row of each family at one level."""
    best: dict[str, tuple[str, float]] = {}
    for cell in sorted(cells, key=lambda cell: statistics.fmean(cells[cell].values())):
        best.setdefault(family_of(panel.label(cell[0])), cell)
    rivals = {family: cell for family, cell in best.items() if _is_rival(panel, cell[0])}
    for family, (arm, lr) in best.items():
        rival, other = next((pair for pair in rivals.items() if pair[0] != family), ("", None))
        yield {
            **{"panel": panel.name, "when": when, "level": level, "family": family, "arm": arm, "lr": lr},
            **_summary(cells[arm, lr], rival, {} if other is None else cells[other]),
        }


def _summary(losses: Losses, rival: str, others: Losses) -> Row:
    """Return loss, number of seeds, rival, and the mean paired difference from it with its interval."""
    pairs = [losses[seed] - others[seed] for seed in losses.keys() & others.keys()]
    finite = pairs if all(map(math.isfinite, pairs)) else []
    low, high = interval_of(finite, CONFIDENCE) if len(finite) > 1 else (None, None)
    return {
        "loss": statistics.fmean(losses.values()),
        "seeds": len(losses),
        "rival": rival,
        "difference": statistics.fmean(finite) if finite else None,
        **{"low": low, "high": high},
    }


# --- forgetting ------------------------------------------------------------------------------------------------------

Point = tuple[float, float]  # losses on the new and on the old text


class Front(NamedTuple):
    """A family's points by seed that no other of its own beats in both losses, by the loss on the new text."""

    family: str
    rival: bool
    points: dict[int, list[Point]]

    def at(self, new: float) -> Losses:
        """Return {seed: loss on the old text} where the loss on the new one is `new`, between two points."""
        found = {}
        for seed, points in self.points.items():
            for (a, below), (b, above) in itertools.pairwise(points):
                if a <= new <= b:
                    found[seed] = below + (above - below) * (new - a) / (b - a)
        return found


def fronts(panel: Evidence) -> list[Front]:
    """Return the front of each family; with runs that have interpolated weights, of each with and without them."""
    points: dict[str, dict[int, list[Point]]] = {}
    rival: dict[str, bool] = {}

    def add(family: str, run: Row, losses: Mapping[str, float]) -> None:
        rival[family] = rival.get(family, True) and _is_rival(panel, run["arm"])
        points.setdefault(family, {}).setdefault(run["seed"], []).append((losses["eval_loss"], losses["old_loss"]))

    for run in panel.found["runs"]:
        last = _last_evaluation(panel, run)
        if run["final_loss"] is None or "old_loss" not in last:
            continue
        family = family_of(panel.label(run["arm"]))
        add(family, run, last)
        add(f"{family}, interpolated", run, last)
    for run, found in _files(panel, INTERPOLATED):
        for losses in found.values():
            add(f"{family_of(panel.label(run['arm']))}, interpolated", run, losses)
    return [
        Front(family, rival[family], {seed: _lowest(mine) for seed, mine in seeds.items()})
        for family, seeds in points.items()
    ]


def _last_evaluation(panel: Evidence, run: Row) -> Mapping[str, float]:
    path = panel.folder / run["folder"] / METRICS
    records = [record for record in read_json_lines(path) if "eval_loss" in record] if path.exists() else []
    return records[-1] if records else {}


def _lowest(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both losses, by the first.

    >>> _lowest([(1.0, 3.0), (2.0, 3.5), (2.0, 1.0), (3.0, 2.0)])
    [(1.0, 3.0), (2.0, 1.0)]
    """
    found: list[Point] = []
    for new, old in sorted(points):
        if math.isfinite(new) and (not found or old < found[-1][1]):
            found.append((new, old))
    return found


def _forgettings(panel: Evidence) -> list[Row]:
    """Return a row per family and loss on the new text, from the lowest that all seeds of some family reach."""
    known = fronts(panel)
    if not known:
        return []
    ends = [[points[0][0] for points in front.points.values()] for front in known]
    lowest = min(max(reached) for reached in ends)
    widest = max(points[-1][0] for front in known for points in front.points.values())
    rows = []
    for step in range(_TARGETS):
        new = lowest + (widest - lowest) * step / (2 * _TARGETS)  # the better half
        there = [(front, losses) for front in known if len(losses := front.at(new)) == len(front.points)]
        there.sort(key=lambda pair: statistics.fmean(pair[1].values()))
        for front, losses in there:
            rival, others = next(((f.family, x) for f, x in there if f.rival and f is not front), ("", {}))
            place = {"panel": panel.name, "new_loss": new, "family": front.family}
            rows.append({**place, **_summary(losses, rival, others)})
    return rows


# --- learning rates --------------------------------------------------------------------------------------------------


def _tolerances(panel: Evidence) -> Iterator[Row]:
    """Yield a row per arm of a panel with at least six learning rates."""
    if len(panel.lrs) < 6:
        return
    for arm in panel.arms:
        curves = _curves(panel, arm)
        row: Row = {"panel": panel.name, "arm": arm, "label": panel.label(arm), "seeds": len(curves)}
        row["loss"] = statistics.fmean(min(curve.values()) for curve in curves)
        for within in _WITHIN:
            widths, open_ = zip(*(_width(curve, within) for curve in curves), strict=True)
            spread = spread_of(widths)
            row |= {f"doublings_within_{within:g}": spread.mean, f"error_{within:g}": spread.error}
            row[f"note_{within:g}"] = "at least" if any(open_) else ""
        yield row


def _curves(panel: Evidence, arm: str) -> list[dict[float, float]]:
    """Return {learning rate: final loss} of each seed, infinite for runs that did not stay finite."""
    found: dict[int, dict[float, float]] = {}
    for run in panel.found["runs"]:
        if run["arm"] == arm:
            found.setdefault(run["seed"], {})[run["lr"]] = math.inf if run["error"] else run["final_loss"]
    return list(found.values())


def _width(curve: Mapping[float, float], within: float) -> tuple[float, bool]:
    """Return how many doublings of the rate stay within a bound of the best loss, and whether the sweep ended first.

    Between two rates the loss is linear in their logarithm.

    >>> _width({1.0: 3.0, 2.0: 1.0, 4.0: 2.0}, 0.5)
    (0.75, False)
    """
    lrs = sorted(curve)
    best = min(lrs, key=curve.__getitem__)
    bound, at, total, open_ = curve[best] + within, lrs.index(best), 0.0, False
    for side in (lrs[at::-1], lrs[at:]):
        for a, b in itertools.pairwise(side):
            doublings = abs(math.log2(b / a))
            if curve[b] > bound:
                total += doublings * (bound - curve[a]) / (curve[b] - curve[a])
                break
            total += doublings
        else:
            open_ = True
    return total, open_


# --- trends ----------------------------------------------------------------------------------------------------------


def size_of(panels: Sequence[Evidence]) -> tuple[str, list[int]]:
    """Return what panels differ in, "width" or "steps", and its values.

    Raises:
        ValueError: they differ in neither.
    """
    configs = [panel.found["config"] for panel in panels]
    found = {"width": [config["model"]["width"] for config in configs], "steps": [c["train"]["steps"] for c in configs]}
    for name, sizes in found.items():
        if len(set(sizes)) == len(sizes) > 1:
            return name, sizes
    raise ValueError("sources must name comparisons that differ in width or in steps")


def _trends(panels: Sequence[Evidence]) -> Iterator[Row]:
    """Yield a row per arm of at least three panels that differ in width, or else in steps."""
    try:
        scale, sizes = size_of(panels)
    except ValueError:
        return
    if len(sizes) < _TREND:
        return
    for arm in panels[0].arms[1:]:
        if all(arm in panel.arms for panel in panels) and (row := _trend(panels, sizes, arm, scale)):
            yield row


def _trend(panels: Sequence[Evidence], sizes: Sequence[int], arm: str, scale: str) -> Row:
    """Return the slope of an arm's differences over the logarithm of the size; {} where a run was not finite."""
    rows = [panel.best(arm) for panel in panels]
    seeds = sorted(set.intersection(*(set(row["seeds"]) for row in rows)))
    deltas = [dict(zip(row["seeds"], row["deltas"], strict=True)) for row in rows]
    if any(delta[seed] is None for delta in deltas for seed in seeds):
        return {}
    x = [math.log2(size) for size in sizes]
    slopes = [statistics.linear_regression(x, [delta[seed] for delta in deltas]).slope for seed in seeds]
    low, high = interval_of(slopes, CONFIDENCE)
    gaps = zip(sizes, deltas, strict=True)
    return {
        **{"arm": arm, "label": panels[0].label(arm), "seeds": len(seeds)},
        **{f"{scale}_{size}": statistics.fmean(delta[seed] for seed in seeds) for size, delta in gaps},
        **{f"slope_per_doubling_of_{scale}": statistics.fmean(slopes), "low": low, "high": high},
    }
