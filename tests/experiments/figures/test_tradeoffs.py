"""Figures of compression, forgetting and trends, from folders of plain numbers."""

import pytest

from symexplin.experiments.figures import draw
from symexplin.lab.files import JsonLines, write_json
from table_folders import table_folder


def folders_of(folder, cells):
    for (arm, lr), value in cells.items():
        for seed in (0, 1, 2):
            place = folder / f"panels/64x3/runs/{arm}-lr{lr:g}-seed{seed}"
            place.mkdir(parents=True, exist_ok=True)
            yield place, value


def lines(axes):
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines if line.get_label()[0] != "_"}


def test_compression_has_a_line_per_family_over_the_share_of_zeros(tmp_path):
    folder = table_folder(tmp_path / "t", "sparsity", lambda *_: 1.0)
    for place, loss in folders_of(folder, {("AdamW", 0.01): 2.0, ("l1-0_1", 0.01): 1.5, ("l1-0_3", 0.01): 1.7}):
        once = {"0.9": loss + 1, "0.5": loss, "int8": 9.0, "2:4": 9.0}
        write_json(place / "compressed.json", {"dense": 1.0, "once": once, "retrained": {"0.9": loss, "2:4": 9.0}})
    once, retrained = draw("compression", [folder]).axes
    assert lines(once) == {
        "AdamW": [[0.0, 1.0], [0.5, 2.0], [0.9, 3.0]],
        "AdamW + L1": [[0.0, 1.0], [0.5, 1.5], [0.9, 2.5]],
    }
    assert lines(retrained) == {"AdamW": [[0.0, 1.0], [0.9, 2.0]], "AdamW + L1": [[0.0, 1.0], [0.9, 1.5]]}
    assert once.get_ylim()[1] == pytest.approx(1.4)  # times the lowest


def test_forgetting_has_a_line_per_family_from_front_to_front(tmp_path):
    folder = table_folder(tmp_path / "t", "finetune", lambda *_: 1.0)
    points = {("AdamW", 0.001): (2.0, 2.0), ("AdamW", 0.01): (1.0, 3.0), ("lora-8", 0.01): (1.5, 2.0)}
    for place, (new, old) in folders_of(folder, points):
        with JsonLines(place / "metrics.jsonl") as metrics:
            metrics.write(step=100, eval_loss=new, old_loss=old)
        write_json(place / "interpolated.json", {"0.5": {"eval_loss": new + 0.5, "old_loss": old - 1.5}})
    last, between = (lines(axes) for axes in draw("forgetting", [folder]).axes)
    assert last["AdamW"][0] == [1.0, 3.0]
    assert last["AdamW"][-1] == [2.0, 2.0]
    assert between["AdamW"][-1] == [2.5, 0.5]


def test_trend_has_a_line_per_arm_over_the_size(tmp_path):
    folder = table_folder(tmp_path / "t", "lengths", lambda arm, *_: 2.0 - 0.1 * (arm == "number"))
    (axes,) = draw("trend", [folder]).axes
    assert [x for x, _ in lines(axes)["The default map"]] == [300, 1000, 3000, 10_000]
    assert [y for _, y in lines(axes)["One number a matrix"]] == pytest.approx([-0.1] * 4)


@pytest.mark.parametrize(
    ("name", "words"),
    [("compression", r"\[log\] compress"), ("forgetting", r"\[log\] old"), ("trend", "differ in width")],
)
def test_other_comparisons_are_refused(name, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        draw(name, [table_folder(tmp_path / "t", "frozen", lambda *_: 2.0)])
