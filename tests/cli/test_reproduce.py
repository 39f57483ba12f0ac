"""`symexplin reproduce` as a user gives it."""

import pytest

from corpora import prepared
from symexplin import cli
from symexplin.experiments.tables import names, read_table

TINY = (
    *("--lrs", "2e-3", "--steps", "2", "--jobs", "1", "--set", "model.width=16", "model.depth=1", "model.heads=2"),
    *("model.context=8", "train.batch_size=2", "train.eval_batches=1", "compare.confirm_seeds=[]"),
)


def test_without_a_name_it_lists_the_tables(capsys):
    assert cli.main(["reproduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines] == list(names().items())


def test_a_plan_trains_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", "main_grid", "--plan", "--scale", "paper", "--seeds", "1", "2"]) == 0
    out = capsys.readouterr().out
    assert "3072x36: AdamW, mismatch, mismatch+offset; lrs 0.0003; seeds 1 2; up to 6 runs of 150,000 steps" in out
    assert "train.batch_size: The grid's net batch" in out
    assert not list(tmp_path.iterdir())


def test_one_command_runs_a_table_and_goes_on(capsys, tmp_path, monkeypatch):
    data = prepared(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    command = ["reproduce", "frozen", "--data", data, "--results", "results/mini.csv", *TINY]
    assert cli.main([*command, "--arms", "AdamW", "frozen"]) == 0
    assert "rows added to results/mini.csv: 2" in capsys.readouterr().out
    out = tmp_path / "runs" / "reproduce" / "frozen-mini"
    assert (out / "report.html").exists()
    assert cli.main([*command, "--arms", "AdamW", "frozen", "full", "--resume"]) == 0
    assert "rows added to results/mini.csv: 1" in capsys.readouterr().out
    assert [run["arm"] for run in read_table(out).panels[0].found["runs"]] == ["AdamW", "frozen", "full"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frozzen"], "did you mean 'frozen'"),
        (["frozen", "--scale", "tiny"], "--scale must be one of"),
        (["frozen", "--arms", "AdamW", "ful"], "did you mean 'full'"),
        (["frozen", "--set", "modle.width=3"], "did you mean 'model'"),
        (["frozen", "--scale", "h200"], "data must be given"),
        (["frozen", "--out", ""], "out must name a folder"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not list(tmp_path.iterdir())
