"""What the optimizer's state weighs, counted tensor by tensor."""

import logging

import pytest
import torch

import symexplin as sel
from symexplin.lab.model import ModelConfig, Transformer

logger = logging.getLogger(__name__)  # figures: pytest -o log_cli=true -o log_cli_level=INFO


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_paper_preset_needs_at_most_12_bytes_and_a_tenth_a_parameter_at_width_1024(dtype):
    """Raw weight and two moments in fp32 are 12 bytes; all vectors of scales, biases' too, must fit into 0.1.

    The worst case: biases on, and a small vocabulary, since plain parameters carry no vectors.
    """
    torch.manual_seed(0)
    model = Transformer(ModelConfig(width=1024, depth=1, heads=8, vocab_size=512, context=16)).to(dtype)
    groups = sel.param_groups(model, lr=3e-4, config=sel.preset("paper"))
    optimizer = sel.SELAdamW(groups, total_steps=100, max_grad_norm=1.0)
    optimizer.create_state()
    parameters = sum(p.numel() for p in model.parameters())
    held = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert parameters > 12e6
    # fp32 plain parameters need no master copy. Less than this would mean tensors that were not counted.
    plain = sum(p.numel() for group in optimizer.param_groups[1:] for p in group["params"])
    least = 12 * parameters - (4 * plain if dtype == torch.float32 else 0)
    logger.info("%s: %.3f bytes a parameter", dtype, held / parameters)
    assert least <= held <= 12.1 * parameters
