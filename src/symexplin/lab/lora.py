"""LoRA in the laboratory: low-rank updates of frozen weights, by PEFT, merged into ordinary weights at the end."""

import copy

from torch import nn

from symexplin.lab.model import Transformer

__all__ = ["add_lora", "merged"]


def add_lora(model: Transformer, rank: int) -> None:
    """Freeze a model and add trainable W + B A of a rank to every matrix of its blocks (Hu et al., arXiv 2106.09685).

    B starts at 0. The factor alpha/rank is 1: the learning rate is tuned instead.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise ModuleNotFoundError("lora_rank needs PEFT: pip install 'symexplin[evidence]'", name="peft") from None
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "blocks." in name]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=names), model)


def merged(model: Transformer) -> Transformer:
    """Return a copy of a model in which its low-rank updates are part of the ordinary weights."""
    from peft.tuners.lora import LoraLayer

    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, module.base_layer)
    return model.requires_grad_(True)
