"""Files in and out of curved space hold what convert and fold make of the model itself."""

import copy
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import symexplin as sel
from networks import ELEMENTWISE, moved, network
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.weights.files import load_model, map_in, read_specs, read_tensors, save_model
from symexplin.lab.weights.folding import fold_file, invert_file
from symexplin.presets import PRESETS

PAPER = sel.preset("paper")
TINY = ModelConfig(width=16, depth=2, heads=2, vocab_size=40, context=8)


def lab(dtype=torch.float32, **changes):
    """A lab model whose biases are not zero."""
    model = Transformer(ModelConfig(**{**vars(TINY), **changes}), torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model.to(dtype)


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", ["paper", "frozen", "absorbed"])
def test_invert_is_convert_bit_for_bit(tmp_path, name):
    model, config = lab(torch.float64 if name == "paper" else torch.float32), sel.preset(name, seed=3)
    save_model(model, tmp_path / "plain")
    invert_file(tmp_path / "plain", tmp_path / "curved", config)
    same(load_file(tmp_path / "curved"), sel.convert(model, config).state_dict())


@pytest.mark.parametrize(
    "config",
    [
        sel.SELConfig(),
        sel.SELConfig(exclude=("*.bias",)),
        sel.preset("frozen", exclude=("blocks.0.*.bias", "*.q.*")),
        dataclasses.replace(
            PAPER,
            include=("head.*",),
            exclude=("*.down.*",),
            e=sel.Scale("column"),
            l=sel.Scale("row"),
        ),
        sel.SELConfig(mode="sinh", m=sel.Scale("global"), s=sel.Scale("row_col_add")),
        dataclasses.replace(ELEMENTWISE, delta=sel.Scale()),
    ],
)
def test_other_maps_and_patterns(tmp_path, config):
    model = lab()
    save_model(model, tmp_path / "plain")
    invert_file(tmp_path / "plain", tmp_path / "curved", config)
    curved = sel.convert(copy.deepcopy(model), config)
    same(load_file(tmp_path / "curved"), curved.state_dict())
    fold_file(tmp_path / "curved", tmp_path / "folded")
    same(load_file(tmp_path / "folded"), sel.fold(curved).state_dict())


def test_a_tied_head_and_a_model_without_biases(tmp_path):
    model, config = lab(tie_head=True, bias=False), PAPER
    save_model(model, tmp_path / "plain")
    report = invert_file(tmp_path / "plain", tmp_path / "curved", config)
    state = sel.convert(copy.deepcopy(model), config).state_dict()
    same(load_file(tmp_path / "curved"), {name: v for name, v in state.items() if name != "head.weight"})
    assert report["layers"] == 14
    fold_file(tmp_path / "curved", tmp_path / "folded")
    folded = load_model(tmp_path / "folded")
    assert folded.head.weight is folded.embedding.weight


@pytest.mark.parametrize("name", PRESETS)
def test_fold_is_fold_bit_for_bit(tmp_path, name):
    """Also with scales away from their start, as a run's checkpoint has them."""
    config = sel.routing(lab(), sel.preset(name)).config
    curved = moved(sel.convert(lab(), config))
    save_model(curved, tmp_path / "curved", {"symexplin_map": config.to_json(), "by": "a run"})
    report = fold_file(tmp_path / "curved", tmp_path / "folded")
    same(load_file(tmp_path / "folded"), sel.fold(curved).state_dict())
    assert report["largest_difference"] == 0.0
    assert read_specs(tmp_path / "folded")[1].keys() == {"config", "by"}
    tokens = torch.arange(16).reshape(2, 8)
    assert torch.equal(load_model(tmp_path / "folded")(tokens), curved(tokens))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_there_and_back(tmp_path, dtype):
    model = lab(dtype)
    save_model(model, tmp_path / "plain")
    invert_file(tmp_path / "plain", tmp_path / "curved", PAPER)
    raw = torch.float64 if dtype == torch.float64 else torch.float32
    types = {name.rpartition(".")[2]: value.dtype for name, value in read_tensors(tmp_path / "curved")[0].items()}
    assert types["raw_weight"] == types["e_row"] == types["bias_e_row"] == raw
    fold_file(tmp_path / "curved", tmp_path / "again")
    unit = torch.finfo(raw).eps / 2
    for name, value in model.state_dict().items():
        found = load_file(tmp_path / "again")[name]
        assert found.dtype == dtype
        gap = (found.double() - value.double()).abs()
        # Weights of a tiny model stay below kappa |w| = 8; 40 units is the accuracy owed there.
        assert bool((gap <= 40 * unit * value.double().abs()).all()), name
    assert read_specs(tmp_path / "again")[1].keys() == {"config"}


@torch.no_grad()
def test_the_reports(tmp_path):
    model, lines = lab(torch.bfloat16), []
    save_model(model, tmp_path / "plain", {"by": "me"})
    report = invert_file(tmp_path / "plain", tmp_path / "curved", PAPER, echo=lines.append)
    curved = sel.convert(lab(torch.bfloat16).float(), PAPER)
    layers = {name: layer for name, layer in curved.named_modules() if isinstance(layer, sel.SELLinear)}
    gaps = [(layer.weight - model.get_submodule(name).weight).abs().max() for name, layer in layers.items()]
    gaps += [(layer.bias - model.get_submodule(name).bias).abs().max() for name, layer in layers.items()]
    assert report == {"layers": 14, "largest_difference": float(max(gaps))}
    assert ["blocks.0.ffn.up.weight", "64x16", "curved"] in [line.split()[:3] for line in lines[0].splitlines()]
    assert "14 layers curved" in lines[-1]
    metadata = read_specs(tmp_path / "curved")[1]
    assert sel.SELConfig.from_dict(json.loads(metadata["symexplin_map"])) == PAPER.resolve(16)
    assert metadata["by"] == "me"
    report = fold_file(tmp_path / "curved", tmp_path / "folded", echo=lines.append)
    gaps = [(layer.weight - layer.weight.bfloat16()).abs().max() for layer in layers.values()]
    gaps += [(layer.bias - layer.bias.bfloat16()).abs().max() for layer in layers.values()]
    assert report["largest_difference"] == float(max(gaps)) > 0
    assert f"14 layers folded; largest difference {float(max(gaps)):.3g}" in lines[-1]


def test_a_bare_layer_and_any_network(tmp_path):
    for name, model in (("layer", nn.Linear(6, 4)), ("network", network())):
        save_file(model.state_dict(), tmp_path / "plain")
        invert_file(tmp_path / "plain", tmp_path / name, PAPER)
        same(load_file(tmp_path / name), sel.convert(model, PAPER).state_dict())


def test_transposed_layers_have_their_outputs_along_the_columns(tmp_path):
    """GPT-2's weights are stored (inputs, outputs)."""
    plain = {"h.0.attn.c_attn.weight": torch.ones(8, 24), "h.0.up.weight": torch.ones(8, 4)}
    save_file(plain, tmp_path / "plain")
    config = sel.SELConfig(e=sel.Scale("row"))
    assert invert_file(tmp_path / "plain", tmp_path / "curved", config)["layers"] == 2
    assert load_file(tmp_path / "curved")["h.0.attn.c_attn.e_row"].shape == (24,)
    assert load_file(tmp_path / "curved")["h.0.up.e_row"].shape == (8,)
    fold_file(tmp_path / "curved", tmp_path / "folded")
    torch.testing.assert_close(load_file(tmp_path / "folded"), plain)


@pytest.mark.parametrize("work", [invert_file, fold_file])
def test_the_target_is_a_new_file(tmp_path, work):
    """That is seen before the source is read, which is none here."""
    source = tmp_path / "source"
    source.write_text("mine")
    for target in (source, tmp_path):
        with pytest.raises(ValueError, match=f"target must be a new file, got '{target}', which exists$"):
            work(source, str(target))
    assert source.read_text() == "mine"


@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_a_folder_of_transformers_in_bfloat16_comes_back(tmp_path, size):
    """Also in shards, whose headers are merged."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain", max_shard_size=size)
    assert (tmp_path / "plain" / "model.safetensors").exists() == (size == "1GB")
    assert invert_file(tmp_path / "plain", tmp_path / "curved")["layers"] == 14
    fold_file(tmp_path / "curved", tmp_path / "folded")
    folded = load_file(tmp_path / "folded")
    assert {value.dtype for value in folded.values()} == {torch.bfloat16}
    same(folded, read_tensors(tmp_path / "plain")[0])


def test_what_cannot_be_inverted_leaves_no_file(tmp_path):
    model = lab()
    save_model(model, tmp_path / "plain")
    with pytest.raises(ValueError, match=r"mode 'mismatch' needs .*> \|l\|.* l.start 8"):
        invert_file(tmp_path / "plain", tmp_path / "curved", dataclasses.replace(PAPER, l=sel.Scale("row", start=8.0)))
    model.blocks[1].ffn.up.weight.data[0, 0] = float("nan")
    save_model(model, tmp_path / "plain")
    with pytest.raises(ValueError, match=r"blocks.1.ffn.up.weight: cannot invert .* 1 of 1024 elements: .* finite"):
        invert_file(tmp_path / "plain", tmp_path / "curved", PAPER)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_files_of_the_wrong_kind(tmp_path):
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "norms")
    with pytest.raises(ValueError, match=r"norms' must hold 2-D weights to curve, .* got none"):
        invert_file(tmp_path / "norms", tmp_path / "out")
    narrow = {"up.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "down.weight": torch.ones(4, 4, dtype=torch.int8)}
    save_file(narrow, tmp_path / "narrow")
    with pytest.raises(ValueError, match="narrow' must hold 2-D weights to curve, in one of BF16, F16"):
        invert_file(tmp_path / "narrow", tmp_path / "out")
    with pytest.raises(ValueError, match="must hold raw weights, and their map as 'symexplin_map' in its header"):
        fold_file(tmp_path / "norms", tmp_path / "out")
    save_model(lab(), tmp_path / "plain")
    invert_file(tmp_path / "plain", tmp_path / "curved")
    with pytest.raises(ValueError, match="raw weights, not plain ones: fold it first"):
        invert_file(tmp_path / "curved", tmp_path / "out")
    with pytest.raises(ValueError, match="holds raw weights of a curved model: fold it first"):
        load_model(tmp_path / "curved")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("0.e_row"), "curved' does not fit its model: Missing key.*0.e_row"),
        (lambda s: s.update({"0.e_row": torch.ones(7)}), "size mismatch for 0.e_row"),
        (lambda s: s.update({"0.n_row": torch.ones(20)}), "Unexpected key.*0.n_row"),
        (lambda s: s.update({"2.raw_weight": torch.ones(5)}), "Missing key.*2.weight"),
    ],
)
def test_tensors_that_do_not_fit_the_map(tmp_path, change, message):
    config = PAPER
    state = dict(sel.convert(network(), config).state_dict())
    change(state)
    save_file(state, tmp_path / "curved", {"symexplin_map": config.to_json()})
    with pytest.raises(ValueError, match=message):
        fold_file(tmp_path / "curved", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def earlier(config, peak_lr, **changes):
    """The JSON of a map as it was before scales had a base_lr and a transform."""
    table = config.to_dict() | changes
    for role in "elmns":
        table[role] = {k: v for k, v in table[role].items() if k not in ("base_lr", "transform")} | {"peak_lr": peak_lr}
    return json.dumps(table)


@pytest.mark.parametrize("peak_lr", [None, [0.015, 0.0024]])
def test_a_map_of_an_earlier_version_is_read_but_not_one_beta_per_matrix(tmp_path, peak_lr):
    model = lab()
    save_model(model, tmp_path / "plain")
    invert_file(tmp_path / "plain", tmp_path / "curved", PAPER)
    metadata = read_specs(tmp_path / "curved")[1]
    for beta in (7.5, "auto"):
        metadata["symexplin_map"] = earlier(PAPER, peak_lr, beta=beta)
        save_file(load_file(tmp_path / "curved"), tmp_path / f"{beta}", metadata)
    fold_file(tmp_path / "7.5", tmp_path / "folded")
    same(load_file(tmp_path / "folded"), sel.fold(sel.convert(model, PAPER)).state_dict())
    e = map_in(tmp_path, metadata, "symexplin_map").e
    assert (e.k, e.base_lr) == (((50.0, 8.0), None) if peak_lr is None else ((0.015, 0.0024), 1.0))
    with pytest.raises(ValueError, match=r"'.*auto' is of an earlier version, with a beta per matrix: fold it with"):
        fold_file(tmp_path / "auto", tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "header of '.*curved': symexplin_map: "),
        ('{"betta": 1}', "did you mean 'beta'"),
        (sel.SELConfig().to_json(), "'.*curved' must hold raw weights"),
    ],
)
def test_maps_that_are_none(tmp_path, text, message):
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "curved", {"symexplin_map": text})
    with pytest.raises(ValueError, match=message):
        fold_file(tmp_path / "curved", tmp_path / "out")
