"""The page on rules of one's own: its code runs, and its rule is what it says."""

from pathlib import Path

import pytest
import torch

import symexplin as sel
from fenced import blocks
from symexplin.presets import IDENTITY
from training import backward, batch, network, train

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-rule.md"


@pytest.fixture(scope="module")
def page():
    names = {}
    for block in blocks(PAGE, "python"):
        exec(block, names)
    return names


def test_the_pages_rule_is_lion_under_the_identity_map(page):
    ours, theirs = network(torch.float64), network(torch.float64)
    groups = sel.param_groups(ours, lr=1e-3, weight_decay=0.1, config=IDENTITY)
    optimizer = page["SELLion"](groups)
    momentum = {name: torch.zeros_like(p) for name, p in theirs.named_parameters()}
    for step in range(10):
        optimizer.zero_grad()
        theirs.zero_grad()
        backward(ours, step)
        backward(theirs, step)
        optimizer.step()
        with torch.no_grad():  # algorithm 2 of the paper
            for name, p in theirs.named_parameters():
                c = 0.9 * momentum[name] + 0.1 * p.grad
                p -= 1e-3 * (torch.sign(c) + 0.1 * p)
                momentum[name] = 0.99 * momentum[name] + 0.01 * p.grad
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


def test_it_trains_the_papers_map_and_resumes(page):
    model = network()
    optimizer = page["SELLion"](sel.param_groups(model, lr=3e-4, config=sel.preset("paper")), total_steps=40)
    start = model(batch(0)).square().mean().item()
    train(model, optimizer, 40)
    assert model(batch(0)).square().mean().item() < 0.5 * start
    other = page["SELLion"](sel.param_groups(model, lr=3e-4, config=sel.preset("paper")), total_steps=40)
    other.load_state_dict(optimizer.state_dict())
    assert set(other.state[model[0].weight]) == {
        *("step", "scale_step", "raw", "panel0", "panel1"),
        *("exp_avg", "panel0_exp_avg", "panel1_exp_avg"),
    }
