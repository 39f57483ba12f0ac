import pytest

import symexplin as sel
from symexplin.lab.maps import LAB_PRESETS, CurveConfig, map_of, named_map


def test_presets_are_the_packages():
    for name in LAB_PRESETS:
        if name not in ("carried", "default"):
            assert named_map(name, {}) == sel.preset(name)
    assert named_map("default", {}) == sel.SELConfig()
    assert named_map("carried", {}, width=64) == sel.carried(64)
    assert named_map("carried", {"beta": 3.0, "l": {"pattern": "row"}}, 64).l == sel.Scale("row", start=3.0 / 7.5)


def test_changes_merge_into_scales():
    config = named_map("paper", {"beta": 5.0, "e": {"k": [10, 2]}, "exclude": ["blocks.0.*"]})
    assert config == sel.preset("paper", beta=5.0, e=sel.Scale("row_col_mult", k=(10.0, 2.0)), exclude=("blocks.0.*",))


def test_learned_scales_keep_k_times_the_papers_learning_rate():
    config = map_of(CurveConfig(preset="paper"), 128)
    assert config.e.peak_lr == pytest.approx((0.015, 0.0024))
    assert config.m.peak_lr == pytest.approx((3e-6, 1.5e-4))
    assert map_of(CurveConfig(preset="paper", multiplier_lr=1e-3), 128).e.peak_lr == pytest.approx((0.05, 0.008))
    own = map_of(CurveConfig(preset="paper", map={"e": {"peak_lr": 0.001}}), 128)
    assert own.e.peak_lr == (0.001, 0.001)
    assert own.l.peak_lr == pytest.approx((0.015, 0.0024))


def test_a_whole_map_given_back_is_the_same():
    for name in LAB_PRESETS:
        curve = CurveConfig(preset=name)
        config = map_of(curve, 96)
        assert map_of(CurveConfig(preset=name, map=config.to_dict()), 96) == config


def test_no_home_no_map():
    assert map_of(CurveConfig(home="none"), 64) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"home": "modul"}, "home must be one of.*did you mean 'module'"),
        ({"preset": "papper"}, "preset must be one of.*did you mean 'paper'"),
        ({"start": "match"}, "start must be one of.*did you mean 'matched'"),
        ({"multiplier_lr": 0.0}, "multiplier_lr must be a positive"),
        ({"anneal_steps": 0}, "anneal_steps must be a whole number >= 1, got 0"),
        ({"map": {"betta": 3}}, "key must be one of.*did you mean 'beta'"),
        ({"map": {"beta": -3.0}}, "beta must be a positive"),
        ({"map": {"e": {"pattern": "rows"}}}, "pattern must be one of.*did you mean 'row'"),
    ],
)
def test_mistakes_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        map_of(CurveConfig(**changes), 64)


def test_carried_needs_a_width():
    with pytest.raises(ValueError, match="'carried' goes with a model's width"):
        named_map("carried", {})
