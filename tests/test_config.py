"""The configuration: validation, round trips, presets, numbers that follow the model's width."""

import math

import pytest

from symexplin.config import Scale, SELConfig, auto_beta
from symexplin.presets import IDENTITY, PRESETS, preset


def test_every_preset_survives_json_and_is_hashable():
    for name in PRESETS:
        config = preset(name)
        assert SELConfig.from_json(config.to_json()) == config
        assert hash(config) == hash(preset(name))
    with pytest.raises(AttributeError):
        config.beta = 3.0


def test_the_default_is_the_exponential_alone_with_fixed_scales():
    config = SELConfig()
    assert preset("default") == config
    assert (config.beta, config.mode, config.curvature, config.normalize) == ("auto", "exp_only", "fixed", False)
    assert config.closed
    assert config.learned_roles == ()


def test_presets_state_the_papers_numbers():
    config = preset("paper")
    assert (config.mode, config.curvature, config.normalize) == ("mismatch", "fixed", False)
    assert config.multipliers(3e-4) == {"e": (50.0, 8.0), "l": (50.0, 8.0), "m": (0.01, 0.5)}
    learned = {
        "frozen": "",
        "exp_only": "e m",
        "structured_linear": "l",
        "one_number": "l",
        "paper+offset": "e l m n delta",
    }
    assert {name: " ".join(preset(name).learned_roles) for name in learned} == learned
    absorbed = preset("absorbed")
    assert (absorbed.curvature, absorbed.normalize) == ("absorbed", True)


def test_a_closed_form_needs_an_invertible_mode_and_no_learned_scale():
    modes = ("exp_only", "sinh", "linear", "mismatch", "congruent", "oppose", "damped")
    assert [SELConfig(mode=mode).closed for mode in modes] == [True] * 3 + [False] * 4
    for role, scale in (("e", Scale("row")), ("m", Scale("global")), ("s", Scale("row")), ("delta", Scale("lora"))):
        assert not SELConfig(**{role: scale}).closed
    assert SELConfig(l=Scale("row")).closed  # out of use
    assert IDENTITY.closed


def test_automatic_beta_meets_the_papers_numbers():
    widths = {64: 1.875, 256: 3.75, 1024: 7.5, 2048: 13.06, 3072: 18.06, 8192: 39.59}
    assert {w: auto_beta(w) for w in widths} == pytest.approx(widths, abs=0.005)
    for bad in (0, -4, True, math.inf, None):
        with pytest.raises(ValueError, match=f"width .* got {bad}"):
            auto_beta(bad)


def test_below_width_1024_the_papers_geometry_is_rescaled():
    """Kappa times Xavier's bound, and the linear pathway's share of the slope at 0, as at width 1024 and beta 7.5."""
    for width in (64, 128, 1024):
        config = SELConfig(mode="mismatch").resolve(width)
        assert config.beta * math.sqrt(6 / (2 * width)) == pytest.approx(7.5 * math.sqrt(6 / 2048))
        assert config.l.start / config.beta == pytest.approx(1 / 7.5)
    assert SELConfig().resolve(2048).l.start == 1.0


def test_every_preset_follows_the_width():
    for name in PRESETS:
        assert [preset(name).resolve(width).beta for width in (64, 256, 1024)] == [1.875, 3.75, 7.5]
    assert [preset("paper").resolve(width).l.first for width in (64, 1024, 4096)] == [0.25, 1.0, 1.0]
    assert SELConfig(mode="mismatch") == preset("frozen")


def test_given_numbers_stay():
    config = preset("paper", beta=7.5, l={"pattern": "row", "start": 2})
    assert config.resolve(128).resolve(4096) == config.resolve(128)
    assert (config.resolve(128).beta, config.resolve(128).l.first, config.resolve(128).n.first) == (7.5, 2.0, 0.0)
    assert [SELConfig(beta=beta).resolve(256).l.start for beta in (5, 1.875, 9)] == [5 / 7.5, 0.25, 1.0]
    assert SELConfig(mode="linear").resolve(256).l.start == 1.0


def test_overrides_merge_tables_and_replace_scales():
    config = preset("paper", beta=15, e={"pattern": "row", "k": 2})
    assert config.beta == 15.0
    assert config.e == Scale("row", k=(2.0, 2.0))
    assert preset("paper", e={"pattern": "row"}).e == Scale("row", k=(50.0, 8.0))
    assert preset("paper", e=Scale("row")).e.k == (1.0, 1.0)


def test_a_scale_learns_at_its_own_rate_unless_told_otherwise():
    config = preset("frozen", e=Scale("row", k=(50, 8)), l=Scale("row", k=3, base_lr=None))
    for lr in (1e-4, 3e-4, 1e-2):
        assert [k * lr for k in config.multipliers(lr)["e"]] == pytest.approx([0.015, 0.0024])
        assert config.multipliers(lr)["l"] == (3.0, 3.0)
    for lr, message in (
        (None, "lr must be given"),
        (0.0, "lr must be a positive finite number, got 0"),
        (-1.0, "lr .* got -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            config.multipliers(lr)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SELConfig(beta=0), "beta .* got 0"),
        (lambda: SELConfig(beta="wide"), "beta .*'auto', got 'wide'"),
        (lambda: SELConfig(mode="mismatched"), "mode .* got 'mismatched'.*'mismatch'"),
        (lambda: SELConfig(mode="power"), "mode .* got 'power'"),
        (lambda: SELConfig(curvature="absorb"), "curvature .* got 'absorb'.*'absorbed'"),
        (lambda: SELConfig(normalize="no"), "normalize .*True or False, got 'no'"),
        (lambda: SELConfig(e=1.0), "e .*Scale.*, got 1.0"),
        (lambda: SELConfig(include="weight"), "include .* got 'weight'"),
        (lambda: SELConfig(exclude=None), "exclude .* got None"),
        (lambda: SELConfig(seed=-1), "seed .*>= 0, got -1"),
        (lambda: SELConfig(seed=2**80), "seed .*<= 4294967295"),
        (lambda: Scale("row_col"), "pattern .* got 'row_col'.*'row_col_"),
        (lambda: Scale("row", k=(1, 2, 3)), r"k .* got \(1, 2, 3\)"),
        (lambda: Scale("row", k=-1), "k .* got -1"),
        (lambda: Scale("lora", rank=0), "rank .*>= 1, got 0"),
        (lambda: Scale(start=math.inf), "start .* got inf"),
        (lambda: Scale(base_lr=0), "base_lr .* got 0"),
        (lambda: SELConfig(n=Scale("row_col_mult")), "n.pattern .*'row_col_mult'.*'row_col_add'"),
        (lambda: SELConfig(m=Scale(start=0)), "m.start .* got 0"),
        (lambda: SELConfig(delta=Scale("row")), "delta .*'lora'.* got .*'row'"),
        (lambda: SELConfig(delta=Scale("lora", start=0.5)), "delta .*starting at 0, got .*0.5"),
        (lambda: preset("papr"), "preset .*'papr'.*'paper'"),
        (lambda: preset("paper", bta=3), "key .*'bta'.*'beta'"),
        (lambda: preset("paper", start="mismatched"), "key must be one of .*'start'"),
        (lambda: preset("paper", e={"patern": "row"}), "e key .*'patern'.*'pattern'"),
        (lambda: preset("paper", e=3), "e must be a table of Scale keys, got 3"),
    ],
)
def test_bad_values_name_argument_value_and_remedy(build, message):
    with pytest.raises(ValueError, match="^" + message):
        build()


def test_numpy_numbers_are_numbers():
    numpy = pytest.importorskip("numpy")
    config = SELConfig(beta=numpy.float32(7.5), e=Scale("row", start=numpy.float64(2), k=numpy.int64(3)))
    assert SELConfig.from_json(config.to_json()) == config
