"""SELMuon and the switch from AdamW under FSDP2: what one process does, in every process."""

import pytest
import torch

from processes import run
from sharded_rules import muon, switched

pytestmark = pytest.mark.distributed


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("world", "how"), [(2, "columns"), (4, "fsdp")])
def test_muon_orthogonalises_whole_matrices(tmp_path, world, how):
    """In float64: summing in another order does not reach the bfloat16 of the iteration. Shards uneven and empty."""
    values, state, losses, norm = muon("whole", 20)
    for found in run(world, tmp_path, muon, how, 20):
        assert_close(found[0], values)
        assert_close(found[1], state)
        assert found[2] == pytest.approx(losses, rel=1e-9)
        assert found[3] == pytest.approx(norm, rel=1e-9)


def test_a_switch_maps_each_process_its_part(tmp_path):
    moments, after = switched("whole")
    for pair in moments:
        torch.testing.assert_close(*pair, rtol=1e-12, atol=0)
    for found in run(4, tmp_path, switched, "fsdp"):
        for pair in found[0]:
            torch.testing.assert_close(*pair, rtol=1e-12, atol=0)
        for mine, theirs in zip(found[1], after, strict=True):
            assert_close(mine, theirs)
