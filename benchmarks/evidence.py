"""All differences that results/mini.csv shows, by one rule; it writes the tables that list them.

    python benchmarks/evidence.py            # write the tables of docs/reference/experiments.md and of README
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

from symexplin.lab.compare.interval import BETTER, NO_DIFFERENCE, TOO_FEW, WORSE, Interval

ROOT = Path(__file__).parents[1]
ROWS, PAGE, README = ROOT / "results/mini.csv", ROOT / "docs/reference/experiments.md", ROOT / "README.md"
TEXTS = {  # by the start of the data's fingerprint
    "ee87088e": "technical English",
    "c9b75369": "Python sources",
    "ff86aff7": "docstrings, then code",
    "3743d9e4": "technical English, BPE of 4,096",
}
DIVERGED = "diverged"
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
    def setting(self) -> str:
        """What was trained, and on what."""
        fresh = ", fresh seeds" if self.fresh else ""
        return f"{self.panel}, {self.steps:,} steps, {self.text}{fresh}"

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


def in_seeds(count: int) -> str:
    """Return a number of seeds in words."""
    return f"{count} seed{'s' * (count > 1)}"


def ends(found: Interval) -> str:
    """Return the 99% interval, "" with too few seeds for one."""
    return "" if math.isinf(found.detectable) else f"{found.low:+.4f} to {found.high:+.4f}"


def difference(experiment: Experiment, variant: str) -> Interval | None:
    """Return a variant's difference to the baseline; None if they share no seed."""
    ours, theirs = experiment.best(variant), experiment.best(experiment.baseline)
    if ours is None or theirs is None or not (shared := sorted(ours[1].keys() & theirs[1].keys())):
        return None
    return Interval([ours[1][seed] - theirs[1][seed] for seed in shared])


@dataclass(frozen=True)
class Group:
    """Experiments with the same baseline runs, and the variants of them all."""

    experiments: Sequence[Experiment]
    variants: Sequence[tuple[str, Experiment]]  # each with the experiment that has it

    @property
    def seeds(self) -> int:
        """The number of seeds, of the baseline."""
        first = self.experiments[0]
        best = first.best(first.baseline)
        return len(best[1]) if best else 0

    def rows(self) -> Iterator[str]:
        """Yield a row for each verdict: the setting and the baseline, the verdict, the variants."""
        first = self.experiments[0]
        best = first.best(first.baseline)
        assert best is not None
        commits = ", ".join(dict.fromkeys(x.commit for x in self.experiments))
        seeds = f"{in_seeds(self.seeds)} ({commits})"
        baseline = f"{first.baseline}, {best[0]:g}: {statistics.fmean(best[1].values()):.4f}"
        title = f"**{first.setting}**<br>{baseline}<br>{seeds}"
        by_verdict: dict[str, list[str]] = {}
        for variant, experiment in self.variants:
            verdict, cell = self.cell(variant, experiment)
            by_verdict.setdefault(verdict, []).append(cell)
        for verdict in (BETTER, NO_DIFFERENCE, WORSE, TOO_FEW, DIVERGED):
            if cells := by_verdict.get(verdict):
                yield f"| {title} | {verdict} | {'<br>'.join(cells)} |"
                title = "..."

    def cell(self, variant: str, experiment: Experiment) -> tuple[str, str]:
        """Return the verdict on a variant, and its learning rate, difference and half-width."""
        best, found = experiment.best(variant), difference(experiment, variant)
        if best is None or found is None:
            return DIVERGED, variant
        if [name for name, _ in self.variants].count(variant) > 1:
            variant = f"{variant} ({experiment.commit})"
        half = "" if math.isinf(found.detectable) else f" ± {found.detectable:.4f}"
        seeds = f" ({in_seeds(len(found.values))})" if len(found.values) != self.seeds else ""
        return found.verdict, f"{variant}, {best[0]:g}: {found.mean:+.4f}{half}{seeds}"


def groups(found: Iterable[Experiment]) -> list[Group]:
    """Return experiments grouped by baseline runs.

    A variant appears once in a group, unless its runs differ; with one seed, only where no group has more.
    """
    same: dict[object, list[Experiment]] = {}
    for experiment in found:
        lr, losses = experiment.best(experiment.baseline) or (math.nan, {})
        same.setdefault((experiment.setting, experiment.baseline, lr, *sorted(losses.items())), []).append(experiment)
    merged = [Group(members, distinct(members)) for members in same.values()]
    tried = {(x.setting, v) for group in merged if group.seeds > 1 for v, x in group.variants}
    for i, group in enumerate(merged):
        if group.seeds == 1:
            merged[i] = Group(group.experiments, [(v, x) for v, x in group.variants if (x.setting, v) not in tried])
    return [group for group in merged if group.variants]


def distinct(found: Iterable[Experiment]) -> list[tuple[str, Experiment]]:
    """Return the variants of experiments but the baseline, those with the same best runs once."""
    variants: dict[object, tuple[str, Experiment]] = {}
    for experiment in found:
        for variant in experiment.variants:
            if variant == experiment.baseline:
                continue
            lr, losses = experiment.best(variant) or (math.nan, {})
            variants.setdefault((variant, lr, *sorted(losses.items())), (variant, experiment))
    return list(variants.values())


def page(text: str, found: Sequence[Experiment]) -> str:
    """Return the page with its tables replaced; the comment before each names the tables that its rows are of."""
    left = {x.table for x in found}

    def table(place: re.Match[str]) -> str:
        names = place[1].split(", ")
        left.difference_update(names)
        rows = ["| trained; baseline | verdict | variant, learning rate: difference |", "|---|---|---|"]
        for group in groups(x for name in names for x in found if x.table == name):
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


def readme_table(found: Sequence[Experiment]) -> str:
    """Return the evidence table of README."""
    by_key = {(x.table, x.panel, x.commit, x.steps): x for x in found if not x.fresh}
    rows = [f"| trained from scratch | AdamW | {' | '.join(COLUMNS)} | seeds |", "|---|---|---|---|---|---|"]
    for title, places in SHOWN.items():
        cells, seeds, baseline = [], [], ""
        for place in places:
            if place is None:
                cells.append("")
                continue
            experiment = by_key[place[0]]
            best, shown = experiment.best(experiment.baseline), difference(experiment, place[1])
            assert best is not None
            assert shown is not None
            cells.append(in_words(shown))
            seeds.append(len(shown.values))
            baseline = baseline or f"{statistics.fmean(best[1].values()):.4f}"
        rows.append(f"| {title} | {baseline} | {' | '.join(cells)} | {' to '.join(map(str, sorted(set(seeds))))} |")
    return "\n".join(rows)


def in_words(found: Interval) -> str:
    """Return the mean difference, its interval and the verdict."""
    between = f" ({ends(found)})" if ends(found) else ""
    return f"{found.mean:+.4f}{between}, {found.verdict.removesuffix(' detected')}"


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
    wanted = {PAGE: page(PAGE.read_text(), found), README: with_table(README.read_text(), readme_table(found))}
    stale = [path for path, text in wanted.items() if path.read_text() != text]
    for path in stale:
        if options.check:
            print(f"{path.relative_to(ROOT)} is not up to date: run python benchmarks/evidence.py", file=sys.stderr)
        else:
            path.write_text(wanted[path])
    sys.exit(bool(stale) and options.check)


if __name__ == "__main__":
    main()
