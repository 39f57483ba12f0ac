"""axolotl: a plugin that trains in curved weight space. README.md says how to use it and what was run."""

from typing import Any, ClassVar

from axolotl.integrations.base import BasePlugin

import symexplin as sel

# Settings for which axolotl builds parameter groups of its own. It ignores them when an optimizer is given.
IGNORED = ("loraplus_lr_ratio", "embedding_lr", "embedding_lr_scale", "lr_groups")


class SELFactory(sel.hf.OptimizerFactory):
    """The optimizer factory in the form in which axolotl calls it: the training arguments follow the model."""

    def __call__(self, model: Any, *_arguments: Any, **details: Any) -> sel.RawSpaceOptimizer:
        """Return the optimizer over the model; `details` contains the training arguments too."""
        return super().__call__(model, **details)


class SELPlugin(BasePlugin):
    """Replace AdamW by SELAdamW with the default map. Subclass it for another map: `config = sel.preset("paper")`."""

    config: ClassVar[sel.SELConfig | None] = None

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Give the new trainer the optimizer, and in front the callback that sets steps, clipping and logs."""
        for key in IGNORED:
            if cfg.get(key) is not None:
                raise ValueError(f"{key} must be left out, got {cfg[key]!r}: axolotl ignores it under this plugin")
        if trainer.optimizer_cls_and_kwargs is not None:
            raise ValueError(f"optimizer must be adamw_torch or adamw_torch_fused, got {cfg.get('optimizer')!r}")
        setup = sel.hf.setup(trainer.args, self.config)
        _, details = setup["optimizer_cls_and_kwargs"]
        trainer.args, trainer.optimizer_cls_and_kwargs = setup["args"], (SELFactory, details)
        trainer.callback_handler.callbacks[:0] = setup["callbacks"]
