"""The order of runs, what is said of them, and how their results are read; the runs are a script's."""

import json
import re
import shlex
import sys

import pytest

from executors import in_process  # noqa: F401 (a fixture)
from symexplin import cli
from symexplin.lab import identity
from symexplin.lab.compare.comparison import Comparison
from symexplin.lab.compare.grid import Cell
from symexplin.lab.compare.result import read_run
from symexplin.lab.compare.words import notes, verdict

pytestmark = pytest.mark.usefixtures("undrawn", "in_process")

# By seed 0 alone plain is best at 0.1 and good at 0.2; seeds 3 and 4 would choose otherwise. Starts are counted.
SCRIPT = """
import json, pathlib, sys
variant, lr, seed, out = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
starts = out / "starts"
starts.write_text((starts.read_text() if starts.exists() else "") + "x")
if variant.startswith("bad"):
    print("one"), print("two")
    sys.exit("no such thing" if variant == "bad" else 0)
if variant == "odd":
    (out / "result.json").write_text("{}")
    sys.exit()
loss = {("plain", 0.1): 2.0, ("plain", 0.2): 2.1, ("good", 0.1): 1.9, ("good", 0.2): 1.8}[variant, lr]
result = {"loss": loss + seed / 10 + (variant == "good" and seed) / 1000, "curve": [[0, 5.0], [50, 3.0], [100, 9.9]]}
result |= {"seconds": 7.5} if variant == "good" else {}
(out / "result.json").write_text(json.dumps(result))
"""
NAMES = [f"{variant}-lr{lr}-seed{{}}" for lr in (0.1, 0.2) for variant in ("plain", "good")]


@pytest.fixture
def run(tmp_path, capsys):
    """Compare by the command line, and return what was printed, or with `status=2` the error."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = shlex.join([sys.executable, str(script)]) + " {variant} {lr} {seed} {out}"

    def run(*arguments, status=0, variants="plain good", lrs="0.1 0.2", resume=False, command=command):
        capsys.readouterr()
        own = ["--variants", *variants.split(), "--lrs", *lrs.split(), "--command", command]
        own = [] if resume else own
        words = ["compare", "--out", str(tmp_path / "out"), *own, *(["--resume"] if resume else []), *arguments]
        assert cli.main(words) == status
        said = capsys.readouterr()
        return said.err if status else said.out.splitlines()

    return run


def started(out):
    return {path.parent.name: path.read_text() for path in out.glob("runs/*/starts")}


def test_both_stages_run_in_order_and_the_result_is_told_saved_and_shown(run, tmp_path):
    lines, out = run("--confirm-seeds", "3", "4"), tmp_path / "out"
    assert lines[0].endswith("{out}; up to 10 runs")
    assert lines[1] == "1/4 plain lr 0.1 seed 0: loss 2.0000"
    assert lines[2] == "2/4 good lr 0.1 seed 0: loss 1.9000, 8 s"
    assert "to confirm with 6 runs: plain at 0.1; good at 0.1 and 0.2" in lines
    comparison = Comparison.load(out)
    names = [comparison.folder_of(run).name for run in comparison.runs]
    first = [name.format(0) for name in NAMES]
    assert names == first + [name.format(seed) for seed in (3, 4) for name in (NAMES[0], NAMES[1], NAMES[3])]
    assert started(out) == dict.fromkeys(names, "x")
    assert (comparison.seeds, comparison.confirm_seeds) == ((0, 3, 4), (3, 4))
    row = comparison.best[1]
    assert (row.lr, row.deltas) == (0.2, pytest.approx((-0.197, -0.196)))
    assert row.speedup is not None  # the curve ends at the loss
    assert all(sentence in lines for sentence in (*verdict(comparison), *notes(comparison)))
    page = (out / "report.html").read_text()
    assert notes(comparison)[-1] in page
    assert "as the command reports it" in page
    assert "nats" not in page


def test_a_resumed_comparison_runs_what_is_new_and_measured_times_stay(run, tmp_path):
    run()
    out = tmp_path / "out"
    (out / "processes").mkdir(exist_ok=True)
    for name in NAMES[:2]:
        (out / "processes" / f"{name.format(0)}.json").write_text('{"seconds": 3.25}')
    assert "which has a comparison: add --resume" in run(status=2)
    lines = run("--seeds", "0", "1", resume=True)
    assert "4 of 8 runs are already there" in lines
    assert set(started(out)) == {name.format(seed) for seed in (0, 1) for name in NAMES}
    assert set(started(out).values()) == {"x"}
    seconds = {(r.variant, r.lr, r.seed): r.seconds for r in Comparison.load(out).runs}
    assert (seconds["plain", 0.1, 0], seconds["good", 0.1, 0], seconds["plain", 0.2, 0]) == (3.25, 7.5, None)
    run("--variants", "good", "plain", resume=True)
    assert Comparison.load(out).baseline == "good"  # nobody named the first one
    assert "whose command was '" in run("--resume", status=2, command="true {variant} {lr} {seed} {out}")


@pytest.mark.parametrize(("variant", "reason"), [("bad", "no such thing"), ("bad0", "it ended without ")])
def test_the_first_run_without_a_result_stops_the_comparison_and_a_later_one_is_named(run, tmp_path, variant, reason):
    error = run(status=2, variants=f"{variant} good plain")
    assert f"1/6 {variant} lr 0.1 seed 0: {reason}" in error
    if variant == "bad0":
        assert str(tmp_path / "out" / "runs" / f"{variant}-lr0.1-seed0" / "result.json") in error
        assert '{"loss": 2.31, "curve": [[100, 3.02], [200, 2.31]]}' in error
    assert error.endswith("; correct that and --resume\n")
    assert list(started(tmp_path / "out")) == [f"{variant}-lr0.1-seed0"]
    error = run("--variants", "good", variant, "plain", "--baseline", "plain", status=2, resume=True)
    assert f"error: 2/6 {variant} lr 0.1 seed 0: {reason}" in error
    assert len(started(tmp_path / "out")) == 6
    run("--variants", "good", "plain", resume=True)
    counts = {name: count for name, count in started(tmp_path / "out").items() if not name.startswith("bad")}
    assert set(counts.values()) == {"x"}  # those that ended well are not run again


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "loss must be given"),
        ("[2.3]", "it is not an object"),
        ('{"loss": "2.3"}', "loss must be a number, got '2.3'"),
        ('{"loss": null}', "loss must be given"),
        ('{"loss": true}', "loss must be a number, got True"),
        ('{"loss": 2.3', "Expecting ',' delimiter"),
        ('{"loss": 2.3, "curve": [2.3]}', r"curve must be a list, got 2\.3"),
        ('{"loss": 2.3, "curve": [[1]]}', r"curve must be a list of \[step, loss\] or of \[step, loss, seconds\]"),
        ('{"loss": 2.3, "curve": [[0, 1.0], [0, 2.0]]}', "curve must have steps that are whole numbers and increase"),
        ('{"loss": 2.3, "curve": [[0.5, 1.0]]}', "curve must have steps"),
        ('{"loss": 2.3, "curve": [[-1, 1.0]]}', "curve must have steps"),
        ('{"loss": 2.3, "curve": [[1, 2.0, 3.0], [2, 2.0, 2.0]]}', "curve must have seconds that increase from 0"),
        ('{"loss": 2.3, "seconds": NaN}', "seconds must be"),
        ('{"loss": 2.3, "tokens_per_second": -1}', "tokens_per_second must be"),
    ],
)
def test_a_result_that_cannot_be_read_is_named(tmp_path, text, said):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ValueError, match=rf"/result\.json' must be like .* \(the curve is optional\), but {said}"):
        read_run(tmp_path, Cell("good", 0.1, 0))


@pytest.mark.parametrize(
    ("text", "loss", "error", "curve"),
    [
        ('{"loss": 0.5, "curve": [[0, 0.6], [5, NaN], [10.0, 0.7]]}', 0.5, None, ((0, 0.6), (10, 0.5))),
        ('{"loss": 1, "error": null, "seconds": 3}', 1.0, None, ((0, 1.0),)),
        ('{"loss": NaN, "curve": [[5, 3.0]]}', None, "loss is nan", ((5, 3.0),)),
        ('{"loss": -1.5e308, "x": 1%s}' % ("0" * 400), None, "loss is -1.5e+308", ()),
        ('{"error": "step 3: loss is inf", "step": 3, "curve": [[0, 5.5]]}', None, "step 3: loss is inf", ((0, 5.5),)),
    ],
)
def test_a_run_may_say_little_or_that_it_diverged(tmp_path, text, loss, error, curve):
    (tmp_path / "result.json").write_text(text)
    run = read_run(tmp_path, Cell("good", 0.1, 0))
    assert (run.loss, run.error, run.curve, run.seconds) == (loss, error, curve, 3.0 if "seconds" in text else None)


def test_a_first_result_that_cannot_be_read_has_one_remedy(run):
    error = run(status=2, variants="odd plain")
    assert error.endswith("loss must be given: correct it, or delete it to run again; then --resume\n")


def test_a_damaged_result_and_a_baseline_that_is_finite_nowhere_are_named_and_may_be_mended(run, tmp_path):
    run(lrs="0.2")
    good, plain = (
        tmp_path / "out" / "runs" / f"{variant}-lr0.2-seed0" / "result.json" for variant in ("good", "plain")
    )
    good.write_text("{")
    assert f"'{good}' must be like " in run(status=2, resume=True)
    good.unlink()
    plain.write_text(json.dumps({"loss": float("inf")}))
    error = run(status=2, resume=True)
    assert "plain diverged in at least one seed" in error
    assert "added to --lrs 0.2\n" in error
    run("--lrs", "0.1", "0.2", resume=True)
    assert Comparison.load(tmp_path / "out").shared_lr == 0.1


def test_runs_of_an_edited_script_or_of_another_version_are_not_mixed_unless_told(run, tmp_path, monkeypatch):
    script, out = tmp_path / "train.py", tmp_path / "out"
    run()
    script.write_text(SCRIPT.replace("2.0,", "2.5,"))
    error = run("--seeds", "0", "1", status=2, resume=True)
    assert f"since {NAMES[0].format(0)} and 3 more began, {script} changed; --mix-code goes on" in error
    assert set(started(out).values()) == {"x"}
    assert len(started(out)) == 4
    assert "--mix-code goes on" in run("--confirm-seeds", "1", status=2, resume=True)  # in the second stage
    assert "The runs were made by different code" not in run(resume=True)  # nothing is to run
    lines = run("--seeds", "0", "1", "--mix-code", resume=True)
    assert f"The runs were made by different code: {script} changed." in lines
    assert len(started(out)) == 8

    monkeypatch.setattr(identity, "of_package", lambda: {"source": "b", "provenance": {"commit": "b" * 40}})
    error = run("--seeds", "0", "1", "2", status=2, resume=True)
    assert re.search(r"symexplin \(from commit \w+ to bbbbbbbbbbbb\) changed; --mix-code", error)


def test_a_command_that_failed_may_be_corrected(run, tmp_path):
    assert "no such thing" in run(status=2, variants="bad plain")
    script = tmp_path / "train.py"
    script.write_text(f"{script.read_text()}\n# corrected\n")
    assert "no such thing" in run(status=2, resume=True)  # not that the script has changed


def test_a_resumed_comparison_runs_where_it_was_begun(run, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    command = f"{sys.executable} train.py {{variant}} {{lr}} {{seed}} {{out}}"
    run(command=command)
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "train.py").write_text("raise SystemExit('the other one')")
    lines = run("--seeds", "0", "1", resume=True)
    assert "4 of 8 runs are already there" in lines
    assert len(started(tmp_path / "out")) == 8
