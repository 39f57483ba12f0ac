import dataclasses
import functools
from pathlib import Path

import pytest
import torch

import symexplin as sel
from symexplin.experiments.figures import FIGURES
from symexplin.experiments.tables import SCALES, load_table, names, read_table
from symexplin.lab.build import build
from symexplin.lab.config import ComputeConfig, resolve
from symexplin.lab.maps import map_of
from symexplin.lab.settings import load_toml, to_table

# Tables 1 and 2: width x depth -> beta, the better variant's difference to AdamW as printed.
GRID = {
    **{"1024x12": (7.5, -0.038), "1024x24": (7.5, -0.040), "1024x36": (7.5, -0.044)},
    **{"2048x12": (12.5, -0.047), "2048x24": (12.0, -0.042), "2048x36": (15.0, -0.048)},
    **{"3072x12": (17.5, -0.045), "3072x24": (17.5, -0.052), "3072x36": (20.0, -0.043)},
}
OF_THE_PAPER = {
    *("main_grid", "start_1024", "start_3072", "exp_only", "frozen", "structured_linear", "optimizer_equivalence"),
    *("lr_annealing", "curvature", "xavier"),
}
BEYOND = {"modes", "patterns", "default", "widths"}
loaded = functools.cache(load_table)  # without changes a table is the same for all tests
every_table = pytest.mark.parametrize("name", sorted(OF_THE_PAPER | BEYOND))


def runs(panel):
    """Return {variant: configuration of a run}."""
    return {variant: panel.config.example(variant) for variant in panel.config.compare.variants}


def map_in(table, variant, panel=0):
    run = runs(table.panels[panel])[variant]
    return map_of(run.sel, run.model.width)


def starts(table):
    return {variant: run.sel.starts_as for variant, run in runs(table.panels[0]).items()}


def learned(table):
    maps = {variant: map_in(table, variant) for variant in table.labels}
    return {variant: set(found.learned_roles) for variant, found in maps.items() if found is not None}


def test_the_tables_of_the_package_are_known():
    assert set(names()) == OF_THE_PAPER | BEYOND


@every_table
def test_a_table_is_complete_at_every_scale(name):
    for scale in SCALES:
        table = loaded(name, scale)
        assert bool(table.place) == (name in OF_THE_PAPER)
        assert set(table.figures) <= set(FIGURES)
        assert {panel.stands_for for panel in table.panels} <= {
            panel.name for panel in loaded(name, "paper").panels
        } | {""}
        for panel in table.panels:
            grid, model = panel.config.compare, panel.config.model
            assert set(table.labels) >= set(grid.variants)
            assert grid.baseline == table.baseline == next(iter(table.labels))
            assert panel.name.startswith(f"{model.width}x{model.depth}")


@every_table
def test_claims_are_what_the_papers_own_losses_say(name):
    table = loaded(name, "paper")
    losses = table.reported.get("loss", {})
    assert table.reported.keys() <= {"loss", "speedup"}
    for by_panel in table.reported.values():
        assert by_panel.keys() <= {panel.name for panel in table.panels}
        assert {variant for numbers in by_panel.values() for variant in numbers} <= table.labels.keys()
    assert len({dataclasses.replace(claim, text="") for claim in table.claims}) == len(table.claims)
    for claim in table.claims:
        for panel in losses.keys() & set(claim.panels or losses):
            ends = losses[panel].get(claim.variant), losses[panel].get(claim.against)
            if None in ends or claim.measure not in ("final", "lowest"):
                continue
            gap = ends[0] - ends[1]
            tests = {"below": gap < 0, "above": gap > 0, "within": abs(gap) <= (claim.bound or 0.0)}
            assert tests[claim.test], (claim, panel)
            assert (gap if claim.paper is None else claim.paper) == pytest.approx(gap, abs=1.1e-4), claim
            first = losses.get(claim.since)
            assert first is None or gap < first[claim.variant] - first[claim.against] < 0
    assert bool(table.claims) == (name != "widths")


def test_the_grid_is_the_papers():
    table = loaded("main_grid", "paper")
    losses, speedups = table.reported["loss"], table.reported["speedup"]
    assert [panel.name for panel in table.panels] == list(GRID) == list(losses) == list(speedups)
    for place, (panel, (beta, delta)) in enumerate(zip(table.panels, GRID.values(), strict=True)):
        assert panel.config.train.steps == (250_000 if panel.name.startswith("1024") else 150_000)  # section 5.1
        assert map_in(table, "mismatch", place).beta == beta
        run, ((better, speedup),) = runs(panel)["mismatch"], speedups[panel.name].items()
        assert losses[panel.name][better] == min(losses[panel.name].values())
        # Rounded from losses that are themselves rounded.
        assert losses[panel.name][better] - losses[panel.name]["AdamW"] == pytest.approx(delta, abs=0.0011)
        assert 1.32 <= speedup <= 1.49  # as the abstract says
        for claim in table.claims:
            if claim.measure == "steps" and panel.name in claim.panels:
                least = min(speedups[name][claim.variant] for name in claim.panels)
                assert least <= speedup
                assert claim.bound == pytest.approx(1 / (least - 0.005), abs=5e-4)  # it rounds to the least
            if claim.measure != "final":
                assert (claim.variant == better) == (panel.name in claim.panels)
        model, train = run.model, run.train
        assert (model.context, model.bias, model.qkv_bias, model.init) == (1024, True, True, "xavier_uniform")
        assert model.hidden == {1024: 2752, 2048: 5440, 3072: 8192}[model.width]  # the nearest multiple of 64
        # Where the paper is silent, its author's harness speaks, and --plan says so.
        assert (model.head_dim, model.embedding_std, model.norm_eps) == (128, "width^-0.5", "dtype")
        assert (model.input_projection, model.head_bias, run.decays) == (True, True, "matrices")
        assert (train.betas, train.weight_decay, train.max_grad_norm) == ((0.9, 0.999), 0.01, 1.0)
        assert (train.warmup_steps, run.compute.autocast, run.compute.compile) == (250, "on", True)
    for variant, preset in (("mismatch", "paper"), ("mismatch+offset", "paper+offset")):
        assert map_in(table, variant).to_dict() == sel.preset(preset, beta=GRID["1024x12"][0]).resolve(1024).to_dict()
        assert starts(table)[variant] == "mismatched"
    assert table.data["sources"] == ["openwebtext"]


@pytest.mark.parametrize("name", ["exp_only", "frozen", "structured_linear", "optimizer_equivalence"])
def test_the_controlled_study_has_the_papers_protocol(name):
    (panel,) = loaded(name, "paper").panels
    grid, train = panel.config.compare, panel.config.train
    assert (grid.seeds, grid.confirm_seeds, grid.lrs) == ((123,), (), (3e-4,))
    assert (train.steps, train.batch_size, train.warmup_steps) == (100_000, 32, 2000)
    assert train.steps // train.eval_every == 200
    for run in runs(panel).values():
        config = map_of(run.sel, run.model.width)
        assert config is None or config.beta == 7.5


def test_the_tables_vary_what_they_say():
    roles = learned(loaded("exp_only", "paper"))
    assert [roles[f"exp_only-{letters}"] for letters in ("ff", "fl", "lf", "ll")] == [set(), {"m"}, {"e"}, {"e", "m"}]
    table = loaded("frozen", "paper")
    fixed = {"fixed_curvature": {"e", "l"}, "fixed_pathways": {"m"}, "frozen": set(), "frozen-congruent": set()}
    assert learned(table) == {"full": {"e", "l", "m"}, **fixed}
    matched = {variant for variant in learned(table) if starts(table)[variant] == "matched"}
    assert matched == {"frozen-congruent"}
    table = loaded("structured_linear", "paper")
    patterns = [map_in(table, variant).l.pattern for variant in learned(table)]
    assert patterns == ["global", "row", "column", "row_col_mult"]
    table = loaded("curvature", "paper")
    maps = [map_in(table, variant) for variant in table.labels]
    assert len({(found.curvature, found.normalize) for found in maps}) == 4
    table = loaded("lr_annealing", "paper")
    maps = [map_in(table, variant) for variant in ("fixed", "annealed")]
    assert [(found.e.k, found.beta) for found in maps] == [((50.0, 50.0), 7.0), ((50.0, 8.0), 7.0)]
    table = loaded("optimizer_equivalence", "paper")
    homes = {variant: run.sel.home for variant, run in runs(table.panels[0]).items()}
    assert homes == {"parameterized": "module", "optimizer": "optimizer"}
    assert map_in(table, "parameterized") == map_in(table, "optimizer")
    assert not map_in(table, "optimizer").learned_roles
    inits = {variant: run.model.init for variant, run in runs(loaded("xavier", "mini").panels[0]).items()}
    normal = [variant for variant, init in inits.items() if init == "xavier_normal"]
    assert normal == ["AdamW-normal", "mismatch-normal"]


@every_table
def test_what_the_authors_harness_says_has_its_reason_in_the_plan(name):
    said = loaded(name, "paper").assumptions
    silent = {
        f"model.{key}" for key in ("harness", "input_projection", "head_bias", "embedding_std", "norm_eps", "heads")
    }
    for key in (*silent, "train.decay"):
        assert "author's harness" in said[key] or "harness of its author" in said[key]
    for scale in ("mini", "h200"):
        assert {panel.config.model.harness for panel in loaded(name, scale).panels} == {"own"}


RESULTS = sorted((Path(__file__).parents[2] / "results").glob("*.toml"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_table_of_results_says_the_start_of_every_variant(file):
    assert {name for name, variant in load_toml(file)["variant"].items() if "start" not in variant} == {
        name for name, variant in load_toml(file)["variant"].items() if variant.get("home") == "none"
    }


@pytest.mark.parametrize("name", [*sorted(OF_THE_PAPER | BEYOND), *map(str, RESULTS)])
def test_no_two_variants_of_a_table_train_alike(name):
    for scale in SCALES:
        if scale == "paper" and name.endswith(".toml"):
            continue
        variants = list(load_table(name, scale).labels)
        every = load_table(name, scale, changes={"compare": {"variants": variants}})
        for panel in every.panels:
            alike = {}
            for variant, run in runs(panel).items():
                table = to_table(resolve(dataclasses.replace(run, compute=ComputeConfig()), 256))
                del table["sel"]["preset"]  # a name; the map that it means is beside it
                alike.setdefault(repr(table), []).append(variant)
            assert [names for names in alike.values() if len(names) > 1] == [], panel.name


def test_every_variant_in_miniature_takes_a_step():
    small = {"model": {"width": 32, "depth": 1, "heads": 2, "context": 8}}  # at 16 the rule's beta is below 1
    distinct = {}  # tables share variants
    for name in names():
        panel = load_table(name, "mini", changes=small).panels[0]
        assert panel.config.compare.seeds == (0, 1, 2)
        assert len(panel.config.compare.lrs) >= 4
        distinct |= {repr((run.sel, run.model)): run for run in runs(panel).values()}
    assert len(distinct) > 30
    for run in distinct.values():
        model, optimizer = build(run)
        model(torch.zeros(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.long)).backward()
        old = [p.detach().clone() for p in model.blocks.parameters()]
        optimizer.step()
        assert any(not torch.equal(a, b) for a, b in zip(old, model.blocks.parameters(), strict=True))


def test_a_panel_goes_before_its_scale_and_the_command_before_both():
    assert loaded("main_grid", "mini").panels[0].config.model.width == 64
    table = load_table("main_grid", "mini", changes={"model": {"width": 32}, "map": {"beta": 9.0}})
    assert {panel.config.model.width for panel in table.panels} == {32}
    assert map_in(table, "mismatch").beta == 9.0
    assert runs(table.panels[0])["AdamW"].sel.home == "none"
    # A variant's own keys stand, but for those of the command.
    variant = load_table("frozen", "mini", changes={"variant": {"full": {"map": {"beta": 3.0}}}})
    assert (map_in(variant, "full").beta, map_in(variant, "frozen").beta) == (3.0, pytest.approx(7.5 / 8**0.5))
    forced = load_table("frozen", "mini", changes={"map": {"beta": 9.0}})
    assert [map_in(table, "frozen-beta7_5").beta for table in (variant, forced)] == [7.5, 9.0]
    (panel,) = load_table("frozen", "mini", changes={"compare": {"baseline": "full"}}).panels
    assert panel.config.compare.variants[:2] == ("AdamW", "full")
    # Warm-up and evaluations keep their share of the steps, unless they are given.
    for steps, expected in (({"steps": 200}, (200, 20, 20)), ({"steps": 4, "eval_every": 2}, (4, 0, 2))):
        train = load_table("frozen", "mini", changes={"train": steps}).panels[0].config.train
        assert (train.steps, train.warmup_steps, train.eval_every) == expected


def test_what_the_command_changes_is_no_longer_assumed():
    changes = {"model": {"tie_head": True}, "compare": {"lrs": [1e-3]}, "map": {"beta": 5.0}}
    before = loaded("main_grid", "paper").assumptions
    found = load_table("main_grid", "paper", changes=changes).assumptions
    said = {"model.tie_head": True, "compare.lrs": [1e-3], "map.beta": 5.0}
    assert found == before | {key: f"{before[key]} (Here: {value}.)" for key, value in said.items()}
    table = load_table("frozen", "paper", data="elsewhere")
    assert (table.data, [key for key in table.assumptions if key.startswith("data.")]) == ({}, [])


OWN = 'title = "Mine"\nprotocol = "controlled"\nbaseline = "AdamW"\n[variant.strong]\nmap = { beta = 9.0 }\n'
CLAIM = '[[claim]]\ntext = "It ends below."\nplace = "here"\nvariant = "strong"\nagainst = "AdamW"\n'


def test_a_file_of_ones_own_is_a_table(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(f'{OWN}[reported.loss]\n"1024x12" = {{ AdamW = 2.0 }}\n{CLAIM}test = "below"\n')
    table = load_table(str(file), "mini")
    assert (table.name, table.place, list(table.labels)) == ("mine", "", ["AdamW", "strong"])
    assert map_in(table, "strong").beta == 9.0
    assert [(claim.text, claim.measure) for claim in table.claims] == [("It ends below.", "final")]
    file.write_text(f"{OWN}[mini.train]\nlr_decay_steps = 1200\n")  # 600 of 1,200 steps: it keeps its share, too
    assert load_table(str(file), "mini", changes={"train": {"steps": 100}}).panels[0].config.train.lr_decay_steps == 200
    file.write_text(OWN.replace('protocol = "controlled"', ""))
    assert load_table(str(file), "mini").panels[0].stands_for == "1024x12"
    with pytest.raises(ValueError, match="protocol must be one of 'main_grid', 'controlled', got None"):
        load_table(str(file), "paper")
    with pytest.raises(FileNotFoundError, match="existing TOML file"):
        load_table(str(tmp_path / "none.toml"), "mini")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modl": {"width": 3}}, "did you mean 'model'"),
        ({"lr": 3e-3}, r"unknown key 'lr', which belongs in \[train\]"),
        ({"train": 3}, r"\[train\] must be a table, got 3"),
        ({"variant": {"strong": 3}}, r"\[variant.strong\] must be a table, got 3"),
        ({"variant": {"strng": {"map": {"beta": 3}}}}, "variant must be one of .*did you mean 'strong'"),
        ("[mini.modle]\nwidth = 8\n", "did you mean 'model'"),
        ("[[mini.panel]]\n[[mini.panel]]\n", "panel must have a unique name .* got '128x4'"),
        ('[[mini.panel]]\nname = "../1x1"\n', "panel must have a unique name"),
        ("[mini.panel]\nmap = { beta = 5.0 }\n", r"panel must be tables, each under \[\[panel\]\]"),
        (CLAIM, "test must be given"),
        (CLAIM.replace("strong", "strng") + 'test = "below"', "of a claim must be one of .* did you mean 'strong'"),
        (f'{CLAIM}test = "below"\nsince = "1x1"', "panels and since of a claim must be one of '1024x12', got '1x1'"),
    ],
)
def test_a_mistake_in_a_file_or_of_the_command_is_named(tmp_path, changes, words):
    file = tmp_path / "mine.toml"
    file.write_text(OWN + (changes if isinstance(changes, str) else ""))
    with pytest.raises(ValueError, match=words):
        load_table(str(file), "mini", changes=None if isinstance(changes, str) else changes)


def test_another_folder_is_no_table(tmp_path):
    with pytest.raises(ValueError, match=r"without table.json"):
        read_table(tmp_path)
