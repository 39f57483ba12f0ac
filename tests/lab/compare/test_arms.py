import dataclasses
import re

import pytest

import symexplin as sel
from symexplin.lab.compare.arms import ARMS, BASELINE
from symexplin.lab.compare.grid import Cell, CompareConfig, GridConfig
from symexplin.lab.maps import map_of
from symexplin.lab.model import ModelConfig

WIDTH = 64


def curve_of(arm, lr=1e-2):
    return CompareConfig("", ModelConfig(width=WIDTH)).run(Cell(arm, lr, 0)).sel


def test_the_baseline_is_plain():
    assert curve_of(BASELINE).home == "none"
    assert map_of(curve_of(BASELINE), WIDTH) is None


@pytest.mark.parametrize(
    ("arm", "preset", "start", "home"),
    [
        ("SEL-paper", "paper", "mismatched", "optimizer"),
        ("SEL-fixed-curvature", "fixed_curvature", "mismatched", "optimizer"),
        ("SEL-frozen", "frozen", "mismatched", "optimizer"),
        ("SEL-congruent", "congruent", "matched", "optimizer"),
        ("SEL-exp-only", "exp_only", "matched", "optimizer"),
        ("SEL-module", "paper", "mismatched", "module"),
    ],
)
def test_the_papers_arms_are_its_presets(arm, preset, start, home):
    """Their scales learn at the paper's k * 3e-4 (section 5.1) whatever the learning rate of the weights."""
    wanted, found = sel.preset(preset), map_of(curve_of(arm), WIDTH)
    assert (curve_of(arm).start, curve_of(arm).home) == (start, home)
    for role in wanted.learned_roles:
        k = getattr(wanted, role).k
        assert getattr(found, role).peak_lr == pytest.approx((k[0] * 3e-4, k[1] * 3e-4))
    bare = {role: dataclasses.replace(getattr(found, role), peak_lr=None) for role in wanted.learned_roles}
    assert dataclasses.replace(found, **bare) == wanted


def test_sel_carries_the_papers_geometry_and_may_learn():
    """At width 64 = 1024/16 beta is a quarter of 7.5, and l = beta/7.5."""
    fixed, learned = map_of(curve_of("SEL"), WIDTH), map_of(curve_of("SEL-learned"), WIDTH)
    assert (fixed.beta, fixed.l.start, fixed.learned_roles) == (7.5 / 4, 0.25, ())
    assert learned.learned_roles == ("e", "l")
    for role, start in (("e", 1.0), ("l", 0.25)):
        scale = getattr(learned, role)
        assert (scale.pattern, scale.start, scale.peak_lr) == ("row_col_mult", start, (0.003, 0.001))
    assert dataclasses.replace(learned, e=fixed.e, l=fixed.l) == fixed
    assert {curve_of(arm).start for arm in ("SEL", "SEL-learned")} == {"matched"}


def test_the_help_names_every_arm():
    text, _, _ = GridConfig.__doc__.partition("lrs:")
    assert set(re.findall(r"AdamW|SEL[\w-]*", text)) == set(ARMS)
