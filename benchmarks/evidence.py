"""All differences that results/mini.csv shows, by one rule; it writes the pages that list them.

    python benchmarks/evidence.py            # write docs/reference/experiments.md and the table of README
    python benchmarks/evidence.py --check    # fail if they are not what the rows say

Each variant counts at its own best learning rate, the one with the most seeds and then the lowest mean loss.
Differences to the baseline are taken seed by seed; symexplin.lab.compare.interval has the rule for words.
"""

import argparse
import csv
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from symexplin.lab.compare.interval import Interval

ROOT = Path(__file__).parents[1]
ROWS, PAGE, README = ROOT / "results/mini.csv", ROOT / "docs/reference/experiments.md", ROOT / "README.md"
TEXTS = {  # by the start of the data's fingerprint
    "ee87088e": "technical English",
    "c9b75369": "Python sources",
    "ff86aff7": "docstrings, then code",
    "3743d9e4": "technical English, BPE of 4,096",
}
FRESH = 10  # seeds from this one on had no part in a choice
Losses = Mapping[int, float]  # by seed


@dataclass(frozen=True)
class Experiment:
    """The runs of one table and panel at one commit: {variant: {learning rate: {seed: loss}}}, the baseline first."""

    table: str
    panel: str
    text: str
    steps: int
    commit: str
    fresh: bool
    variants: Mapping[str, Mapping[float, Losses]]

    @property
    def title(self) -> str:
        """What was trained."""
        fresh = ", fresh seeds" if self.fresh else ""
        return f"{self.table}, {self.panel}, {self.steps:,} steps, {self.text}{fresh} ({self.commit})"

    @property
    def baseline(self) -> str:
        """AdamW where it was trained, else the first variant."""
        return "AdamW" if "AdamW" in self.variants else next(iter(self.variants))

    def best(self, variant: str) -> tuple[float, Losses] | None:
        """Return a variant's best learning rate with its losses; None if it diverged at all of them."""
        finite = [
            (lr, losses) for lr, losses in self.variants[variant].items() if all(map(math.isfinite, losses.values()))
        ]
        if not finite:
            return None
        return min(finite, key=lambda found: (-len(found[1]), statistics.fmean(found[1].values())))


def experiments(path: Path = ROWS) -> list[Experiment]:
    """Return all experiments of a file of rows, in its order."""
    found: dict[tuple[str, ...], dict[str, dict[float, dict[int, float]]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            text = TEXTS[row["data"][:8]]
            fresh = "fresh" if int(row["seed"]) >= FRESH else ""
            variants = found.setdefault((row["table"], row["panel"], text, row["steps"], row["commit"][:7], fresh), {})
            losses = variants.setdefault(row["variant"], {}).setdefault(float(row["lr"]), {})
            losses[int(row["seed"])] = float(row["final_loss"] or math.nan)
    return [
        Experiment(table, panel, text, int(steps), commit, bool(fresh), variants)
        for (table, panel, text, steps, commit, fresh), variants in found.items()
    ]


def ends(found: Interval) -> str:
    """Return the 99% interval, "" with too few seeds for one."""
    return "" if math.isinf(found.detectable) else f"{found.low:+.4f} to {found.high:+.4f}"


def difference(experiment: Experiment, variant: str) -> Interval | None:
    """Return a variant's difference to the baseline; None if they share no seed."""
    ours, theirs = experiment.best(variant), experiment.best(experiment.baseline)
    if ours is None or theirs is None or not (shared := sorted(ours[1].keys() & theirs[1].keys())):
        return None
    return Interval([ours[1][seed] - theirs[1][seed] for seed in shared])


def lines(experiment: Experiment) -> Iterator[str]:
    """Yield the table of an experiment: every variant, the baseline first."""
    yield "| variant | learning rate | loss | difference | 99% interval | detectable | seeds | |"
    yield "|---|---|---|---|---|---|---|---|"
    names = sorted(experiment.variants, key=lambda variant: variant != experiment.baseline)
    for variant in names:
        best = experiment.best(variant)
        if best is None:
            yield f"| {variant} | | diverged | | | | | |"
            continue
        lr, losses = best
        start = f"| {variant} | {lr:g} | {statistics.fmean(losses.values()):.4f} |"
        found = None if variant == experiment.baseline else difference(experiment, variant)
        if found is None:
            yield f"{start} | | | {len(losses)} | {'baseline' if variant == experiment.baseline else ''} |"
            continue
        detectable = "" if math.isinf(found.detectable) else f"{found.detectable:.4f}"
        cells = f"{found.mean:+.4f} | {ends(found)} | {detectable} | {len(found.values)} | {found.verdict}"
        yield f"{start} {cells} |"


INTRODUCTION = """\
# All experiments

Held-out losses of every experiment in [results/mini.csv](../../results/README.md), in nats per byte (`width-1024`:
per token), written by `python benchmarks/evidence.py`. Each variant counts at its own best learning rate, the one with
the most seeds and then the lowest mean loss. A difference is to the baseline, seed by seed; below zero the variant is
better. "Better" and "worse" need Student's 99% interval of the mean on one side of zero. An interval that contains
zero is "no difference detected", and its half-width, the column "detectable", is the smallest mean difference that
these seeds could detect. Fresh seeds (10 and up) had no part in choosing a variant or a rate.

The commit behind each title has the definition of the variants. `exp`, `exp_only-ff` and `exp_only` with nothing
learned are the present default. `mismatch`, `full` and `paper` are the paper's method with learned scales and its
start. `carried` and, before commit 9ade27c, `default` are the mismatch map with fixed scales and a matched start.
"""


def page(found: Iterable[Experiment]) -> str:
    """Return the page of all experiments."""
    parts = [INTRODUCTION.rstrip()]
    for experiment in found:
        parts += [f"## {experiment.title}", "\n".join(lines(experiment))]
    return "\n\n".join(parts) + "\n"


# The rows of README: what was trained, the experiment (table, panel, commit), its variant with fixed scales and the one
# with learned scales, "" where none was trained. A star marks fixed scales of another map than the default.
SHOWN = (
    ("width 64, depth 2, 200 steps*", ("widths", "64x2", "7a0cb4d"), "default", "mismatch"),
    ("width 128, depth 2, 700 steps*", ("widths", "128x2", "7a0cb4d"), "default", "mismatch"),
    ("width 256, depth 2, 2,600 steps*", ("widths", "256x2", "7a0cb4d"), "default", "mismatch"),
    ("width 128, depth 2, 10,000 steps*", ("lengths", "128x2-10000", "28e925c"), "default", ""),
    ("width 128, depth 4, 600 steps", ("exp_only", "128x4", "d3fc95d"), "exp_only-ff", "full"),
    ("the same, again", ("control", "128x4", "b3eebc4"), "default", ""),
    ("the same, technical English*", ("suite", "128x4", "cc59c74"), "carried", ""),
    ("width 128, depth 4, 1,800 steps*", ("default", "128x4", "882d6bf"), "carried", ""),
    ("width 1024, depth 1, 1,500 steps, per token", ("width-1024", "1024x1", "44ad1b2"), "exp", "paper"),
    ("the same; curvature fixed on the right*", ("width-1024", "1024x1", "44ad1b2"), "frozen", "fixed_curvature"),
)


def readme_table(found: Sequence[Experiment]) -> str:
    """Return the evidence table of README."""
    by_key = {(x.table, x.panel, x.commit): x for x in found if not x.fresh}
    rows = [
        "| trained from scratch | AdamW | fixed scales, the default | learned scales, the paper's | seeds |",
        "|---|---|---|---|---|",
    ]
    for title, key, *variants in SHOWN:
        experiment = by_key[key]
        best = experiment.best(experiment.baseline)
        assert best is not None
        shown = [difference(experiment, variant) if variant else None for variant in variants]
        seeds = "; ".join(dict.fromkeys(str(len(each.values)) for each in shown if each))
        cells = " | ".join(f"{each.mean:+.3f}{in_words(each)}" if each else "" for each in shown)
        rows.append(f"| {title} | {statistics.fmean(best[1].values()):.3f} | {cells} | {seeds} |")
    return "\n".join(rows)


def in_words(found: Interval) -> str:
    """Return the interval and the verdict as a cell shows them after the mean."""
    between = f" ({ends(found)})" if ends(found) else ""
    return f"{between}, {found.verdict.removesuffix(' detected')}"


def with_table(text: str, table: str) -> str:
    """Return README with its evidence table replaced, the one that begins with these words."""
    pattern = re.compile(r"^\| trained from scratch \|.*?\n(?=\n)", re.MULTILINE | re.DOTALL)
    changed, count = pattern.subn(lambda _: table + "\n", text)
    if count != 1:
        raise SystemExit(f"{README} must have one table that begins with '| trained from scratch |', has {count}")
    return changed


def main() -> None:
    """Write or check both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a file is not up to date")
    options = parser.parse_args()
    found = experiments()
    wanted = {PAGE: page(found), README: with_table(README.read_text(), readme_table(found))}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if options.check:
            print(f"{path.relative_to(ROOT)} is not up to date: run python benchmarks/evidence.py", file=sys.stderr)
        else:
            path.write_text(wanted[path])
    sys.exit(bool(stale) and options.check)


if __name__ == "__main__":
    main()
