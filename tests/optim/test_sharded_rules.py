"""SELMuon and the switch from AdamW under FSDP2: what one process does, in every process."""

import pytest
import torch

import symexplin as sel
from processes import run
from sharded import layers_of, model_of
from sharded_rules import columns, rule, switched

pytestmark = pytest.mark.distributed


def assert_close(found, expected, rtol=1e-9, atol=1e-11):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


CASES = [
    *((2, "columns", sel.SELMuon, model_of), (4, "fsdp", sel.SELMuon, model_of), (4, "tensor", sel.SELMuon, model_of)),
    *((2, "fsdp", sel.SELMuon, layers_of), (4, "fsdp", sel.SELAdamW, layers_of)),
    *((4, "tensor", sel.SELMuon, layers_of), (4, "tensor", sel.SELAdamW, layers_of)),
]


@pytest.mark.parametrize(("world", "how", "kind", "model"), CASES)
def test_a_rule_works_on_whole_matrices_of_every_layer(tmp_path, world, how, kind, model):
    """In float64: summing in another order does not reach the bfloat16 of Muon's iteration. Shards uneven and empty."""
    values, state, losses, norm = rule("whole", 20, kind, model)
    for found in run(world, tmp_path, rule, how, 20, kind, model):
        assert_close(found[0], values)
        assert_close(found[1], state)
        assert found[2] == pytest.approx(losses, rel=1e-9)
        assert found[3] == pytest.approx(norm, rel=1e-9)


def test_a_process_without_an_expert_follows(tmp_path):
    """In float32, which kernels compute: three experts over four processes."""
    values, _, losses, norm = rule("whole", 20, sel.SELAdamW, layers_of, torch.float32)
    for found in run(4, tmp_path, rule, "fsdp", 20, sel.SELAdamW, layers_of, torch.float32):
        assert_close(found[0], values, atol=1e-4)  # a step is 1e-3: rounding may turn the sign of a gradient near 0
        assert found[2] == pytest.approx(losses, rel=1e-4)
        assert found[3] == pytest.approx(norm, rel=1e-4)


def test_a_process_without_a_column_follows(tmp_path):
    """It computes the norm by the formulas, the others by kernels."""
    value, norm = columns(shards=False)
    for found in run(4, tmp_path, columns, True):
        torch.testing.assert_close(found[0], value, rtol=1e-5, atol=1e-6)
        assert found[1] == pytest.approx(norm, rel=1e-6)


def test_a_switch_maps_each_process_its_part(tmp_path):
    moments, after = switched("whole")
    for pair in moments:
        torch.testing.assert_close(*pair, rtol=1e-12, atol=0)
    for found in run(4, tmp_path, switched, "fsdp"):
        for pair in found[0]:
            torch.testing.assert_close(*pair, rtol=1e-12, atol=0)
        for mine, theirs in zip(found[1], after, strict=True):
            assert_close(mine, theirs)
