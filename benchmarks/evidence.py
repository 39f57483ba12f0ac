"""All differences that results/mini.csv shows, by one rule; it writes the tables that list them.

    python benchmarks/evidence.py            # write the tables of results/experiments.md and of README
    python benchmarks/evidence.py --check    # fail if they are not what the rows say

Each variant counts at its own best learning rate, and differences to the baseline are taken seed by seed, as in every
comparison (symexplin.lab.compare.comparison); symexplin.lab.compare.interval has the rule for words.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from symexplin.experiments.results import comparisons
from symexplin.lab.compare.comparison import Comparison, Row
from symexplin.lab.compare.interval import BETTER, NO_DIFFERENCE, TOO_FEW, WORSE, Interval

ROOT = Path(__file__).parents[1]
ROWS, PAGE, README = ROOT / "results/mini.csv", ROOT / "results/experiments.md", ROOT / "README.md"
TEXTS = {  # by the start of the data's fingerprint
    "ee87088e": "technical English",
    "c9b75369": "Python sources",
    "ff86aff7": "docstrings, then code",
    "3743d9e4": "technical English, BPE of 4,096",
}
DIVERGED = "diverged"
FRESH = 10  # seeds from this one on had no part in a choice


class Experiment(NamedTuple):
    """What was trained where: the runs of one table and panel at one commit."""

    table: str
    panel: str
    text: str
    steps: int
    commit: str
    fresh: bool

    @property
    def setting(self) -> str:
        """What was trained, and on what."""
        fresh = ", fresh seeds" if self.fresh else ""
        return f"{self.panel}, {self.steps:,} steps, {self.text}{fresh}"


Compared = tuple[Experiment, Comparison]


def experiments(path: Path = ROWS) -> list[Compared]:
    """Return all experiments of a file of rows, in its order."""

    def of(row: Mapping[str, str]) -> Experiment:
        text, fresh = TEXTS[row["data"][:8]], int(row["seed"]) >= FRESH
        return Experiment(row["table"], row["panel"], text, int(row["steps"]), row["commit"][:7], fresh)

    return list(comparisons(path, of).items())


def best(comparison: Comparison, variant: str) -> Row:
    """Return a variant's row at its own best learning rate."""
    return comparison.best[comparison.variants.index(variant)]


def losses(comparison: Comparison, variant: str) -> tuple[object, ...]:
    """Return the best learning rate and the loss of each seed there, by which the same runs are known."""
    lr = comparison.best_lr(variant)
    return lr, *sorted((seed, run.loss) for seed, run in comparison.at(variant, lr).items())


def in_seeds(count: int) -> str:
    """Return a number of seeds in words."""
    return f"{count} seed{'s' * (count > 1)}"


def ends(interval: Interval) -> str:
    """Return the 99% interval, "" with too few seeds for one."""
    return "" if math.isinf(interval.detectable) else f"{interval.low:+.4f} to {interval.high:+.4f}"


@dataclass(frozen=True)
class Group:
    """Experiments with the same baseline runs, and the variants of them all."""

    experiments: Sequence[Compared]
    variants: Sequence[tuple[str, Compared]]  # each with the experiment that has it

    @property
    def baseline(self) -> Row:
        """The row of the baseline."""
        return self.experiments[0][1].best[0]

    def rows(self) -> Iterator[str]:
        """Yield a row for each verdict: the setting and the baseline, the verdict, the variants."""
        commits = ", ".join(dict.fromkeys(experiment.commit for experiment, _ in self.experiments))
        base = self.baseline
        title = f"**{self.experiments[0][0].setting}**<br>{base.variant}, {base.lr:g}: {base.loss:.4f}"
        title += f"<br>{in_seeds(len(base.seeds))} ({commits})"
        by_verdict: dict[str, list[str]] = {}
        for variant, compared in self.variants:
            verdict, cell = self.cell(variant, compared)
            by_verdict.setdefault(verdict, []).append(cell)
        for verdict in (BETTER, NO_DIFFERENCE, WORSE, TOO_FEW, DIVERGED):
            if cells := by_verdict.get(verdict):
                yield f"| {title} | {verdict} | {'<br>'.join(cells)} |"
                title = "..."

    def cell(self, variant: str, compared: Compared) -> tuple[str, str]:
        """Return the verdict on a variant, and its learning rate, difference and half-width."""
        experiment, comparison = compared
        row = best(comparison, variant)
        if row.interval is None:
            return DIVERGED, variant
        if [name for name, _ in self.variants].count(variant) > 1:
            variant = f"{variant} ({experiment.commit})"
        interval = row.interval
        half = "" if math.isinf(interval.detectable) else f" ± {interval.detectable:.4f}"
        seeds = f" ({in_seeds(len(interval.values))})" if len(interval.values) != len(self.baseline.seeds) else ""
        return interval.verdict, f"{variant}, {row.lr:g}: {interval.mean:+.4f}{half}{seeds}"


def groups(compared: Iterable[Compared]) -> list[Group]:
    """Return experiments grouped by baseline runs.

    A variant appears once in a group, unless its runs differ; with one seed, only where no group has more.
    """
    same: dict[object, list[Compared]] = {}
    for experiment, comparison in compared:
        base = comparison.baseline
        same.setdefault((experiment.setting, base, losses(comparison, base)), []).append((experiment, comparison))
    merged = [Group(members, distinct(members)) for members in same.values()]
    tried = {(x.setting, v) for group in merged if len(group.baseline.seeds) > 1 for v, (x, _) in group.variants}
    for i, group in enumerate(merged):
        if len(group.baseline.seeds) == 1:
            new = [(v, (x, c)) for v, (x, c) in group.variants if (x.setting, v) not in tried]
            merged[i] = Group(group.experiments, new)
    return [group for group in merged if group.variants]


def distinct(compared: Iterable[Compared]) -> list[tuple[str, Compared]]:
    """Return the variants of experiments but the baseline, those with the same best runs once."""
    variants: dict[object, tuple[str, Compared]] = {}
    for experiment, comparison in compared:
        for variant in comparison.variants[1:]:
            variants.setdefault((variant, losses(comparison, variant)), (variant, (experiment, comparison)))
    return list(variants.values())


def page(text: str, compared: Sequence[Compared]) -> str:
    """Return the page with its tables replaced; the comment before each names the tables that its rows are of."""
    left = {experiment.table for experiment, _ in compared}

    def table(place: re.Match[str]) -> str:
        names = place[1].split(", ")
        left.difference_update(names)
        rows = ["| trained; baseline | verdict | variant, learning rate: difference |", "|---|---|---|"]
        for group in groups(x for name in names for x in compared if x[0].table == name):
            rows += group.rows()
        return f"<!-- rows of {place[1]} -->\n\n" + "\n".join(rows) + "\n"

    text = re.sub(r"(?m)^<!-- rows of (.*) -->\n\n?(?:\|.*\n)*", table, text)
    if left:
        raise SystemExit(f"{PAGE} has no table for the rows of {', '.join(sorted(left))}")
    return text


# The rows of README: what was trained; by column the experiment (table, panel, commit, steps) and its variant.
COLUMNS = "default", "fixed mismatch", "paper's method"
WIDTH_1024 = ("width-1024", "1024x1", "44ad1b2", 1500)
WITH_INIT = ("width-1024-gpu", "1024x12", "354dea9", 1000)
WITHOUT_INIT = ("width-1024-gpu", "1024x12", "648d882", 1000)
SHOWN: Mapping[str, Sequence[tuple[tuple[str, str, str, int], str] | None]] = {
    "width 64, depth 2, 200 steps": (
        (("widths", "64x2", "ff759b9", 200), "default"),
        (("widths", "64x2", "7a0cb4d", 200), "default"),
        (("widths", "64x2", "7a0cb4d", 200), "mismatch"),
    ),
    "width 128, depth 2, 700 steps": (
        (("widths", "128x2", "ff759b9", 700), "default"),
        (("widths", "128x2", "7a0cb4d", 700), "default"),
        (("widths", "128x2", "7a0cb4d", 700), "mismatch"),
    ),
    "width 256, depth 2, 2,600 steps": (
        (("widths", "256x2", "ff759b9", 2600), "default"),
        (("widths", "256x2", "7a0cb4d", 2600), "default"),
        (("widths", "256x2", "7a0cb4d", 2600), "mismatch"),
    ),
    "width 128, depth 2, 10,000 steps": (None, (("lengths", "128x2-10000", "28e925c", 10000), "default"), None),
    "width 128, depth 4, 600 steps": (
        (("exp_only", "128x4", "d3fc95d", 600), "exp_only-ff"),
        (("beta", "128x4", "d3fc95d", 600), "default"),
        (("exp_only", "128x4", "d3fc95d", 600), "full"),
    ),
    "width 128, depth 4, 600 steps, again": ((("control", "128x4", "b3eebc4", 600), "default"), None, None),
    "width 128, depth 4, 600 steps, technical English": ((("default", "128x4", "ff759b9", 600), "default"), None, None),
    "width 128, depth 4, 600 steps, technical English, earlier code": (
        None,
        (("suite", "128x4", "cc59c74", 600), "carried"),
        None,
    ),
    "width 128, depth 4, 1,800 steps, technical English": (
        (("default", "128x4", "ff759b9", 1800), "default"),
        (("default", "128x4", "882d6bf", 1800), "carried"),
        None,
    ),
    "width 1024, depth 1, 1,500 steps": ((WIDTH_1024, "exp"), None, (WIDTH_1024, "paper")),
    "width 1024, depth 12, 1,000 steps, paper's initialization": (None, None, (WITH_INIT, "paper")),
    "width 1024, depth 12, 1,000 steps, AdamW's initialization": (
        (WITHOUT_INIT, "default"),
        None,
        (WITHOUT_INIT, "matched"),
    ),
}


def readme_table(compared: Sequence[Compared]) -> str:
    """Return the evidence table of README."""
    by_key = {(x.table, x.panel, x.commit, x.steps): comparison for x, comparison in compared if not x.fresh}
    rows = [f"| trained from scratch | AdamW | {' | '.join(COLUMNS)} | seeds |", "|---|---|---|---|---|---|"]
    for title, places in SHOWN.items():
        shown = [place and (by_key[place[0]], place[1]) for place in places]
        intervals = [one and best(*one).interval for one in shown]
        cells = [in_words(interval) if interval else "" for interval in intervals]
        seeds = sorted({len(interval.values) for interval in intervals if interval})
        baseline = next(one[0].best[0].loss for one in shown if one)
        rows.append(f"| {title} | {baseline:.4f} | {' | '.join(cells)} | {' to '.join(map(str, seeds))} |")
    return "\n".join(rows)


def in_words(interval: Interval) -> str:
    """Return the mean difference, its interval and the verdict."""
    between = f" ({ends(interval)})" if ends(interval) else ""
    return f"{interval.mean:+.4f}{between}, {interval.verdict.removesuffix(' detected')}"


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
    compared = experiments()
    wanted = {PAGE: page(PAGE.read_text(), compared), README: with_table(README.read_text(), readme_table(compared))}
    stale = [path for path, text in wanted.items() if path.read_text() != text]
    for path in stale:
        if options.check:
            print(f"{path.relative_to(ROOT)} is not up to date: run python benchmarks/evidence.py", file=sys.stderr)
        else:
            path.write_text(wanted[path])
    sys.exit(bool(stale) and options.check)


if __name__ == "__main__":
    main()
