import dataclasses
import json
import shutil

import pytest
import torch

from run_folders import MODEL
from symexplin.experiments.figures import draw
from symexplin.experiments.figures.curves import start_slope
from symexplin.lab.build import build_model
from symexplin.lab.config import RunConfig, TrainConfig
from symexplin.lab.maps import CurveConfig
from symexplin.lab.weights.files import save_model

EXPONENTIAL = {"preset": "exp_only", "map": {"beta": 5.0}}


def slope_of(modules):
    """(exp(beta |w|) - 1) / beta = |t| has the slope exp(beta |w|) = 1 + beta |t|, at the matrices of `modules`."""
    sizes = torch.cat([w.flatten() for module in modules for w in module.parameters() if w.dim() == 2]).abs()
    return pytest.approx(1 + 5.0 * float(sizes.detach().double().mean()), rel=1e-5)


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_the_slope_of_the_exponential_map_is_known(home):
    config = RunConfig("data", MODEL, sel=CurveConfig(home, **EXPONENTIAL))
    plain = build_model(dataclasses.replace(config, sel=CurveConfig("none")), "cpu")
    assert start_slope(config) == slope_of(plain.blocks[:1])  # the others are drawn like it
    assert start_slope(dataclasses.replace(config, sel=CurveConfig("none"))) == 1.0


def test_the_slope_at_given_weights_is_that_of_all_blocks(tmp_path):
    model = build_model(RunConfig("data", MODEL, sel=CurveConfig("none")), "cpu")
    with torch.no_grad():
        for parameter in model.blocks[1].parameters():
            parameter.mul_(3.0)
    save_model(model, tmp_path / "given.safetensors")
    train = TrainConfig(weights=str(tmp_path / "given.safetensors"))
    assert start_slope(RunConfig("data", MODEL, train, sel=CurveConfig(**EXPONENTIAL))) == slope_of(model.blocks)


def test_lines_stand_at_the_rate_and_at_the_rate_times_the_slope(compared, runs):
    folder = compared(seeds=(0, 1))
    (folder / "runs").mkdir()
    for arm, run in (("AdamW", "plain"), ("SEL", "curved")):
        (folder / "runs" / f"{arm}-lr0.001-seed0").symlink_to(runs[run])
    figure = draw("learning_rates", [folder])
    left, right = ({line.get_label(): line for line in axes.lines} for axes in figure.axes)
    slope = start_slope(RunConfig("data", MODEL, sel=CurveConfig(preset="paper", start="mismatched")))
    assert slope > 1.1
    (curved,) = [label for label in right if label.startswith("SEL")]
    assert curved == f"SEL (× {slope:.2f})"
    assert list(left[curved].get_xdata()) == [0.001, 0.01]
    assert right[curved].get_xdata() == pytest.approx([0.001 * slope, 0.01 * slope])
    assert list(right["AdamW (× 1.00)"].get_xdata()) == [0.001, 0.01]
    # The mean over the seeds, both of which ran at all rates.
    assert right[curved].get_ydata() == pytest.approx([2.35, 1.55])
    assert left["AdamW (× 1.00)"].get_ydata() == pytest.approx([2.25, 2.05])


def test_a_run_from_weights_that_are_others_now_is_refused(compared, runs):
    folder = compared()
    for arm, run in (("AdamW", "plain"), ("SEL", "curved")):
        shutil.copytree(runs[run], folder / "runs" / f"{arm}-lr0.001-seed0")
    facts = folder / "runs" / "SEL-lr0.001-seed0" / "run.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "weights": "of another file"}))
    with pytest.raises(ValueError, match=r"SEL-lr0\.001-seed0.*began with"):
        draw("learning_rates", [folder])
