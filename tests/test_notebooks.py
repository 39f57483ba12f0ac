"""The notebooks run as scripts, from their sources; `make docs` runs them as notebooks and shows what they draw."""

import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

jupytext = pytest.importorskip("jupytext")
NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("source", NOTEBOOKS, ids=lambda source: source.stem)
def test_a_notebook_runs_and_draws(source, monkeypatch, capsys):
    cells = jupytext.read(source).cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    drawn = []
    monkeypatch.setattr(plt, "show", lambda: drawn.append(len(plt.gca().lines) or len(plt.gca().patches)))
    plt.switch_backend("agg")
    runpy.run_path(str(source))
    plt.close("all")
    assert len(drawn) == sum("plt.show()" in cell.source for cell in cells) > 0
    assert all(drawn)
    capsys.readouterr()
