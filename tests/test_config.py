"""The configuration: validation, round trips, presets."""

import math

import pytest

import symexplin as sel
from symexplin.presets import PRESETS


def test_presets_survive_json():
    for name in PRESETS:
        config = sel.preset(name)
        assert sel.SELConfig.from_json(config.to_json()) == config


def test_paper_preset_states_the_papers_numbers():
    config = sel.preset("paper")
    assert (config.beta, config.mode, config.curvature, config.normalize) == (7.5, "mismatch", "fixed", False)
    assert config.start == "mismatched"
    assert config.multipliers(3e-4) == {"e": (50.0, 8.0), "l": (50.0, 8.0), "m": (0.01, 0.5)}
    assert sel.preset("frozen").learned_roles == ()
    assert sel.preset("exp_only").learned_roles == ("e", "m")
    assert sel.preset("structured_linear").learned_roles == ("l",)
    assert sel.preset("paper+offset").learned_roles == ("e", "l", "m", "n", "delta")


def test_below_width_1024_the_papers_geometry_is_rescaled():
    """kappa times Xavier's bound, and the linear pathway's share of the slope at 0, as at width 1024 and beta 7.5."""
    for width in (64, 128, 1024):
        config = sel.SELConfig().resolve(width)
        assert config.beta * math.sqrt(6 / (2 * width)) == pytest.approx(7.5 * math.sqrt(6 / 2048))
        assert config.l.start / config.beta == pytest.approx(1 / 7.5)
    wide = sel.SELConfig().resolve(2048)
    assert wide.beta == pytest.approx(13.06, abs=0.005)
    assert wide.l.start == 1.0
    assert sel.SELConfig().resolve(1024) == sel.preset("frozen", start="matched").resolve(1024)


def test_given_numbers_stay():
    config = sel.preset("paper", l={"pattern": "row", "start": 2})
    assert config.resolve(128).resolve(4096) == config.resolve(128)
    assert (config.resolve(128).beta, config.resolve(128).l.start, config.resolve(128).n.start) == (7.5, 2.0, 0.0)
    assert sel.SELConfig(beta=5).resolve(256).l.start == 5 / 7.5
    assert sel.SELConfig(beta=1.875).resolve(64) == sel.SELConfig().resolve(64)  # as the rule has it
    assert sel.SELConfig(beta=9).resolve(256).l.start == 1.0
    assert sel.SELConfig(mode="linear").resolve(256).l.start == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"e": sel.Scale(start=0.0)}, r"'mismatch' needs e > 0 .*; it has beta 7\.5, e\.start 0, l\.start 1, m"),
        ({"l": sel.Scale(start=8.0)}, r"needs .*> \|l\|; it has beta 7\.5, .*l\.start 8"),
        ({"beta": 0.5, "mode": "damped"}, r"'damped' needs beta >= 1, got 0\.5; it has beta 0\.5, n\.start 0"),
        ({"s": sel.Scale(start=0.0)}, "needs s != 0"),
    ],
)
def test_first_values_without_an_inverse_are_refused_before_training(changes, message):
    with pytest.raises(ValueError, match=message):
        sel.SELConfig(**{"beta": 7.5} | changes).resolve(64).check_inverse()


def test_beta_of_a_power_is_its_exponent():
    assert sel.SELConfig(mode="power").resolve(64).beta == 2.0
    with pytest.raises(ValueError, match=r"beta must be at least 1 in mode 'power', .* got 0\.5"):
        sel.SELConfig(mode="power", beta=0.5)


def test_overrides_and_mappings():
    config = sel.preset("paper", beta=15, e={"pattern": "row", "k": 2})
    assert config.beta == 15.0
    assert config.e == sel.Scale("row", k=(2.0, 2.0))
    assert sel.preset("paper", e={"pattern": "row"}).e == sel.Scale("row", k=(50.0, 8.0))
    assert sel.preset("paper", e=sel.Scale("row")).e.k == (1.0, 1.0)
    assert sel.preset("default") == sel.SELConfig()


def test_the_description_names_logarithms():
    config = sel.preset("paper", e=sel.Scale("elementwise", transform="exp"), l=sel.Scale(), m=sel.Scale())
    assert config.describe() == "mismatch, beta 7.5, e learned (elementwise, exp), mismatched start"


def test_a_scale_learns_at_its_own_rate_unless_told_otherwise():
    config = sel.preset("frozen", e=sel.Scale("row", k=(50, 8)), l=sel.Scale("row", k=3, base_lr=None))
    for lr in (1e-4, 3e-4, 1e-2):
        k0, k1 = config.multipliers(lr)["e"]
        assert k0 * lr == pytest.approx(0.015)
        assert k1 * lr == pytest.approx(0.0024)
        assert config.multipliers(lr)["l"] == (3.0, 3.0)
    with pytest.raises(ValueError, match="lr must be given"):
        config.multipliers()


def test_bad_values_name_argument_value_and_remedy():
    for build, message in (
        (lambda: sel.SELConfig(beta=0), "beta .* got 0"),
        (lambda: sel.SELConfig(beta=float("nan")), "beta .* got nan"),
        (lambda: sel.SELConfig(beta="wide"), "beta .*'auto', got 'wide'"),
        (lambda: sel.SELConfig(mode="mismatched"), "mode .* got 'mismatched'.*'mismatch'"),
        (lambda: sel.SELConfig(curvature="absorb"), "curvature .* got 'absorb'.*'absorbed'"),
        (lambda: sel.Scale("row_col"), "pattern .* got 'row_col'.*'row_col_"),
        (lambda: sel.Scale("row", k=(1, 2, 3)), r"k .* got \(1, 2, 3\)"),
        (lambda: sel.Scale("row", k=-1), "k .* got -1"),
        (lambda: sel.Scale("lora", rank=0), "rank .*>= 1, got 0"),
        (lambda: sel.Scale(start=float("inf")), "start .* got inf"),
        (lambda: sel.SELConfig(n=sel.Scale("row_col_mult", start=0)), "n.pattern .*'row_col_mult'.*'row_col_add'"),
        (lambda: sel.SELConfig(delta=sel.Scale("elementwise")), "delta .*'lora'.* got .*'elementwise'"),
        (lambda: sel.SELConfig(delta=sel.Scale("row", start=0)), "delta .*'lora'.* got .*'row'"),
        (lambda: sel.SELConfig(delta=sel.Scale("lora", start=0.5)), "delta .*starting at 0, got .*0.5"),
        (lambda: sel.SELConfig(m=sel.Scale(start=-1)), "m.start .* got -1"),
        (lambda: sel.Scale("row", transform="log"), "transform .*'exp', got 'log'"),
        (lambda: sel.SELConfig(l=sel.Scale(start=0, transform="exp")), "l.start .*'exp', got 0.*transform 'none'"),
        (lambda: sel.SELConfig(e=sel.Scale("row", start=-1, transform="exp")), "e.start .*'exp', got -1"),
        (lambda: sel.SELConfig(n=sel.Scale("row", transform="exp")), "n.transform .*got 'exp'.*logarithm already"),
        (lambda: sel.SELConfig(s=sel.Scale("row", transform="exp")), "s.transform .*got 'exp'.*sign"),
        (lambda: sel.SELConfig(delta=sel.Scale("lora", transform="exp")), "delta.transform .*got 'exp'.*sign"),
        (lambda: sel.SELConfig(m=sel.Scale(start=0)), "m.start .* got 0"),
        (lambda: sel.SELConfig(start="mached"), "start .* got 'mached'.*'matched'"),
        (lambda: sel.preset("paper", mode="congruent"), "start 'mismatched' is for mode 'mismatch', got .*'congruent'"),
        (lambda: sel.Scale(base_lr=0), "base_lr .* got 0"),
        (lambda: sel.SELConfig(e=1.0), "e .*Scale, got 1.0"),
        (lambda: sel.SELConfig(include="weight"), "include .* got 'weight'"),
        (lambda: sel.SELConfig(include=None), "include .* got None"),
        (lambda: sel.SELConfig(normalize="no"), "normalize .*True or False, got 'no'"),
        (lambda: sel.SELConfig(seed=-1), "seed .*>= 0, got -1"),
        (lambda: sel.SELConfig(seed=2**80), "seed .*<= 4294967295"),
        (lambda: sel.preset("papr"), "preset .*'papr'.*'paper'"),
        (lambda: sel.preset("paper", bta=3), "key .*'bta'.*'beta'"),
        (lambda: sel.preset("paper", e={"patern": "row"}), "e key .*'patern'.*'pattern'"),
        (lambda: sel.preset("paper", **{"name": 3}), "key must be one of .*'name'"),
    ):
        with pytest.raises(ValueError, match="^" + message):
            build()


def test_config_is_frozen_and_hashable():
    config = sel.preset("paper")
    with pytest.raises(AttributeError):
        config.beta = 3.0
    assert hash(config) == hash(sel.preset("paper"))


def test_numpy_numbers_are_numbers():
    numpy = pytest.importorskip("numpy")
    config = sel.SELConfig(beta=numpy.float32(7.5), e=sel.Scale("row", start=numpy.float64(2), k=numpy.int64(3)))
    assert sel.SELConfig.from_json(config.to_json()) == config
