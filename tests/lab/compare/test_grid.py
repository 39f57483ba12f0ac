import dataclasses
import re
from pathlib import Path

import pytest
import torch

import symexplin as sel
from scripts import load
from symexplin.lab.build import build, build_model
from symexplin.lab.compare.grid import Cell, CompareConfig, GridConfig
from symexplin.lab.config import ComputeConfig, TrainConfig
from symexplin.lab.maps import CurveConfig, map_of
from symexplin.lab.model import ModelConfig
from symexplin.lab.settings import dump_toml, from_table, to_table

WIDTH = 64


def test_the_first_runs_are_a_comparison_of_the_first_seed_and_a_second_stage_has_its_own_rates():
    """Three variants, two seeds; of two more the baseline needs one rate, the others two, if there are two."""
    grid = GridConfig(("AdamW", "default", "paper"), (1e-3, 3e-3), (0, 4), confirm_seeds=(7, 5))
    names = [cell.name for cell in grid.cells()]
    assert names[:4] == ["AdamW-lr0.001-seed0", "default-lr0.001-seed0", "paper-lr0.001-seed0", "AdamW-lr0.003-seed0"]
    assert [name[-1] for name in names] == ["0"] * 6 + ["4"] * 6
    found = grid.confirmations({"AdamW": (1e-3,), "default": (1e-3, 3e-3), "paper": (1e-3,)})
    assert [cell.name for cell in found] == [
        f"{cell}-seed{seed}"
        for seed in (7, 5)
        for cell in ("AdamW-lr0.001", "default-lr0.001", "default-lr0.003", "paper-lr0.001")
    ]
    assert grid.most_runs == 12 + 5 * 2
    assert GridConfig(grid.variants, (1e-3,), (0, 4), confirm_seeds=(7, 5)).most_runs == 6 + 3 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": ("AdamW", "default", "default")}, "variants must hold.*each once"),
        ({"variants": ("AdamW",)}, "variants must be the baseline 'AdamW' and at least one other, got AdamW$"),
        ({"variants": ()}, "variants must be the baseline 'AdamW' and at least one other, got none"),
        ({"baseline": "b"}, "variants must be the baseline 'b' .*, got AdamW, default; choose another --baseline"),
        ({"lrs": (1e-3, -1.0)}, r"lrs must be a positive finite number, got -1\.0"),
        ({"lrs": (0.1, 0.1000000001)}, "lrs must hold.*each once"),  # one name of a folder
        ({"seeds": (0, 1), "confirm_seeds": (2, 1)}, r"confirm_seeds must .* none of the seeds 0 1, got 2 1"),
    ],
)
def test_bad_grids_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        GridConfig(**changes)


@pytest.mark.parametrize(
    ("variants", "named", "expected"),
    [
        (("b", "AdamW"), None, "AdamW"),
        (("b", "adamw"), None, "adamw"),
        (("b", "c"), None, "b"),
        (("b", "AdamW"), "b", "b"),
    ],
)
def test_the_baseline_is_the_named_one_or_adamw_or_the_first_variant(variants, named, expected):
    grid = GridConfig(variants, baseline=named)
    assert (grid.base, from_table(GridConfig, to_table(grid)).baseline) == (expected, named)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"compare": {"variants": ["AdamW", "papr"]}}, "variants must be one of .*got 'papr'; did you mean 'paper'"),
        ({"variant": {"mine": {"map": {"btea": 5.0}}}}, "variant mine: map: key must be one of .*did you mean 'beta'"),
        (
            {"variant": {"mine": {"preset": "frozen", "map": {"e": {"start": 0.01}}}}},
            "variant mine: the map of mode 'mismatch' needs",
        ),
        ({"variant": {"a/b": {"preset": "paper"}}}, "variant must have a new name.*got 'a/b'"),
        ({"variant": {"mine": {}}}, "variants must have 'mine', which is defined, got AdamW, default"),
        (
            {"variant": {"mine": {"home": "none", "preset": "paper"}}},
            "variant mine: preset must be left out for home 'none', got 'paper'",
        ),
        ({"variant": {"AdamW": {}}}, "variant must have a new name.*got 'AdamW'"),
        ({"variant": {"mine": 3}}, r"\[variant.mine\] must be a table, got 3"),
        (
            {"variant": {"mine": {"train": {"steps": 3}}}},
            "variant mine: train must be a table with keys among lr_factors, .*'steps'",
        ),
        (
            {"variant": {"mine": {"model": 3}}},
            "variant mine: model must be a table with keys among init, qk_gain, got 3",
        ),
        ({"train": {"lr": 0.1}}, r"lr must be left to lrs in a comparison, got lr = 0\.1"),
        ({"sel": {"preset": "paper"}}, r"\[sel\] must be left to a \[variant"),
    ],
)
def test_bad_comparisons_are_named(table, message):
    with pytest.raises(ValueError, match=message):
        from_table(CompareConfig, {"data": "data", **table})


@pytest.mark.parametrize(("table", "schema"), [("train", TrainConfig), ("model", ModelConfig)])
def test_every_key_that_a_variant_is_offered_is_in_the_help_and_accepted(table, schema):
    def own(key, value):
        grid = {"variants": ["AdamW", "mine"]}
        variant = {"mine": {"home": "none", table: {key: value}}}
        return from_table(CompareConfig, {"data": "data", "compare": grid, "variant": variant})

    with pytest.raises(ValueError, match="keys among") as refused:
        own("no_such", 1)
    keys = re.search(r"keys among (.*), got", str(refused.value)).group(1)
    assert keys in " ".join(CompareConfig.__doc__.split())
    for key in keys.split(", "):
        default = getattr(schema(), key)
        value = {"warmup_steps": 3, "decay": "matrices"}.get(key, default)
        assert getattr(getattr(own(key, value).example("mine"), table), key) == value


OWN = {
    "strong": {"preset": "paper", "map": {"beta": 15.0, "e": {"k": [10, 2]}}, "anneal_steps": 5},
    "flat": {"home": "none", "train": {"weight_decay": 0.1, "betas": [0.9, 0.99], "floor": 0.1}},
    "normal": {
        "preset": "paper",
        "train": {"decay": "linears", "frozen": ["*.bias"]},
        "model": {"init": "xavier_normal"},
    },
}


def test_runs_differ_in_their_cell_and_in_what_their_variant_changes():
    """And a file says it all, without keys that no run has used."""
    grid = GridConfig(("AdamW", "strong", "flat", "normal"), (3e-3,), (4,))
    model = ModelConfig(width=WIDTH, vocab_size=300)
    config = CompareConfig("data", model, TrainConfig(7), compare=grid, variant=OWN)
    runs = {cell.variant: config.run(cell) for cell in grid.cells()}
    train = {"steps": 7, "lr": 3e-3, "seed": 4}
    flat = {"weight_decay": 0.1, "betas": (0.9, 0.99), "floor": 0.1}
    assert {name: run.train for name, run in runs.items()} == {
        "AdamW": TrainConfig(**train),
        "strong": TrainConfig(**train),
        "flat": TrainConfig(**train, **flat),
        "normal": TrainConfig(**train, decay="linears", frozen=("*.bias",)),
    }
    assert {name: run.model.init for name, run in runs.items() if run.model != model} == {"normal": "xavier_normal"}
    assert {name: run.sel.anneal_steps for name, run in runs.items()}["strong"] == 5
    assert runs["normal"].sel == CurveConfig(preset="paper")
    assert all((run.data, run.compute, run.log) == ("data", config.compute, config.log) for run in runs.values())
    found = map_of(runs["strong"].sel, 128)
    assert (found.beta, found.e.pattern, found.e.k, found.l.k) == (15.0, "row_col_mult", (10.0, 2.0), (50.0, 8.0))

    assert from_table(CompareConfig, config.table()).table() == config.table()
    assert "[variant.strong.map]" in dump_toml(config.table())
    assert to_table(config)["train"].keys() - config.table()["train"].keys() == {"lr", "seed"}


def curve_of(variant):
    return CompareConfig("", ModelConfig(width=WIDTH)).run(Cell(variant, 1e-2, 0)).sel


def test_named_variants_are_presets_and_two_have_no_map():
    for name in ("paper", "fixed_curvature", "frozen", "congruent", "exp_only", "one_number"):
        assert map_of(curve_of(name), WIDTH) == sel.preset(name).resolve(WIDTH)
    assert curve_of("module") == dataclasses.replace(curve_of("paper"), home="module")
    assert map_of(curve_of("AdamW"), WIDTH) is None
    fixed = map_of(curve_of("default"), WIDTH)
    assert (fixed.mode, fixed.beta, fixed.learned_roles) == ("exp_only", 7.5 / 4, ())  # width 1024/16
    assert {curve_of(variant).starts_as for variant in ("default", "paper", "frozen")} == {"matched"}
    assert curve_of("paper-init").starts_as == "mismatched"


def test_qk_bias_is_the_example_to_copy():
    """The same first weights and learning rates as the groups of the example give the laboratory's own AdamW."""
    example = load(Path(__file__).parents[3] / "examples/qk_bias_adamw.py")
    config = CompareConfig("", ModelConfig(width=WIDTH, depth=1, heads=2))
    ours = build(dataclasses.replace(config.run(Cell("qk_bias", 1e-2, 0)), compute=ComputeConfig(device="cpu")))
    model = build_model(dataclasses.replace(config.run(Cell("AdamW", 1e-2, 0)), compute=ComputeConfig(device="cpu")))
    groups = example.qk_bias_groups(model, 1e-2)
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    found = {id(parameter): group["lr"] for group in ours.optimizer.param_groups for parameter in group["params"]}
    for (name, parameter), expected in zip(ours.model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected), name
        assert found[id(parameter)] == pytest.approx(rates[id(expected)]), name
