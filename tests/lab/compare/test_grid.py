import dataclasses
import re

import pytest

import symexplin as sel
from symexplin.lab.compare.grid import BASELINE, VARIANTS, Cell, ClusterConfig, CompareConfig, GridConfig
from symexplin.lab.config import TrainConfig
from symexplin.lab.maps import CurveConfig, map_of
from symexplin.lab.model import ModelConfig
from symexplin.lab.settings import dump_toml, from_table, to_table

OWN = {"strong": {"preset": "paper", "start": "mismatched", "map": {"beta": 15.0, "e": {"k": [10, 2]}}}}
GRID = GridConfig(("AdamW", "strong"), (1e-3, 3e-3), (0, 4))


def test_the_first_runs_are_a_comparison_of_the_first_seed():
    assert [cell.name for cell in GRID.cells()] == [
        "AdamW-lr0.001-seed0",
        "strong-lr0.001-seed0",
        "AdamW-lr0.003-seed0",
        "strong-lr0.003-seed0",
        "AdamW-lr0.001-seed4",
        "strong-lr0.001-seed4",
        "AdamW-lr0.003-seed4",
        "strong-lr0.003-seed4",
    ]


def test_runs_differ_in_their_cell_alone():
    config = CompareConfig("data", train=TrainConfig(steps=7), compare=GRID, variant=OWN)
    run = config.run(GRID.cells()[-1])
    assert run.train == TrainConfig(steps=7, lr=3e-3, seed=4)
    assert (run.data, run.model, run.compute, run.log) == (config.data, config.model, config.compute, config.log)
    found = map_of(run.sel, 128)
    assert (found.beta, found.e.pattern, found.e.k, found.l.k) == (15.0, "row_col_mult", (10.0, 2.0), (50.0, 8.0))
    assert config.run(GRID.cells()[0]).sel == CurveConfig(home="none")


def test_a_file_says_it_all():
    config = CompareConfig("data", compare=GRID, variant=OWN)
    assert from_table(CompareConfig, config.table()) == config
    assert "[variant.strong.map]" in dump_toml(config.table())
    whole, saved = to_table(config), config.table()
    assert {(name, key) for name in ("train", "sel") for key in whole[name].keys() - saved[name].keys()} == {
        ("train", "lr"),
        ("train", "seed"),
        ("sel", "home"),
        ("sel", "preset"),
        ("sel", "map"),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": ("AdamW", "SEL", "SEL")}, "variants must hold.*each once"),
        ({"variants": ("AdamW",)}, "variants must be the baseline 'AdamW' and at least one other"),
        ({"lrs": ()}, r"lrs must hold at least one entry, and each once, got \(\)"),
        ({"lrs": (1e-3, -1.0)}, r"lrs must be a positive finite number, got -1\.0"),
        ({"lrs": (0.1, 0.1000000001)}, "lrs must hold.*each once"),  # one name of a folder
        ({"seeds": (-1,)}, "seeds must be a whole number >= 0, got -1"),
        ({"jobs": 0}, "jobs must be a whole number >= 1, got 0"),
        ({"cluster": "slrum"}, "cluster must be one of 'none', 'slurm', got 'slrum'; did you mean 'slurm'"),
        ({"seeds": (0, 1), "confirm_seeds": (2, 1)}, r"confirm_seeds must .* none of seeds = \(0, 1\), got \(2, 1\)"),
    ],
)
def test_bad_grids_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        GridConfig(**changes)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"compare": {"variants": ["AdamW", "SLE"]}}, "variants must be one of .*got 'SLE'; did you mean 'SEL'"),
        ({"variant": {"mine": {"presett": "paper"}}}, "variant mine: unknown key 'presett'; did you mean 'preset'"),
        ({"variant": {"mine": {"map": {"btea": 5.0}}}}, "variant mine: map: key must be one of .*did you mean 'beta'"),
        ({"variant": {"a/b": {"preset": "paper"}}}, "variant must have a new name.*got 'a/b'"),
        ({"variant": {"mine": {}}}, "variant 'mine' is defined but not among variants AdamW, SEL: add it"),
        ({"variant": {"mine": {"beta": 5.0}}}, "variant mine: unknown key 'beta'"),
        ({"variant": {"mine": {"home": "none", "preset": "paper"}}}, "variant mine: home 'none' .* no use for preset"),
        ({"variant": {"mine": 3}}, r"\[variant.mine\] must be a table, got 3"),
        (
            {"variant": {"mine": {"train": {"steps": 3}}}},
            "variant mine: train must .* may have optimizer, .*got .*'steps'",
        ),
        ({"variant": {"mine": {"compute": {"threads": 1}}}}, r"variant mine: unknown key 'compute'"),
        ({"variant": {"mine": {"model": 3}}}, "variant mine: model must be a table that may have init, got 3"),
        (
            {"variant": {"mine": {"train": {"weight_decay": "no"}}}},
            "variant mine: weight_decay must be a number, got 'no'",
        ),
        ({"train": {"lr": 0.1}}, r"lr must be left to lrs in a comparison, got lr = 0\.1"),
        ({"sel": {"preset": "paper"}}, r"\[sel\] must be left to the variants"),
    ],
)
def test_bad_comparisons_are_named(table, message):
    with pytest.raises(ValueError, match=message):
        from_table(CompareConfig, {"data": "data", **table})


def test_a_second_stage_has_each_variant_at_its_own_rates():
    grid = GridConfig(("AdamW", "SEL", "SEL-paper"), (1e-3, 3e-3), (0, 4), confirm_seeds=(7, 5))
    found = grid.confirmations({"AdamW": (1e-3,), "SEL": (1e-3, 3e-3), "SEL-paper": (1e-3,)})
    assert [cell.name for cell in found] == [
        f"{cell}-seed{seed}"
        for seed in (7, 5)
        for cell in ("AdamW-lr0.001", "SEL-lr0.001", "SEL-lr0.003", "SEL-paper-lr0.001")
    ]
    assert not {cell.seed for cell in grid.cells()} & {7, 5}


@pytest.mark.parametrize(("lrs", "most"), [((1e-3,), 6 + 3 * 2), ((1e-3, 3e-3), 12 + 5 * 2)])
def test_the_most_runs_are_those_of_variants_that_are_all_best_elsewhere(lrs, most):
    """Three variants, two seeds; of two more the baseline needs one rate, the others two, if there are two."""
    grid = GridConfig(("AdamW", "SEL", "SEL-paper"), lrs, (0, 4), confirm_seeds=(7, 5))
    assert grid.most_runs == most
    assert GridConfig(grid.variants, lrs, (0, 4)).most_runs == len(grid.cells())


CHANGED = {
    "muon": {"home": "none", "train": {"optimizer": "muon", "weight_decay": 0.1, "betas": [0.9, 0.99], "floor": 0.1}},
    "normal": {
        "preset": "paper",
        "map": {"beta": 5.0},
        "train": {"decay_plain": False},
        "model": {"init": "xavier_normal"},
    },
}


def test_a_variant_may_change_keys_of_training_and_of_the_model():
    grid = GridConfig(("AdamW", "muon", "normal"), (1e-3,), (4,))
    config = CompareConfig(
        "data", ModelConfig(width=64, vocab_size=300), TrainConfig(steps=7), compare=grid, variant=CHANGED
    )
    plain, muon, normal = (config.run(cell) for cell in grid.cells())
    shared = TrainConfig(steps=7, lr=1e-3, seed=4)
    assert (plain.train, plain.model) == (shared, config.model)
    changes = {"optimizer": "muon", "weight_decay": 0.1, "betas": (0.9, 0.99), "floor": 0.1}
    assert muon.train == dataclasses.replace(shared, **changes)
    assert (muon.model, muon.sel) == (config.model, CurveConfig(home="none"))
    assert normal.train == dataclasses.replace(shared, decay_plain=False)
    assert normal.model == ModelConfig(width=64, vocab_size=300, init="xavier_normal")
    assert normal.sel == CurveConfig(preset="paper", map={"beta": 5.0})
    assert from_table(CompareConfig, config.table()).variant == config.variant


def test_anneal_steps_hold_for_all_curved_variants_but_those_with_their_own():
    own = {"strong": {"preset": "paper", "anneal_steps": 5}}
    grid = GridConfig(("AdamW", "SEL", "strong"))
    config = CompareConfig("data", sel=CurveConfig(anneal_steps=9), compare=grid, variant=own)
    assert [config.example(variant).sel.anneal_steps for variant in ("SEL", "strong")] == [9, 5]
    assert from_table(CompareConfig, config.table()) == config
    assert config.table()["sel"] == {"anneal_steps": 9}


@pytest.mark.parametrize("changes", [{"memory": 0}, {"gpus": -1}])
def test_bad_requests_to_a_cluster_are_named(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be a whole number"):
        ClusterConfig(**changes)


WIDTH = 64


def curve_of(variant, lr=1e-2):
    return CompareConfig("", ModelConfig(width=WIDTH)).run(Cell(variant, lr, 0)).sel


def test_the_baseline_is_plain():
    assert curve_of(BASELINE).home == "none"
    assert map_of(curve_of(BASELINE), WIDTH) is None


@pytest.mark.parametrize(
    ("variant", "preset", "start", "home"),
    [
        ("SEL-paper", "paper", "mismatched", "optimizer"),
        ("SEL-fixed-curvature", "fixed_curvature", "mismatched", "optimizer"),
        ("SEL-frozen", "frozen", "mismatched", "optimizer"),
        ("SEL-congruent", "congruent", "matched", "optimizer"),
        ("SEL-exp-only", "exp_only", "matched", "optimizer"),
        ("SEL-module", "paper", "mismatched", "module"),
    ],
)
def test_the_papers_variants_are_its_presets(variant, preset, start, home):
    found = map_of(curve_of(variant), WIDTH)
    assert found == sel.preset(preset).resolve(WIDTH)
    assert (curve_of(variant).starts_as, curve_of(variant).home) == (start, home)


def test_sel_is_the_default_map_and_may_learn():
    """At width 64 = 1024/16 beta is a quarter of 7.5, and l = beta/7.5."""
    fixed, learned = map_of(curve_of("SEL"), WIDTH), map_of(curve_of("SEL-learned"), WIDTH)
    assert (fixed.mode, fixed.beta, fixed.learned_roles) == ("exp_only", 7.5 / 4, ())
    assert (learned.mode, learned.learned_roles) == ("mismatch", ("e", "l"))
    for role, start in (("e", 1.0), ("l", 0.25)):
        scale = getattr(learned, role)
        assert (scale.pattern, scale.start) == ("row_col_mult", start)
        assert scale.multiplier(lr=1.0) == (0.003, 0.001)
    assert dataclasses.replace(learned, mode="exp_only", e=fixed.e, l=fixed.l) == fixed
    assert {curve_of(variant).starts_as for variant in ("SEL", "SEL-learned")} == {"matched"}


def test_the_help_names_every_variant():
    text, _, _ = GridConfig.__doc__.partition("lrs:")
    assert set(re.findall(r"AdamW|SEL[\w-]*", text)) == set(VARIANTS)
