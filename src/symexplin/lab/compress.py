"""What compression does to a trained model: the held-out loss of pruned and of quantized copies of its weights."""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from symexplin.lab.data.batches import Corpus
from symexplin.lab.extras import extra
from symexplin.lab.model import Transformer
from symexplin.lab.sparse import Sparsifier, matrices, prune_
from symexplin.lab.train import NonFiniteError, Trainer

__all__ = ["LEVELS", "compressed_losses", "prune_2_of_4", "quantize_"]

_SPARSITIES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_RETRAINED = (0.7, 0.9)
_2_OF_4 = "2:4"
LEVELS = (*(f"{sparsity:g}" for sparsity in _SPARSITIES), _2_OF_4, "int8", "int4", "nf4", "log4")

_SHARE = 10  # retraining takes a tenth of the steps
# Peak rates of retraining, by that of the run, each decayed to 0: as in the last tenth of a linear decay (rewinding,
# Renda et al., arXiv 2003.02389), or whole. The better one counts.
_RATES = (0.1, 1.0)
_OTHER_BATCHES = 1_000_000  # added to the seed: retraining must not begin with the batches that the run began with
_SPARSIFIER = "torchao.prototype.sparsity.sparsifier.weight_norm_sparsifier"
_BLOCK = 64  # entries per scale of NF4 (arXiv 2305.14314)


def compressed_losses(trainer: Trainer, corpus: Corpus) -> dict[str, Any]:
    """Return {"dense": loss, "once": {level: loss}, "retrained": {level: loss}} of a trained model.

    Levels are the share of zeros among all matrices of the blocks (the smallest entries, over all matrices together),
    two zeros in each four entries of a row, and 8 or 4 bits an entry. Retraining holds the zeros and takes a tenth of
    the run's steps, with the run's optimizer and map, without L1, at the better of two rates.

    The model of the trainer is unchanged.
    """
    dense = copy.deepcopy(trainer.plain_model().state_dict())
    losses = {}
    for level in LEVELS:
        _compress_(trainer.model, level)
        losses[level] = _evaluated(trainer)
        trainer.model.load_state_dict(dense)
    retrained = {}
    for level in (*(f"{sparsity:g}" for sparsity in _RETRAINED), _2_OF_4):
        _compress_(trainer.model, level)
        retrained[level] = min(_retrained(trainer, corpus, rate) for rate in _RATES)
        trainer.model.load_state_dict(dense)
    return {"dense": _evaluated(trainer), "once": losses, "retrained": retrained}


def _compress_(model: Transformer, level: str) -> None:
    if level == _2_OF_4:
        prune_2_of_4(model)
    elif level in LEVELS[: len(_SPARSITIES)]:
        prune_(matrices(model), float(level))
    else:
        quantize_(matrices(model), level)


def _evaluated(trainer: Trainer) -> float:
    """Return the held-out loss; infinite where it is not finite, which few bits may lead to."""
    try:
        return trainer.evaluate()
    except NonFiniteError:
        return math.inf


def _retrained(pruned: Trainer, corpus: Corpus, rate: float) -> float:
    """Return the loss of a copy of a pruned model after retraining."""
    config, train = pruned.config, pruned.config.train
    short = dataclasses.replace(
        train,
        steps=max(1, train.steps // _SHARE),
        warmup_steps=0,
        lr=rate * train.lr,
        l1=0.0,
        sparsity=0.0,
        weights=None,
        seed=train.seed + _OTHER_BATCHES,
    )
    trainer = Trainer(dataclasses.replace(config, train=short), corpus)
    trainer.model.load_state_dict(pruned.model.state_dict())
    trainer.sparsifier = Sparsifier(matrices(trainer.model), short, hold=True)
    try:
        for _ in range(short.steps):
            trainer.update()
    except NonFiniteError:
        return math.inf
    return _evaluated(trainer)


def prune_2_of_4(model: Transformer) -> None:
    """Set the two smallest of each four entries of a row to zero, in all matrices of the blocks."""
    names = [f"blocks.{name}" for name, parameter in model.blocks.named_parameters() if parameter.dim() == 2]
    sparsifier = extra(_SPARSIFIER, "compress").WeightNormSparsifier(
        sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2
    )
    sparsifier.prepare(model, [{"tensor_fqn": name} for name in names])
    sparsifier.step()
    sparsifier.squash_mask()


@torch.no_grad()
def quantize_(weights: Sequence[Tensor], kind: str) -> None:
    """Round weights to 8 or 4 bits an entry.

    Args:
        weights: matrices.
        kind: "int8" or "int4" (whole multiples of a scale per row), "nf4" (QLoRA's quantiles of a normal distribution,
            a scale per 64 entries) or "log4" (sign(w) times the row's largest magnitude times 1, 1/2, ... 1/128).

    >>> w = torch.tensor([[1.0, 0.3, -0.02]])
    >>> quantize_([w], "log4")
    >>> w.tolist()
    [[1.0, 0.25, -0.015625]]
    """
    rounded: dict[str, Callable[[Tensor], Tensor]] = {
        "int8": lambda w: _whole_numbers(w, 127),
        "int4": lambda w: _whole_numbers(w, 7),
        "nf4": _nf4,
        "log4": _powers_of_two,
    }
    for weight in weights:
        weight.copy_(rounded[kind](weight))


def _whole_numbers(weight: Tensor, most: int) -> Tensor:
    primitives = extra("torchao.quantization.quant_primitives", "compress")
    block, bounds = (1, weight.shape[1]), (-most, most)
    kind = primitives.MappingType.SYMMETRIC_NO_CLIPPING_ERR
    scale, zero = primitives.choose_qparams_affine(weight, kind, block, torch.int8, *bounds)
    whole = primitives.quantize_affine(weight, block, scale, zero, torch.int8, *bounds)
    found: Tensor = primitives.dequantize_affine(whole, block, scale, zero, torch.int8, *bounds)
    return found


def _nf4(weight: Tensor) -> Tensor:
    module = extra("torchao.quantization.quantize_.workflows.nf4.nf4_tensor", "compress")
    scales = math.gcd(256, weight.numel() // _BLOCK)
    found: Tensor = module.to_nf4(weight, _BLOCK, scales).get_original_weight()
    return found


def _powers_of_two(weight: Tensor) -> Tensor:
    largest = weight.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    exponent = (weight.abs() / largest).clamp(min=2.0**-7).log2().round()
    return torch.sign(weight) * largest * exponent.exp2()
