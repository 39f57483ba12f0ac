"""LoRA in the laboratory: low-rank updates of frozen weights, by PEFT, merged into ordinary weights at the end."""

import copy

from torch import nn

from symexplin.lab.extras import extra
from symexplin.lab.model import Transformer

__all__ = ["add_lora", "merged"]


def add_lora(model: Transformer, rank: int) -> None:
    """Freeze a model and add trainable W + B A of a rank to every matrix of its blocks (Hu et al., arXiv 2106.09685).

    B starts at 0. The factor alpha/rank is 1: the learning rate is tuned instead.
    """
    peft = extra("peft", "lora_rank")
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "blocks." in name]
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names), model)


def merged(model: Transformer) -> Transformer:
    """Return a copy of a model in which its low-rank updates are part of the ordinary weights."""
    layer_kind = extra("peft.tuners.lora", "lora_rank").LoraLayer
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, layer_kind):
            module.merge()
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, module.base_layer)
    return model.requires_grad_(True)
