import csv
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from executors import executed
from symexplin.experiments.reproduce import ReproduceConfig, reproduce
from symexplin.experiments.results import COLUMNS, append_results
from symexplin.lab.compare.comparison import Comparison
from symexplin.lab.files import write_json
from symexplin.lab.identity import config_hash
from symexplin.lab.settings import load_toml


@pytest.fixture(scope="module")
def out(data, tmp_path_factory):
    """The folder of a table of two variants, confirmed with another seed."""
    small = {
        "model": {"width": 16, "depth": 1, "heads": 2, "context": 8},
        "train": {"batch_size": 2, "eval_batches": 1},
        "compare": {"confirm_seeds": [1]},
    }
    grid = {"variants": ("AdamW", "frozen"), "lrs": (1e-3,), "seeds": (0,), "jobs": 1}
    out = tmp_path_factory.mktemp("results") / "out"
    with executed():
        reproduce("frozen", out, ReproduceConfig(data=(data,), steps=2, set=small, **grid))
    return out


def rows(file):
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_a_row_has_what_the_run_has(out, tmp_path):
    file = tmp_path / "new" / "results.csv"
    count = append_results(out, file)
    (panel,) = (out / "panels").iterdir()
    comparison = Comparison.load(panel)
    found = rows(file)
    assert count == len(found) == len(comparison.runs)
    assert tuple(found[0]) == COLUMNS
    runs = {(run.variant, run.lr, run.seed): run for run in comparison.runs}
    for row in found:
        run = runs[row["variant"], float(row["lr"]), int(row["seed"])]
        assert (row["table"], row["scale"], row["panel"], row["variant"]) == ("frozen", "mini", "16x1", run.variant)
        assert [float(row[key]) for key in ("lr", "seed", "final_loss")] == [run.lr, run.seed, run.loss]
        assert row["stage"] == ("sweep" if run.seed == 0 else "confirm")
        facts = json.loads((comparison.folder_of(run) / "run.json").read_text())
        assert (row["data"], row["machine"]) == (facts["data"], facts["provenance"]["processor"])
        assert (row["steps"], row["tokens"]) == ("2", str(2 * 2 * 8))
        curve = [tuple(map(float, point.split(":"))) for point in row["curve"].split()]
        assert curve == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in run.curve]
    assert len({row["config_hash"] for row in found}) == len(found)


def test_the_file_only_grows(out, tmp_path):
    """A table that stops keeps the rows of the runs that have ended; resumed, it adds those of the others."""
    file, cut = tmp_path / "results.csv", tmp_path / "cut"
    shutil.copytree(out, cut)
    unfinished = next(cut.glob("panels/*/runs/*-seed1/result.json"))
    summary = unfinished.read_bytes()
    unfinished.unlink()
    runs = len(list(cut.glob("panels/*/runs/*")))
    assert append_results(cut, file) == runs - 1
    text = file.read_text()
    assert append_results(cut, file) == 0
    assert file.read_text() == text
    unfinished.write_bytes(summary)
    assert append_results(cut, file) == 1
    assert file.read_text().startswith(text)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} - {"results.csv.lock"} == {"results.csv"}
    file.write_text("table,loss\nfrozen,1.0\n")
    with pytest.raises(ValueError, match="must have the columns table, scale, panel"):
        append_results(out, file)
    assert file.read_text() == "table,loss\nfrozen,1.0\n"


def test_tables_that_end_at_once_lose_no_row(out, tmp_path):
    file, folders = tmp_path / "results.csv", [tmp_path / str(number) for number in range(8)]
    for folder in folders:
        shutil.copytree(out, folder)
        said = json.loads((folder / "table.json").read_text())
        write_json(folder / "table.json", {**said, "name": folder.name})
    with ThreadPoolExecutor(len(folders)) as pool:
        counts = list(pool.map(lambda folder: append_results(folder, file), folders))
    assert len(rows(file)) == sum(counts)
    assert {row["table"] for row in rows(file)} == {folder.name for folder in folders}


def test_the_hash_is_of_what_the_run_computes(out):
    config = load_toml(next(out.glob("panels/*/runs/*")) / "config.toml")
    assert config_hash({**config, "data": "elsewhere", "log": {}}) == config_hash(config)
    assert config_hash({**config, "train": {**config["train"], "lr": 0.5}}) != config_hash(config)
