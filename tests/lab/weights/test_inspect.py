"""The figures of an inspection against numpy over the whole matrix."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import symexplin as sel
from symexplin.lab.weights import inspect as module
from symexplin.lab.weights.inspect import format_inspection, inspect_file

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
CURVED = [name for name in STATE if name.startswith("layers") and name.endswith("weight")]


def inspected(folder, state=STATE, **settings):
    save_file(state, folder / "model")
    return inspect_file(folder / "model", **settings)


@pytest.mark.parametrize("chunk", [100, 1 << 18])
def test_figures_of_each_matrix(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    rows = {row.name: row for row in inspected(tmp_path).rows}
    assert list(rows) == ["layers.2.up.weight", "layers.9.up.weight", "layers.10.up.weight"]
    for name, row in rows.items():
        w = STATE[name].double().numpy()
        size, bound = np.abs(w), math.sqrt(6 / (w.shape[0] + w.shape[1]))
        assert (row.shape, row.numbers, row.bound) == (w.shape, w.size, pytest.approx(bound))
        assert row.max == size.max()
        assert row.max_growth == pytest.approx(size.max() / bound)
        assert row.std == pytest.approx(w.std())
        assert row.std_growth == pytest.approx(w.std() / np.sqrt(2 / sum(w.shape)))  # Xavier's deviation
        above = {f"{times}x": pytest.approx(np.mean(size > times * bound)) for times in (1, 2, 5, 10)}
        assert row.above == {"0.1": pytest.approx(np.mean(size > 0.1)), **above}
        assert 0 < row.inversion_error <= 1
        assert row.not_invertible is None


def test_totals(tmp_path):
    found = inspected(tmp_path)
    assert found.config.beta == sel.functional.auto_beta(40)  # the side that occurs most often
    every = [STATE[name].double().numpy().ravel() for name in CURVED]
    bounds = np.concatenate([np.full(STATE[n].numel(), math.sqrt(6 / sum(STATE[n].shape))) for n in CURVED])
    w = np.concatenate(every)
    total, growth = found.total, np.abs(w) / bounds
    assert total.numbers == w.size
    assert total.max == np.abs(w).max()
    assert total.max_growth == pytest.approx(growth.max())
    assert total.std == pytest.approx(w.std())
    assert total.std_growth == pytest.approx(w.std() / np.sqrt((bounds**2 / 3).mean()))
    above = {f"{times}x": pytest.approx((growth > times).mean()) for times in (1, 2, 5, 10)}
    assert total.above == {"0.1": pytest.approx((np.abs(w) > 0.1).mean()), **above}
    assert total.above["1x"] > total.above["2x"] > 0
    assert total.inversion_error == max(row.inversion_error for row in found.rows)
    assert found.plain == 4


@pytest.mark.parametrize("mode", ["congruent", "exp_only", "sinh", "linear", "damped"])
def test_other_maps(tmp_path, mode):
    n = sel.Scale(start=1.0 if mode == "damped" else 0.0)
    found = inspected(tmp_path, config=sel.SELConfig(beta=10, mode=mode, n=n))
    assert found.config.beta == 10
    assert found.rows[-1].inversion_error <= 1


def test_a_map_that_does_not_reach_says_why(tmp_path):
    state = {name: 8 * value for name, value in STATE.items()}
    found = inspected(tmp_path, state, config=sel.SELConfig(beta=1.0, mode="damped"))
    assert {row.not_invertible for row in found.rows} == {"out of reach; beta = 1 with n = 0 is bounded by 1"}
    assert found.total.not_invertible == "3 of 3 matrices"
    assert found.total.inversion_error is found.rows[0].inversion_error is None
    text = " ".join(format_inspection(found).split())
    assert "not invertible (out of reach; beta = 1 with n = 0 is bounded by 1): layers.2.up.weight, layers.9" in text


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
    assert first.not_invertible == "the weights must be finite"
    assert (last.max, last.std, last.above["1x"]) == (0, 0, 0)
    assert found.total.not_invertible == "2 of 3 matrices"
    assert "layers.10.up.weight (480)" in format_inspection(found)
    json.dumps(dataclasses.asdict(found), allow_nan=False)


def test_patterns_choose(tmp_path):
    found = inspected(tmp_path, config=sel.SELConfig(include=("embed.*",), exclude=("*.9.*", "*.2.*")))
    assert [row.name for row in found.rows] == ["embed.weight", "layers.10.up.weight"]


@pytest.mark.parametrize(("header", "given"), [(False, False), (True, False), (True, True)])
def test_the_map_is_the_given_one_else_that_of_the_training_else_the_default(tmp_path, header, given):
    trained, mine = sel.preset("frozen", beta=3.0), sel.SELConfig(mode="congruent", beta=12.0)
    save_file(STATE, tmp_path / "model", {"symexplin_trained_map": trained.to_json()} if header else None)
    found = inspect_file(tmp_path / "model", config=mine if given else None)
    assert found.config == (mine if given else trained if header else sel.SELConfig()).resolve(40)
    text = " ".join(format_inspection(found).split())
    form, origin = ("exp_only, beta 1.482 (", "assumed")
    if header:
        form, origin = (
            ("congruent, beta 12 (", "as given") if given else ("mismatch, beta 3, l 0.4 (", "trained with it")
        )
    assert f"map: {form}" in text
    assert origin in text


def test_a_transposed_matrix_and_zeros(tmp_path):
    state = {"h.0.c_fc.weight": heavy(8, 32), "h.0.c_fc.bias": heavy(32), "zero.weight": torch.zeros(4, 4)}
    first, zero = inspected(tmp_path, state, config=sel.preset("paper+offset")).rows
    assert (first.shape, first.inversion_error <= 1) == ((8, 32), True)
    assert (zero.max, zero.std, zero.inversion_error) == (0, 0, 0)


def test_files_without_curved_weights(tmp_path):
    eye = torch.eye(4)
    for tensor in (torch.ones(3), eye.to(torch.float8_e5m2), eye.to(torch.int8)):
        with pytest.raises(
            ValueError, match=r"model' must hold 2-D weights to curve, in one of BF16, F16, .* got none$"
        ):
            inspected(tmp_path, {"up.weight": tensor})
    save_file({"up.raw_weight": torch.eye(3)}, tmp_path / "curved", {"symexplin_map": sel.SELConfig().to_json()})
    with pytest.raises(ValueError, match="holds raw weights, not plain ones"):
        inspect_file(tmp_path / "curved")


def test_the_table_fits_and_the_dict_is_json(tmp_path):
    long = {f"transformer.encoder.layers.{i}.self_attention.query_key_value.weight": heavy(64, 32) for i in range(12)}
    long["layers.0.down.weight"] = 300 * heavy(11008, 4)
    found = inspected(tmp_path, {**long, **STATE})
    text = format_inspection(found)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert len({line.split()[0] for line in lines[1:17]}) == 16  # shortened names stay different
    row = next(row for row in found.rows if row.name == "layers.10.up.weight")
    cells = next(line.split() for line in lines if line.startswith("layers.10.up "))
    assert cells[1:5] == ["40x12", f"{row.max:.3g}", f"{row.max_growth:.3g}", f"{row.std_growth:.3g}"]
    assert cells[5] == f"{100 * row.above['0.1']:.3g}"
    again = json.loads(json.dumps(dataclasses.asdict(found), allow_nan=False))
    assert again["rows"][0]["max_growth"] == found.rows[0].max_growth
    assert sel.SELConfig.from_dict(again["config"]) == found.config
