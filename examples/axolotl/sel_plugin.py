"""axolotl: a plugin that trains in curved weight space. README.md says how to use it and what was run."""

from typing import Any

import torch
from axolotl.integrations.base import BasePlugin

import symexplin as sel

# Settings for which axolotl builds parameter groups of its own. It ignores them when an optimizer is given.
IGNORED = ("loraplus_lr_ratio", "embedding_lr", "embedding_lr_scale", "lr_groups")


class SELPlugin(BasePlugin):
    """Replace AdamW by SELAdamW with the default map."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Give the new trainer the optimizer, which clips in place of the trainer."""
        for key in IGNORED:
            if cfg.get(key) is not None:
                raise ValueError(f"{key} must be left out, got {cfg[key]!r}: axolotl ignores it under this plugin")
        if trainer.optimizer_cls_and_kwargs is not None:
            raise ValueError(f"optimizer must be adamw_torch or adamw_torch_fused, got {cfg.get('optimizer')!r}")
        limit, trainer.args.max_grad_norm = trainer.args.max_grad_norm or None, 0.0

        def build(model: torch.nn.Module, *_: Any) -> sel.SELAdamW:  # axolotl adds the training arguments
            rates = {"lr": trainer.args.learning_rate, "weight_decay": trainer.args.weight_decay}
            return sel.SELAdamW(model, **rates, no_decay="vectors", max_grad_norm=limit)

        trainer.optimizer_cls_and_kwargs = (lambda: build, {})
