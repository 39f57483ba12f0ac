"""Lion to copy, against Lion on raw weights in float64; the page on rules shows the same code."""

from pathlib import Path

import pytest
import torch

from fenced import blocks
from scripts import load
from training import RULE_CASES, run_beside_reference

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sel_lion.py"
SELLion = load(EXAMPLE).SELLion


def lion(x, g, state, lr, decay, t):  # noqa: ARG001
    """Lion as its paper has it, algorithm 2."""
    m = state.get("m", torch.zeros_like(g))
    state["m"] = 0.99 * m + 0.01 * g
    return x - lr * (torch.sign(0.9 * m + 0.1 * g) + decay * x)


@pytest.mark.parametrize("name", RULE_CASES)
def test_it_is_lion_on_raw_weights(name):
    model, _, reference = run_beside_reference(name, SELLion, lion, lr=1e-3)
    for key, wanted in reference.weights().items():
        torch.testing.assert_close(model.get_parameter(key).detach(), wanted, rtol=1e-9, atol=1e-11)


def test_the_page_shows_the_file():
    assert blocks(ROOT / "docs/how-to/own-rule.md", "python")[0] == EXAMPLE.read_text(encoding="utf-8")
