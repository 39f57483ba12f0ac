"""The figures of an inspection against numpy over the whole matrix."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import symexplin as sel
from symexplin.lab import inspect as module
from symexplin.lab.inspect import format_inspection, inspect_file
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.weights import map_entry

GENERATOR = torch.Generator().manual_seed(0)


def heavy(*shape):
    """Weights with heavy tails: a ratio of normal numbers."""
    top, bottom = (torch.randn(shape, generator=GENERATOR, dtype=torch.float64) for _ in range(2))
    return 0.1 * top / (0.2 + bottom.abs())


STATE = {
    "embed.weight": heavy(50, 12),
    "layers.10.up.weight": heavy(40, 12).float(),
    "layers.9.up.weight": heavy(12, 40).bfloat16(),
    "layers.9.up.bias": heavy(12),
    "layers.2.up.weight": heavy(7, 5),
    "norm.weight": torch.ones(12),
    "codes.weight": torch.zeros(3, 3, dtype=torch.int8),
}


def inspected(folder, state=STATE, **settings):
    save_file(state, folder / "model")
    return inspect_file(folder / "model", **settings)


# --- which tensors are curved: what `symexplin.routing` finds in the modules -----------------------------------------


def hub(kind, **settings):
    """A model of transformers with random weights, built from its configuration alone."""
    model = getattr(pytest.importorskip("transformers"), kind)
    return model(model.config_class(**settings))


LLAMA = {"vocab_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
MODELS = {
    "lab": lambda: Transformer(ModelConfig(width=16, depth=2, heads=2, vocab_size=16, context=8)),
    "Llama": lambda: hub("LlamaForCausalLM", **LLAMA, tie_word_embeddings=True, attention_bias=True),
    "GPT-2": lambda: hub("GPT2LMHeadModel", vocab_size=32, n_embd=8, n_layer=2, n_head=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_names_agree_with_modules(tmp_path, name):
    model = MODELS[name]()
    save_file({name: parameter.detach() for name, parameter in model.named_parameters()}, tmp_path / "m")
    found, wanted = inspect_file(tmp_path / "m"), sel.routing(model)
    assert {row.name for row in found.rows} == {route.name for route in wanted.curved if route.is_weight}
    assert found.config == wanted.config


def test_files_without_curved_weights(tmp_path):
    eye = torch.eye(4)
    for tensor in (torch.ones(3), eye[:0], eye.to(torch.float8_e5m2), eye.to(torch.int8)):
        with pytest.raises(
            ValueError, match=r"model' must hold 2-D weights to curve, in one of bfloat16, float16, .* got none$"
        ):
            inspected(tmp_path, {"up.weight": tensor})
    with pytest.raises(ValueError, match="holds raw weights, not plain ones"):
        inspected(tmp_path, {"up.raw_weight": torch.eye(3)})


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [100, 1 << 18])
def test_figures_of_each_matrix_and_of_all(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    found = inspected(tmp_path)
    assert found.config.beta == sel.functional.auto_beta(40)  # the side that occurs most often
    assert [row.name for row in found.rows] == ["layers.2.up.weight", "layers.9.up.weight", "layers.10.up.weight"]
    assert found.plain == 4
    everything = [row.name for row in found.rows]
    for names, row in [*(([row.name], row) for row in found.rows), (everything, found.total)]:
        w = np.concatenate([STATE[name].double().numpy().ravel() for name in names])
        bounds = np.concatenate([np.full(STATE[n].numel(), math.sqrt(6 / sum(STATE[n].shape))) for n in names])
        size, growth = np.abs(w), np.abs(w) / bounds
        assert (row.numbers, row.max) == (w.size, size.max())
        assert row.bound == pytest.approx(np.sqrt((bounds**2).mean()))
        assert row.max_growth == pytest.approx(growth.max())
        assert row.std == pytest.approx(w.std())
        assert row.std_growth == pytest.approx(w.std() / np.sqrt((bounds**2 / 3).mean()))  # Xavier's deviation
        above = {f"{times}x": pytest.approx(np.mean(growth > times)) for times in (1, 2, 5, 10)}
        assert row.above == {"0.1": pytest.approx(np.mean(size > 0.1)), **above}
        assert 0 < row.inversion_error <= 1


def test_other_maps(tmp_path):
    for config in (
        sel.SELConfig(mode="sinh"),
        sel.preset("paper+offset", beta=7.5),
        sel.SELConfig(mode="damped", n=sel.Scale(start=1.0)),
    ):
        assert inspected(tmp_path, config=config).total.inversion_error <= 1
    with pytest.raises(ValueError, match=r"^layers.*weight: .*out of reach of the map"):
        inspected(tmp_path, {name: 8 * value for name, value in STATE.items()}, config=sel.SELConfig(1.0, "damped"))


def test_numbers_that_are_not_finite_are_counted_and_left_out(tmp_path):
    state = {name: value.clone() for name, value in STATE.items()}
    state["layers.2.up.weight"][0, :2] = torch.tensor([math.nan, -math.inf])
    state["layers.10.up.weight"][:] = math.nan
    found = inspected(tmp_path, state)
    assert [row.not_finite for row in found.rows] == [2, 0, 480]
    first, _, last = found.rows
    rest = STATE["layers.2.up.weight"].flatten()[2:].numpy()
    assert (first.numbers, first.max) == (35, np.abs(rest).max())
    assert first.std == pytest.approx(rest.std())
    assert (last.max, last.std, last.above["1x"], last.inversion_error) == (0, 0, 0, 0)
    assert "NaN or infinite: layers.2.up.weight (2), layers.10.up.weight (480)" in format_inspection(found)
    json.dumps(dataclasses.asdict(found), allow_nan=False)


@pytest.mark.parametrize(
    ("trained", "given", "words"),
    [
        (None, None, "map: exp_only, beta 1.482 (assumed"),
        (sel.preset("frozen", beta=3.0), None, "map: mismatch, beta 3, l 0.4 (the model was trained with it)"),
        (sel.preset("frozen"), sel.SELConfig(12.0, "congruent"), "map: congruent, beta 12 (as given)"),
    ],
)
def test_the_map_is_the_given_one_else_that_of_the_training_else_the_default(tmp_path, trained, given, words):
    save_file(STATE, tmp_path / "model", map_entry(trained))
    found = inspect_file(tmp_path / "model", config=given)
    assert found.config == (given or trained or sel.SELConfig()).resolve(40)
    assert words in " ".join(format_inspection(found).split())


def test_the_table_shows_the_figures(tmp_path):
    long = "transformer.encoder.layers.7.self_attention.query_key_value.weight"
    found = inspected(tmp_path, {**STATE, long: heavy(64, 32)})
    lines = format_inspection(found).splitlines()
    assert max(map(len, lines)) <= 120
    row = next(row for row in found.rows if row.name == "layers.10.up.weight")
    cells = next(line.split() for line in lines if line.startswith("layers.10.up "))
    figures = (row.max, row.max_growth, row.std_growth, 100 * row.above["0.1"])
    assert cells[1:6] == ["40x12", *(f"{figure:.3g}" for figure in figures)]
