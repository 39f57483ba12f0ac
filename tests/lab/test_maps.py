import pytest

from symexplin.lab.maps import CurveConfig, map_of
from symexplin.presets import PRESETS


def test_learned_scales_keep_k_times_the_papers_learning_rate():
    config = map_of(CurveConfig(preset="paper"), 128)
    rates = {lr: {role: k[0] * lr for role, k in config.multipliers(lr).items()} for lr in (3e-4, 2e-3)}
    assert rates[3e-4] == pytest.approx({"e": 0.015, "l": 0.015, "m": 3e-6})
    assert rates[2e-3] == pytest.approx(rates[3e-4])
    plain = map_of(CurveConfig(preset="paper", map={"e": {"base_lr": None}}), 128)
    assert plain.multipliers(2e-3)["e"] == (50.0, 8.0)
    assert map_of(CurveConfig(home="none"), 128) is None


def test_a_preset_has_the_beta_of_the_width_and_the_weights_as_initialized_unless_given():
    for name in PRESETS:
        assert (CurveConfig(preset=name).starts_as, map_of(CurveConfig(preset=name), 256).beta) == ("matched", 3.75)
    assert CurveConfig(preset="paper", start="mismatched").starts_as == "mismatched"
    assert map_of(CurveConfig(preset="paper", map={"beta": 7.5}), 256).beta == 7.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preset": "papper"}, "preset must be one of.*did you mean 'paper'"),
        ({"home": "none", "preset": "paper"}, "preset must be left out for home 'none', got 'paper'"),
        ({"preset": "congruent", "start": "mismatched"}, "start must be 'matched' for mode 'congruent'"),
        ({"map": {"beta": -3.0}}, "map: beta must be a positive"),
    ],
)
def test_mistakes_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        map_of(CurveConfig(**changes), 64)
