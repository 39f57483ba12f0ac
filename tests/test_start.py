"""benchmarks/start.py: how alike hidden states are, in models of the laboratory and others."""

from pathlib import Path

import pytest
import torch
from torch import nn

import symexplin as sel
from scripts import load

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def start():
    return load(ROOT / "benchmarks/start.py")


def test_cosines_of_states_behind_each_norm(start):
    model = nn.Sequential(nn.LayerNorm(3, elementwise_affine=False), nn.Linear(3, 3), nn.RMSNorm(3))
    nn.init.zeros_(model[1].weight)  # the bias alone is left: all positions are alike
    states = torch.tensor([[[1.0, -1.0, 0.0], [1.0, 1.0, -2.0], [2.0, -2.0, 0.0]]])
    alike = start.cosines(model, states)
    assert alike == {"0": pytest.approx(1 / 3, abs=1e-5), "2": pytest.approx(1.0)}  # of the pairs, one is parallel
    for other, inputs in ((nn.Linear(3, 3), states), (model, states[:, :1])):
        with pytest.raises(ValueError, match=r'"norm" in the name of their class .*two positions'):
            start.cosines(other, inputs)


def test_the_papers_initialization_of_a_deep_llama_makes_positions_alike(start):
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4
    )
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    alike = {}
    for name in ("default", "paper"):  # the default's is Xavier's
        torch.manual_seed(0)
        model = sel.init_(transformers.LlamaForCausalLM(shape), sel.preset(name, beta=7.5, l={"start": 1.0}))
        alike[name] = start.cosines(model, tokens)["model.norm"]
    assert 1.0 - alike["paper"] < 0.2 * (1.0 - alike["default"])
