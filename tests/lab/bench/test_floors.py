import pytest
import torch

from symexplin.lab.bench import floors
from symexplin.lab.bench.floors import Bytes, floor, map_floor, matmul_flops, moved, peak_flops


@pytest.mark.parametrize("k", [1, 2, 16])
@pytest.mark.parametrize(
    ("variant", "dtype", "each", "once"),
    [
        ("adamw_autocast", "bf16", 24, 28),
        ("adamw_master", "bf16", 6, 24),
        ("module", "bf16", 28, 28),
        ("sel", "bf16", 6, 28),
        ("adamw", "fp32", 12, 28),
        ("sel", "fp32", 12, 28),
    ],
)
def test_bytes_of_a_curved_weight_in_a_step(variant, dtype, each, once, k):
    """Counted by hand: casts, accumulation and clipping at every pass, reads and writes of the update."""
    assert floor("step", variant, dtype, k).curved == each * k + once


def test_bytes_of_the_optimizer_step_alone():
    norm, clip, update = 4, 4 + 4, (4 + 4 + 4 + 4) + (4 + 4 + 4)
    assert floor("optimizer", "adamw", "fp32") == Bytes(norm + clip + update, norm + clip + update)
    assert floor("optimizer", "module", "fp32") == floor("optimizer", "adamw", "fp32")
    # bf16: the norm reads 2; gradient 2, master and moments 12 + 12, weight 2.
    assert floor("optimizer", "adamw_master", "bf16") == Bytes(30, 30)
    # The pull reads raw and gradient, the update reads both again and writes the effective weight.
    assert floor("optimizer", "sel", "bf16") == Bytes(6 + 28, 30)
    assert floor("optimizer", "sel", "fp32") == Bytes(8 + 32, 4 + 28)


def test_the_stock_recipe_moves_more_than_its_floor():
    upcast, norm, clip, update, back = 2 + 4, 4, 8, 28, 4 + 2
    assert moved("adamw_master", "bf16") == Bytes(*2 * (upcast + norm + clip + update + back,))
    for variant, dtype in (("adamw", "fp32"), ("module", "fp32")):
        assert moved(variant, dtype) == floor("optimizer", variant, dtype)


def test_sel_moves_its_floor():
    pull, update, write_back = 4 + 2, (4 + 4 + 4 + 2) + (4 + 4 + 4), 2
    assert moved("sel", "bf16") == Bytes(pull + update + write_back, floor("optimizer", "sel", "bf16").plain)
    weights_read = 4 + 4  # to pull back and to update
    assert moved("sel", "fp32") == Bytes(floor("optimizer", "sel", "fp32").curved + weights_read, 32)


def test_bytes_of_the_map_alone():
    assert [map_floor("forward", dtype) for dtype in ("fp32", "bf16")] == [4 + 4, 4 + 2]
    assert [map_floor("backward", dtype) for dtype in ("fp32", "bf16")] == [4 + 4 + 4, 4 + 2 + 4]


def test_flops_of_known_runs():
    """llm.c, GPT-2 124M: 468k tokens/s on an H100 are 40.6 % of 989 TFLOP/s."""
    assert 468e3 * matmul_flops(124_439_808, 12, 768, 1024) / 989e12 == pytest.approx(0.406, abs=1e-3)


def test_an_unknown_device_is_measured(monkeypatch):
    monkeypatch.setitem(floors._SIDES, "cpu", 256)
    flops, source = peak_flops(torch.device("cpu"), "fp32")
    assert source == "measured matmul"
    assert flops > 1e8


@pytest.mark.parametrize(("name", "flops"), [("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12)])
def test_a_known_device_has_its_data_sheet(monkeypatch, name, flops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda"), "bf16") == (flops, "data sheet")
