import json

import pytest

from symexplin.lab.compare.folder import arm_of, asked, how_to_finish, read_run
from symexplin.lab.compare.grid import Cell, CompareConfig, GridConfig
from symexplin.lab.settings import dump_toml

GRID = GridConfig(("AdamW", "SEL"), (1e-3, 1e-2), (0,), confirm_seeds=(5, 6))
CONFIG = CompareConfig("data", compare=GRID)
LOSSES = {("AdamW", 1e-3): 2.0, ("AdamW", 1e-2): 3.0, ("SEL", 1e-3): 2.5, ("SEL", 1e-2): 1.0}


def write(folder, cell, loss):
    """Leave what a run leaves that ended at `loss`, or broke down if that is None."""
    path = folder / "runs" / cell.name
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval_loss": 5.0 if loss is None else loss}) + "\n")
    ending = {"error": "step 1: loss is nan"} if loss is None else {"seconds": 1.0, "tokens_per_second": 2.0}
    (path / "summary.json").write_text(json.dumps(ending))


def fill(folder, losses=LOSSES):
    for (arm, lr), loss in losses.items():
        write(folder, Cell(arm, lr, 0), loss)


def test_the_second_stage_is_asked_for_once_the_first_has_ended(tmp_path):
    fill(tmp_path, dict(list(LOSSES.items())[:3]))
    assert asked(tmp_path, CONFIG) == GRID.cells()
    write(tmp_path, Cell("SEL", 1e-2, 0), 1.0)
    second = [("AdamW", 1e-3), ("SEL", 1e-3), ("SEL", 1e-2)]
    assert asked(tmp_path, CONFIG) == GRID.cells() + [Cell(*pair, seed) for seed in (5, 6) for pair in second]
    # What the second stage finds changes nothing about what it is.
    write(tmp_path, Cell("SEL", 1e-2, 5), 9.0)
    assert len(asked(tmp_path, CONFIG)) == 10


def test_a_best_rate_of_both_is_asked_for_once(tmp_path):
    fill(tmp_path, {**LOSSES, ("SEL", 1e-3): 0.5})
    assert asked(tmp_path, CONFIG)[4:] == [Cell(arm, 1e-3, seed) for seed in (5, 6) for arm in ("AdamW", "SEL")]


def test_a_baseline_that_broke_down_ends_it_there(tmp_path):
    fill(tmp_path, {key: None if key[0] == "AdamW" else loss for key, loss in LOSSES.items()})
    with pytest.raises(ValueError, match="no learning rate of AdamW stayed finite"):
        asked(tmp_path, CONFIG)
    (tmp_path / "compare.toml").write_text(dump_toml(CONFIG.table()))
    assert "no learning rate of AdamW stayed finite" in how_to_finish(tmp_path)


def test_what_is_left_to_do_is_told(tmp_path):
    (tmp_path / "compare.toml").write_text(dump_toml(CONFIG.table()))
    assert how_to_finish(tmp_path).startswith("finish the comparison with --resume")
    fill(tmp_path)
    assert how_to_finish(tmp_path).startswith("finish the comparison with --resume")


def test_a_run_that_has_not_ended_is_none(tmp_path):
    assert read_run(tmp_path, Cell("SEL", 1e-2, 0)) is None
    write(tmp_path, Cell("SEL", 1e-2, 0), None)
    assert read_run(tmp_path, Cell("SEL", 1e-2, 0)).error == "step 1: loss is nan"


@pytest.mark.parametrize("arm", ["SEL", "a-lr", "a-lr0.1-seed3", "mismatch+offset"])
def test_a_folder_says_its_arm(arm, tmp_path):
    assert arm_of(tmp_path / Cell(arm, 1e-5, 12).name) == arm
