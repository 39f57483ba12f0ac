"""The order of runs, and what is said of them; runs are numbers here."""

import json

import pytest

from symexplin.lab.compare.grid import Cell, GridConfig
from symexplin.lab.compare.sweep import Sweep
from symexplin.lab.compare.table import Run

pytestmark = pytest.mark.usefixtures("undrawn")

# By seed 0 alone AdamW is best at 0.1 and SEL at 0.2; seeds 3 and 4 would choose otherwise.
LOSSES = {("AdamW", 0.1): 2.0, ("AdamW", 0.2): 2.1, ("SEL", 0.1): 1.9, ("SEL", 0.2): 1.8}


class Runs:
    """Executes runs whose losses are known, and remembers which have ended."""

    def __init__(self, folder, losses=LOSSES):
        self.folder, self.losses, self.lines = folder, dict(losses), []
        self.ended, self.executed, self.failing, self.unreadable = set(), [], {}, set()

    def execute(self, left):
        for index, (_, cell) in enumerate(left):
            self.executed.append(cell)
            if cell.variant not in self.failing:
                self.ended.add(cell)
            yield index, self.failing.get(cell.variant)

    def read(self, path, cell):
        assert path == self.folder / "runs" / cell.name
        if cell in self.unreadable & self.ended:
            raise ValueError("its file is damaged")
        return Run(*cell, evals=((0, 5.0), (9, self.losses[cell[:2]]))) if cell in self.ended else None

    def sweep(self, **grid):
        settings = {"lrs": (0.1, 0.2), "seeds": (0,), "confirm_seeds": (3, 4), **grid}
        return Sweep(self.folder, GridConfig(**settings), self.execute, self.read, self.lines.append)


def cells(*places, seeds=(0,)):
    return [Cell(*place, seed) for seed in seeds for place in places]


FIRST = cells(("AdamW", 0.1), ("SEL", 0.1), ("AdamW", 0.2), ("SEL", 0.2))
SECOND = cells(("AdamW", 0.1), ("SEL", 0.1), ("SEL", 0.2), seeds=(3, 4))


def test_the_second_stage_executes_what_the_first_has_chosen(tmp_path):
    runs = Runs(tmp_path)
    sweep = runs.sweep()
    found = sweep.run()
    assert runs.executed == [Cell(r.variant, r.lr, r.seed) for r in found] == FIRST + SECOND
    assert "to confirm with 6 runs: AdamW at 0.1; SEL at 0.1 and 0.2" in runs.lines
    assert runs.lines[0] == "1/4 AdamW lr 0.1 seed 0: loss 2.0000"
    assert runs.lines[-1] == "6/6 SEL lr 0.2 seed 4: loss 1.8000"
    content = sweep.conclude(found, {"unit": "", "maps": {}, "config": {}, "provenance": {}})
    assert json.loads((tmp_path / "comparison.json").read_text()) == json.loads(json.dumps(content))
    assert [run["stage"] for run in content["runs"]] == [1] * 4 + [2] * 6
    assert content["runs"][-1]["folder"] == "runs/SEL-lr0.2-seed4"
    assert (content["comparison"]["seeds"], content["comparison"]["confirm_seeds"]) == ((0, 3, 4), (3, 4))
    assert content["headline"][-1] in (tmp_path / "report.html").read_text()
    assert all(sentence in "\n".join(runs.lines) for sentence in content["headline"])


def test_failing_runs_are_named_after_the_others_have_run(tmp_path):
    """One was damaged before, one fails, one ends with a result that cannot be read."""
    names = ("AdamW", "old", "bad", "odd", "good")
    runs = Runs(tmp_path, {(variant, 0.1): 1.0 for variant in names})
    runs.failing, runs.unreadable = {"bad": "one / two / three"}, set(cells(("old", 0.1), ("odd", 0.1)))
    runs.ended = set(cells(("old", 0.1)))
    with pytest.raises(ChildProcessError, match=r"^2/5 old lr 0\.1 seed 0: its file is damaged; 2 more failed: see"):
        runs.sweep(variants=names, lrs=(0.1,), confirm_seeds=()).run()
    assert runs.lines == [
        "failed: 2/5 old lr 0.1 seed 0: its file is damaged",
        "1/5 AdamW lr 0.1 seed 0: loss 1.0000",
        "failed: 3/5 bad lr 0.1 seed 0: one / two / three",
        "failed: 4/5 odd lr 0.1 seed 0: its file is damaged",
        "5/5 good lr 0.1 seed 0: loss 1.0000",
    ]
