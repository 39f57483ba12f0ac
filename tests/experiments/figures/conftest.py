"""Small runs, and comparisons of plain numbers, for all figures."""

import json

import pytest

from run_folders import comparison, prepared, trained
from symexplin.lab.maps import CurveConfig


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Folders of a small run on ordinary weights, and of a curved one whose scales are learned and annealed."""
    folder = tmp_path_factory.mktemp("runs")
    data = prepared(folder / "data")
    return {
        "plain": trained(data, folder / "plain", CurveConfig(home="none")),
        "curved": trained(data, folder / "curved", CurveConfig(preset="paper")),
    }


@pytest.fixture
def compared(tmp_path):
    """A maker of a comparison's folder, see `run_folders.comparison`.

    `variants`: further ones by name, each like SEL but ending so many nats higher.
    """

    def make(name="c", width=64, depth=2, variants=None, maps=None, **changes):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = {"model": {"width": width, "depth": depth}, "train": {"steps": 100}}
        comparison(folder, config=config, **changes)
        path = folder / "comparison.json"
        found = json.loads(path.read_text())
        for variant, more in (variants or {}).items():
            for rows in (found["comparison"]["best"], found["comparison"]["shared"]):
                rows.append(_raised(rows[1], variant, more))
            found["runs"] += [_raised(run, variant, more) for run in found["runs"] if run["variant"] == "SEL"]
        found["maps"] |= maps or {}
        path.write_text(json.dumps(found))
        return folder

    return make


def _raised(record, variant, more):
    """Return a row or a run under another name with all its losses higher by `more`."""
    record = {**record, "variant": variant}
    for key in ("loss", "delta", "final_loss"):
        if record.get(key) is not None:
            record[key] += more
    if "deltas" in record:
        record["deltas"] = [None if delta is None else delta + more for delta in record["deltas"]]
    if "evals" in record:
        record["evals"] = [[step, loss + more] for step, loss in record["evals"]]
    return record
