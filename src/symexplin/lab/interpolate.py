"""Between two models: the losses of weights that lie between those a run started from and those it ended with.

The cheapest cure of forgetting, after training and for any optimizer (WiSE-FT, Wortsman et al., arXiv 2109.01903).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from symexplin.lab.train import Trainer

__all__ = ["SHARES", "interpolated_losses"]

# Of the way from the first weights to the last. Between few points the lines lie above the curve, which would favour
# methods that were run with more settings.
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@torch.no_grad()
def interpolated_losses(trainer: Trainer, first: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return {share: {"eval_loss": ..., "old_loss": ...}} of first + share (last - first); the model is unchanged.

    Args:
        trainer: a run at its end, with an old text.
        first: the state dict of the model that the run started from.
    """
    model = trainer.plain_model()
    last = {name: value.clone() for name, value in model.state_dict().items()}
    losses: dict[str, Any] = {}
    for share in SHARES:
        model.load_state_dict({name: torch.lerp(first[name].to(value), value, share) for name, value in last.items()})
        losses[f"{share:g}"] = {"eval_loss": trainer.evaluate(model), "old_loss": trainer.evaluate_old(model)}
    model.load_state_dict(last)
    return losses
