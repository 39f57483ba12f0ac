"""benchmarks/evidence.py: the rule for words, and that the page of experiments and the pictures follow it."""

import csv
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from quotes import PAGES, stale

from scripts import load
from symexplin.lab.compare.interval import CHOSE

ROOT = Path(__file__).parents[1]
pytest.importorskip("scipy")


@pytest.fixture(scope="module")
def evidence():
    return load(ROOT / "benchmarks/evidence.py")


def test_the_page_of_experiments_and_the_pictures_are_what_the_rows_say():
    command = [sys.executable, ROOT / "benchmarks/evidence.py", "--check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_every_variant_of_every_row_is_on_the_page(evidence):
    compared = [comparison for _, comparison in evidence.experiments()]
    rows = (ROOT / "results/mini.csv").read_text().splitlines()[1:]
    assert sum(len(comparison.runs) for comparison in compared) == len(rows)
    page = (ROOT / "results/experiments.md").read_text()
    for variant in {variant for comparison in compared for variant in comparison.variants}:
        assert re.search(rf"(>|\| ){re.escape(variant)}( \\(\\w+\\))?, [\d.]+: ", page), variant


@pytest.mark.parametrize("name", ["README.md", "experiments.md", "log.md"])
def test_links_beside_the_rows_lead_to_files(name):
    page = ROOT / "results" / name
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
    assert targets
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_rows_say_the_setting_who_chose_the_rates_and_the_verdict(evidence, tmp_path):
    path = tmp_path / "rows.csv"

    def read(*confirm):
        lines = ["table,panel,variant,lr,seed,stage,data,steps,commit,final_loss"]
        for seed in range(3):
            losses = {"AdamW": 1.0, "better": 0.5 + 0.001 * seed, "apart": 1.1 + 0.1 * seed, "diverged": ""}
            stage = "confirm" if seed in confirm else "sweep"
            lines += [f"t,p,{name},0.2,{seed},{stage},c9b75369,600,abcdef0,{loss}" for name, loss in losses.items()]
            if seed not in confirm:
                lines.append(f"t,p,AdamW,0.1,{seed},sweep,c9b75369,600,abcdef0,2.0")
        path.write_text("\n".join(lines) + "\n")
        return evidence.experiments(path)

    (group,) = evidence.groups(read(0, 1, 2))
    title = "**p, 600 steps, Python sources**<br>AdamW, 0.2: 1.0000<br>3 seeds (abcdef0)"
    assert list(group.rows()) == [
        f"| {title} | better | better, 0.2: -0.4990 ± 0.2626 |",
        "| ... | not resolved | apart, 0.2: +0.2000 ± 0.8134, all 3 seeds are higher |",
        "| ... | diverged | diverged |",
    ]
    (group,) = evidence.groups(read())
    assert [row.split(" | ")[1] for row in group.rows()] == [CHOSE, "diverged"]
    (group,) = evidence.groups(read(1, 2))
    title = title.replace("3 seeds", "2 seeds, rates by 0")
    assert list(group.rows()) == [
        f"| {title} | too few seeds | better, 0.2: -0.4985<br>apart, 0.2: +0.2500 |",
        "| ... | diverged | diverged |",
    ]


def test_all_methods_of_a_setting_are_compared_with_its_best_adamw(evidence):
    found = {}
    with (ROOT / "results/mini.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            name = row["table"], row["panel"], row["commit"][:7], row["variant"], row["lr"]
            found.setdefault(name, {})[int(row["seed"])] = float(row["final_loss"] or "nan")
    twelve = ("width-1024-gpu", "1024x12")
    adamw, paper = found[*twelve, "648d882", "AdamW", "0.001"], found[*twelve, "354dea9", "paper", "0.0007"]
    drawn = evidence.forest(evidence.experiments()).numbers
    _, _, seeds = re.search(r"paper's method \+ init., lr 0.0007: .*", drawn)[0].partition("seeds (* chose): ")
    assert seeds == f"0* {paper[0] - adamw[0]:+.4f}, 1 {paper[1] - adamw[1]:+.4f}, 2 {paper[2] - adamw[2]:+.4f}"

    rows = evidence.by_key(evidence.experiments())
    for setting, places in evidence.SHOWN.items():
        first, *others = (rows[key].at("AdamW", rows[key].best_lr("AdamW")) for key, _ in places.values())
        for other in others:
            pairs = [(first[seed].loss, other[seed].loss) for seed in first if seed in other]
            assert sum(one for one, _ in pairs) <= sum(loss for _, loss in pairs), setting


def test_drawn_are_the_seeds_and_the_interval_over_those_that_did_not_choose(evidence):
    losses, lrs = {}, {}
    with (ROOT / "results/mini.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            if (row["table"], row["commit"][:7]) == ("width-1024", "44ad1b2") and row["variant"] in ("AdamW", "paper"):
                if row["variant"] == "AdamW" and row["lr"] != "0.0003":  # at the paper's rate nothing was chosen
                    lrs.setdefault(int(row["seed"]), set()).add(row["lr"])
                if row["lr"] == "0.001":  # the best one of both
                    losses[row["variant"], int(row["seed"])] = float(row["final_loss"])
    deltas = {seed: losses["paper", seed] - losses["AdamW", seed] for seed in range(6)}
    own = [deltas[seed] for seed in range(6) if len(lrs[seed]) == 1]
    assert own == list(deltas.values())[1:]
    mean = sum(own) / 5
    half = 4.604095 * math.sqrt(sum((delta - mean) ** 2 for delta in own) / 4 / 5)  # Student's t, as above

    (axes,) = evidence.forest(evidence.experiments()).figure.axes
    bars = [
        line for line in axes.lines if list(line.get_xdata()) == pytest.approx([mean - half, mean + half], abs=1e-6)
    ]
    (bar,) = (line for line in bars if line.get_linestyle() == "-")
    y = bar.get_ydata()[0]
    dots = [line for line in axes.lines if list(line.get_ydata()) == [y]]
    assert sorted(dot.get_xdata()[0] for dot in dots) == pytest.approx(sorted(deltas.values()))
    full = [dot.get_xdata()[0] for dot in dots if dot.get_markerfacecolor() != "white"]
    assert full == pytest.approx(own)


def test_a_picture_repeats_and_carries_its_numbers(evidence, tmp_path):
    with evidence.mpl.rc_context(evidence.STYLE):
        for name in ("a", "b"):
            picture = evidence.rates(evidence.experiments())
            picture.save(tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert evidence.numbers_of(tmp_path / "a.svg") == picture.numbers
    assert "qk-bias, lr 0.001, seed 2: 3.7" in picture.numbers


def test_a_number_in_the_documentation_is_that_of_the_rows(evidence, tmp_path):
    rows = evidence.by_key(evidence.experiments())
    for name in PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    assert list(stale(tmp_path, rows)) == []
    page = tmp_path / "README.md"
    page.write_text(page.read_text().replace("**-0.20**", "**-0.30**") + "\nIt gains 0.123.\n")
    ends = ("**-0.20** | -0.08 (one seed) |'", "**-0.30'", "**-0.30** | -0.08'", "It gains 0.123'")
    for problem, end in zip(stale(tmp_path, rows), ends, strict=True):
        assert problem.endswith(end)


def test_seeds_that_chose_a_rate_count_only_if_all_did(evidence):
    ours = evidence.Difference({0: -1.0, 1: 0.1, 2: 0.3}, {0})
    assert (f"{ours}", f"{ours.all}", ours[0], ours.size) == ("+0.200", "-0.200", "-1.000", "0.200")
    assert f"{evidence.Difference({0: -1.0, 1: 0.4}, {0, 1}):1}" == "-0.3"
    assert ours.all.half == "-0.200 ± 4.011"  # 9.9248 times the standard error, 0.7 over the root of 3
