import re
import xml.etree.ElementTree as ElementTree

import pytest

from symexplin import cli
from symexplin.experiments.figures import FIGURES, draw, format_figures, save_figure
from table_folders import comparison


def test_the_fifteen_of_the_paper_are_there():
    places = [spec.place for spec in FIGURES.values() if spec.place]
    assert [int(re.match(r"figure (\d+), fig:\w+$", place)[1]) for place in places] == list(range(2, 17))


def test_a_figure_is_written_with_its_text_and_the_same_each_time(tmp_path):
    figure = draw("symexp_sel")
    svg, png = save_figure(figure, tmp_path / "new", "name")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"name.png", "name.svg"}
    words = {"".join(node.itertext()) for node in ElementTree.parse(svg).iter() if node.tag.endswith("}text")}
    assert {figure.axes[-1].get_xlabel(), figure.axes[0].get_ylabel()} <= words
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(head[16:20], "big") >= 1000  # pixels across
    again = save_figure(draw("symexp_sel"), tmp_path / "again", "name")
    assert [path.read_bytes() for path in again] == [svg.read_bytes(), png.read_bytes()]


@pytest.mark.parametrize(
    ("name", "sources", "words"),
    [
        ("loss_curve", [], "did you mean 'loss_curves'?"),
        ("loss_curves", [], "folders of comparisons, or of a table .* for loss_curves, got 0: none"),
        ("symexp_sel", ["x"], "sources must be none for symexp_sel, got 1: 'x'"),
        ("heavy_tail", ["x", "y"], "a safetensors file .* got 2: 'x', 'y'"),
        ("loss_curves", ["."], "a comparison or a table, or a run .*, got '.'"),
        ("heavy_tail", ["."], "give a safetensors file, or a folder"),
        ("raw_effective", ["no/such"], "no/such"),
        ("mechanism_ablations", ["damaged"], "damaged, or of another version of symexplin: 'runs' is missing"),
        (
            "loss_curves",
            ["command"],
            "got 'command', a comparison of a command: the charts that it has are in its report.html",
        ),
    ],
)
def test_a_source_that_does_not_fit_is_named(tmp_path, monkeypatch, name, sources, words):
    monkeypatch.chdir(tmp_path)
    comparison(tmp_path / "command", config={"command": "x"})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "comparison.json").write_text("{}")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        draw(name, sources)


def test_the_command_lists_and_writes(capsys, tmp_path):
    assert cli.main(["figure"]) == 0
    assert capsys.readouterr().out == format_figures() + "\n"
    assert cli.main(["figure", "congruent_mismatch", "--out", str(tmp_path)]) == 0
    files = [str(tmp_path / f"congruent_mismatch.{kind}") for kind in ("svg", "png")]
    assert capsys.readouterr().out.splitlines() == files
