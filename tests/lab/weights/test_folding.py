"""Files of raw weights, as checkpoints of the module home have them, fold to what `fold` makes of the model itself."""

import copy

import pytest
import torch
from safetensors.torch import save_file

import symexplin as sel
from networks import moved, network
from symexplin.lab.load import load_plain
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.weights.files import load_model, save_model
from symexplin.lab.weights.folding import folded
from symexplin.presets import PRESETS

PAPER = sel.preset("paper")
TINY = ModelConfig(width=16, depth=2, heads=2, vocab_size=40, context=8)


def lab(**changes):
    """A lab model whose biases are not zero."""
    model = Transformer(ModelConfig(**{**vars(TINY), **changes}), torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def raw_file(model, config, path):
    """Write the raw weights of a converted model, with its map, and more in the header."""
    save_file(dict(model.state_dict()), path, {"symexplin_map": config.to_json(), "by": "a run"})
    return path


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", PRESETS)
def test_a_file_folds_bit_for_bit(tmp_path, name):
    """Also with scales away from their start, as a run's checkpoint has them."""
    config = sel.routing(lab(), sel.preset(name)).config
    curved = moved(sel.convert(lab(), config))
    save_model(curved, tmp_path / "curved", {"symexplin_map": config.to_json(), "by": "a run"})
    plain, header = folded(tmp_path / "curved")
    same(plain, sel.fold(copy.deepcopy(curved)).state_dict())
    assert header.keys() == {"config", "by"}
    tokens = torch.arange(16).reshape(2, 8)
    assert torch.equal(load_plain(tmp_path / "curved")(tokens), curved(tokens))


@pytest.mark.parametrize(
    "config",
    [
        sel.SELConfig(exclude=("*.bias",)),
        sel.preset("paper", include=("head.*",), exclude=("*.down.*",), e=sel.Scale("column"), l=sel.Scale("row")),
        sel.SELConfig(mode="sinh", m=sel.Scale("global"), s=sel.Scale("row_col_add")),
    ],
)
def test_other_maps_and_patterns(tmp_path, config):
    config = sel.routing(lab(), config).config
    curved = sel.convert(lab(), config)
    same(folded(raw_file(curved, config, tmp_path / "curved"))[0], sel.fold(curved).state_dict())


def test_a_tied_head_stays_tied(tmp_path):
    model = lab(tie_head=True, bias=False)
    config = sel.routing(model, PAPER).config
    save_model(sel.convert(model, config), tmp_path / "curved", {"symexplin_map": config.to_json()})
    found = load_plain(tmp_path / "curved")
    assert found.head.weight is found.embedding.weight


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
    state = dict(sel.convert(network(), PAPER).state_dict())
    change(state)
    save_file(state, tmp_path / "curved", {"symexplin_map": PAPER.to_json()})
    with pytest.raises(ValueError, match=message):
        folded(tmp_path / "curved")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "header of '.*curved': symexplin_map: "),
        ('{"betta": 1}', "did you mean 'beta'"),
        (sel.SELConfig().to_json(), "'.*curved' must hold raw weights, and their map as 'symexplin_map'"),
    ],
)
def test_maps_that_are_none(tmp_path, text, message):
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "curved", {"symexplin_map": text})
    with pytest.raises(ValueError, match=message):
        folded(tmp_path / "curved")


def test_a_file_of_raw_weights_is_no_plain_model(tmp_path):
    save_model(sel.convert(lab(), PAPER), tmp_path / "curved", {"symexplin_map": PAPER.resolve(16).to_json()})
    with pytest.raises(ValueError, match="holds raw weights of a curved model"):
        load_model(tmp_path / "curved")
