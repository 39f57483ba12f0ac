"""benchmarks/evidence.py: that tables of pages and pictures are what the rows say, and that prose repeats no number."""

import csv
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rows import Key, Place, by_key, difference, experiments, mean_after
from tables import PAGES, TABLES, Elsewhere, elsewhere, written

from scripts import load

stats = pytest.importorskip("scipy.stats")
ROOT = Path(__file__).parents[1]
NUMBER = re.compile(r"(?<![\w.])[+-]\d\.\d+|(?<![\w.])\d\.\d{3,}")  # a difference or a loss, not a rate or a beta


@pytest.fixture(scope="module")
def evidence():
    return load(ROOT / "benchmarks/evidence.py")


@pytest.fixture(scope="module")
def losses():
    """{(table, panel, commit, variant): {rate: {seed: loss}}} of the file of rows."""
    found = {}
    with (ROOT / "results/mini.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            name = row["table"], row["panel"], row["commit"][:7], row["variant"]
            loss = float(row["final_loss"] or "nan")
            found.setdefault(name, {}).setdefault(float(row["lr"]), {})[int(row["seed"])] = loss
    return found


def cell_of(page, start, column):
    """Return a cell of the one row of a page that starts like this."""
    (row,) = (line for line in (ROOT / page).read_text().splitlines() if line.startswith(start))
    return row.split(" | ")[column]


def test_the_pages_and_the_pictures_are_what_the_rows_say():
    command = [sys.executable, ROOT / "benchmarks/evidence.py", "--check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_an_edited_table_is_found_and_written_again(evidence, tmp_path, monkeypatch, capsys):
    for name in (*PAGES, "results/experiments.md", "docs/images/evidence.svg", "docs/images/width-1024.svg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, path in {"ROOT": "", "PAGE": "results/experiments.md", "IMAGES": "docs/images"}.items():
        monkeypatch.setattr(evidence, name, tmp_path / path)

    def status(*arguments):
        monkeypatch.setattr(sys, "argv", ["evidence.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            evidence.main()
        return ended.value.code, capsys.readouterr().err

    page = tmp_path / "README.md"
    text = page.read_text()
    page.write_text(text.replace("**-0.198 ± 0.080** better", "**-0.298 ± 0.080** better"))
    assert status("--check") == (1, "README.md is not up to date: run python benchmarks/evidence.py\n")
    assert status() == (0, "")
    assert page.read_text() == text


def test_every_table_and_every_figure_from_elsewhere_is_on_a_page():
    named = [name for page in PAGES for name in re.findall(r"<!-- table: (\S+) -->", (ROOT / page).read_text())]
    assert sorted(named) == sorted(TABLES)
    shown = {cell for table in TABLES.values() for row in table for cell in row if isinstance(cell, Elsewhere)}
    assert shown == elsewhere().keys()


@pytest.mark.parametrize("page", PAGES)
def test_prose_repeats_no_difference_and_no_loss(page):
    text = (ROOT / page).read_text()
    text = re.sub(r"(?m)^<!-- table: \S+ -->\n\n(\|.*\n)+", "", text)
    text = re.sub(r"(?ms)^```.*?^```|^    .*?$|`[^`\n]*`|\]\([^)]*\)", "", text)
    assert NUMBER.findall(text) == []


def test_a_cell_has_the_interval_that_holds_together_with_those_of_the_other_variants(losses):
    one = {variant: rates for (*key, variant), rates in losses.items() if key == ["width-1024", "1024x1", "44ad1b2"]}
    at_best = {  # seed 0 alone ran at more than one rate, but for three runs at the paper's
        variant: min(rates.values(), key=lambda runs: runs.get(0, math.inf)) for variant, rates in one.items()
    }
    adamw = at_best.pop("AdamW")
    fresh = {variant: sorted(runs.keys() & adamw.keys() - {0}) for variant, runs in at_best.items()}
    family = sum(map(bool, fresh.values()))
    deltas = [at_best["paper"][seed] - adamw[seed] for seed in fresh["paper"]]
    mean = sum(deltas) / 5
    own = math.sqrt(sum((delta - mean) ** 2 for delta in deltas) / 4)
    half = stats.t.ppf(1 - 0.01 / family / 2, 4) * own / math.sqrt(5)
    assert mean < 0 < mean + half
    text = f"{mean:+.3f} ± {half:.3f} not resolved, all 5 seeds are lower"
    start = "| the paper's method with its initialization |"
    assert cell_of("docs/explanation/evidence.md", f"{start} {mean:+.3f}", 1) == text


def test_a_difference_of_two_methods_has_an_interval_of_its_own(losses):
    key = ("width-1024-cores", "1024x1-no-bias", "50a7ce3")
    number, matched = (losses[*key, variant][1e-3] for variant in ("number", "matched"))
    deltas = [number[seed] - matched[seed] for seed in (1, 2, 3)]
    mean = sum(deltas) / 3
    half = 9.9248 * math.sqrt(sum((delta - mean) ** 2 for delta in deltas) / 2 / 3)  # Student's t
    text = f"**{mean:+.3f} ± {half:.3f}** better (3 seeds) |"
    assert cell_of("docs/explanation/evidence.md", "| the same, no biases |", 2) == text


def test_every_variant_of_every_row_is_on_the_page_of_experiments():
    compared = [comparison for _, comparison in experiments()]
    rows = (ROOT / "results/mini.csv").read_text().splitlines()[1:]
    assert sum(len(comparison.runs) for comparison in compared) == len(rows)
    page = (ROOT / "results/experiments.md").read_text()
    for variant in {variant for comparison in compared for variant in comparison.variants}:
        assert re.search(rf"(>|\| ){re.escape(variant)}, [\d.]+( \||: )", page), variant


@pytest.mark.parametrize("name", ["README.md", "experiments.md", "log.md"])
def test_links_beside_the_rows_lead_to_files(name):
    page = ROOT / "results" / name
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
    assert targets
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_the_page_of_experiments_says_the_setting_the_verdict_and_what_diverged(evidence, tmp_path):
    path = tmp_path / "rows.csv"
    lines = ["table,panel,variant,lr,seed,stage,data,steps,commit,final_loss"]
    for seed in range(3):
        losses = {"AdamW": 1.0, "better": 0.5 + 0.001 * seed, "diverged": ""}
        lines += [f"t,p,{name},0.2,{seed},sweep,c9b75369,600,abcdef0,{loss}" for name, loss in losses.items()]
    path.write_text("\n".join(lines) + "\n")
    (pair,) = compared = experiments(path)
    title = "**p, 600 steps, Python sources**<br>AdamW, 0.2: 1.0000 (abcdef0)"
    assert list(evidence.lines(by_key(compared), *pair)) == [
        f"| {title} | better, 0.2 | **-0.499 ± 0.006** better (3 seeds) |",
        "| ... | diverged | diverged |",
    ]


def test_all_methods_of_a_setting_are_compared_with_its_best_adamw(evidence, losses):
    twelve = ("width-1024-gpu", "1024x12")
    adamw, paper = losses[*twelve, "648d882", "AdamW"][1e-3], losses[*twelve, "354dea9", "paper"][7e-4]
    drawn = evidence.forest(experiments()).numbers
    _, _, seeds = re.search(r"paper's method \+ init., lr 0.0007: .*", drawn)[0].partition("seeds (* chose): ")
    assert seeds == f"0* {paper[0] - adamw[0]:+.4f}, 1 {paper[1] - adamw[1]:+.4f}, 2 {paper[2] - adamw[2]:+.4f}"

    rows = by_key(experiments())
    for setting, places in evidence.SHOWN.items():
        first, *others = (rows[key].at("AdamW", rows[key].best_lr("AdamW")) for key, _ in places.values())
        for other in others:
            pairs = [(first[seed].loss, other[seed].loss) for seed in first if seed in other]
            assert sum(one for one, _ in pairs) <= sum(loss for _, loss in pairs), setting


def test_drawn_are_the_seeds_and_the_interval_over_those_that_did_not_choose(evidence, losses):
    paper, adamw = (losses["width-1024", "1024x1", "44ad1b2", variant][1e-3] for variant in ("paper", "AdamW"))
    deltas = {seed: paper[seed] - adamw[seed] for seed in range(6)}  # seed 0 chose
    (row,) = (row for row in by_key(experiments())[evidence.ONE].best if row.variant == "paper")

    (axes,) = evidence.forest(experiments()).figure.axes
    ends = [row.interval.low, row.interval.high]
    (bar,) = (line for line in axes.lines if list(line.get_xdata()) == pytest.approx(ends, abs=1e-6))
    y = bar.get_ydata()[0]
    dots = [line for line in axes.lines if list(line.get_ydata()) == [y]]
    assert sorted(dot.get_xdata()[0] for dot in dots) == pytest.approx(sorted(deltas.values()))
    full = [dot.get_xdata()[0] for dot in dots if dot.get_markerfacecolor() != "white"]
    assert full == pytest.approx(list(deltas.values())[1:])


def test_a_picture_repeats_and_carries_its_numbers(evidence, tmp_path):
    with evidence.mpl.rc_context(evidence.STYLE):
        for name in ("a", "b"):
            picture = evidence.rates(experiments())
            picture.save(tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert evidence.numbers_of(tmp_path / "a.svg") == picture.numbers
    assert "qk-bias, lr 0.001, seed 0: 3.7" in picture.numbers


def test_seeds_that_chose_a_rate_count_only_if_all_did_and_a_given_rate_was_not_chosen(tmp_path):
    path = tmp_path / "rows.csv"
    lines = ["table,panel,variant,lr,seed,stage,data,steps,commit,final_loss"]
    found = {"AdamW": [2.0, 2.0, 2.0, 2.0], "a": [1.0, 1.1, 1.2, 1.3], "b": [1.5, 1.2, 1.3, 1.2]}
    for seed in range(4):
        stage = "confirm" if seed else "sweep"
        lines += [f"t,p,{name},0.2,{seed},{stage},c9b75369,6,abcdef0,{runs[seed]}" for name, runs in found.items()]
    lines += ["t,p,AdamW,0.1,0,sweep,c9b75369,6,abcdef0,2.5", "t,p,c,0.2,0,sweep,c9b75369,6,abcdef0,2.25"]
    path.write_text("\n".join(lines) + "\n")
    rows, key = by_key(experiments(path)), Key("t", "p", "abcdef0", 6)

    ours = difference(rows, Place(key, "a", "b"))
    assert ours.chose == {0}
    assert list(ours.interval.values) == pytest.approx([-0.1, -0.1, 0.1])
    assert f"{ours}" == "-0.033 ± 0.662 no difference detected (3 seeds)"  # 9.9248 times the standard error, 0.0667
    assert ours.listed == r"-0.033 ± 0.662 no difference detected (-0.500\*, -0.100, -0.100, +0.100)"
    assert f"{difference(rows, Place(key, 'c'))}" == "+0.250 (1 seed)"
    assert f"{difference(rows, Place(key, 'c', 'AdamW@0.1'))}" == "-0.250 (1 seed)"
    given = difference(rows, Place(key, "a@0.2", "b@0.2"))
    assert (given.chose, len(given.interval.values)) == (set(), 4)
    assert difference(rows, Place(key, "not run")) is difference(rows, Place(Key("no", "p", "", 6), "a")) is None
    assert "no result" in written(rows, "<!-- table: author -->\n\n")


def test_a_course_is_the_mean_over_fresh_seeds_at_the_rates_that_are_best_at_the_end(tmp_path):
    path = tmp_path / "rows.csv"
    lines = ["table,panel,variant,lr,seed,stage,data,steps,commit,final_loss,curve"]
    curves = {  # (variant, rate, seed): losses after 0, 3 and 6 steps
        ("AdamW", 0.2, 0): (9, 5, 2),
        ("a", 0.1, 0): (9, 1, 4),
        ("a", 0.2, 0): (9, 8, 3),
        ("AdamW", 0.2, 1): (9, 5, 2),
        ("a", 0.2, 1): (9, 4.5, 2.5),
        ("AdamW", 0.2, 2): (9, 5, 2),
        ("a", 0.2, 2): (9, 4, 2.25),
    }
    for (name, rate, seed), (first, middle, last) in curves.items():
        stage = "confirm" if seed else "sweep"
        # Its rounded last point gives way to the final loss.
        curve = f"0:{first} 3:{middle} 6:{last + 1}"
        lines.append(f"t,p,{name},{rate},{seed},{stage},c9b75369,6,abcdef0,{last},{curve}")
    path.write_text("\n".join(lines) + "\n")
    rows, place = by_key(experiments(path)), Place(Key("t", "p", "abcdef0", 6), "a")
    assert [mean_after(rows, place, steps) for steps in (0, 3, 6)] == [0.0, -0.75, 0.375]
