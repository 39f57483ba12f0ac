"""Small runs, and comparisons of plain numbers, for all figures."""

import pytest

from corpora import prepared
from run_folders import trained
from symexplin.lab.maps import CurveConfig
from table_folders import comparison


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Folders of a small run on ordinary weights, and of a curved one whose scales are learned and annealed."""
    folder = tmp_path_factory.mktemp("runs")
    data = prepared(folder / "data")
    return {
        "plain": trained(data, folder / "plain", CurveConfig(home="none")),
        "curved": trained(data, folder / "curved", CurveConfig(preset="paper", start="mismatched", map={"beta": 7.5})),
    }


@pytest.fixture
def compared(tmp_path):
    """A maker of a comparison's folder, see `table_folders.comparison`; `trained` are runs in it, {name: folder}."""

    def make(name="c", trained=None, **changes):
        folder = comparison(tmp_path / name, **changes)
        (folder / "runs").mkdir()
        for run, place in (trained or {}).items():
            (folder / "runs" / run).symlink_to(place)
        return folder

    return make
