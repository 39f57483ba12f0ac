"""What a trained model is worth: its loss, its text, and how much sooner one run reaches another's loss."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from symexplin.lab.data import SEPARATOR, Corpus
from symexplin.lab.model import Transformer

__all__ = ["Curve", "evaluate", "sample", "speedup"]

# Evaluations of a run as (step, loss in nats a token), in order.
Curve = Sequence[tuple[int, float]]


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *, autocast: bool = False) -> float:
    """Return the mean cross entropy in nats a token over `batches` of (inputs, targets).

    Raises:
        ValueError: no batches.

    >>> from symexplin.lab.model import ModelConfig
    >>> model = Transformer(ModelConfig(width=16, depth=1, heads=2, context=8))
    >>> tokens = torch.zeros(2, 8, dtype=torch.long)
    >>> 4.5 < evaluate(model, [(tokens, tokens)]) < 6.5
    True
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for inputs, targets in batches:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = model(inputs.to(device), targets.to(device))
        total += float(loss) * targets.numel()
        count += targets.numel()
    model.train(was_training)
    if not count:
        raise ValueError("batches must hold at least one batch, got none")
    return total / count


@torch.no_grad()
def sample(model: Transformer, prompt: str, length: int, temperature: float = 0.8, seed: int = 0) -> str:
    """Return `prompt` and `length` more bytes drawn from a byte model; an empty prompt begins a new document.

    Args:
        model: a model with 256 tokens.
        prompt: the beginning, UTF-8.
        length: bytes to draw, with a window of the model's context.
        temperature: divides the logits; 0 takes the most likely byte.
        seed: of the private generator: the same arguments give the same text.

    Raises:
        ValueError: negative length or temperature.

    >>> from symexplin.lab.model import ModelConfig
    >>> model = Transformer(ModelConfig(width=16, depth=1, heads=2, context=8))
    >>> sample(model, "a", 5) == sample(model, "a", 5)
    True
    """
    if length < 0 or temperature < 0:
        raise ValueError(f"length and temperature must be >= 0, got {length} and {temperature}")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode()) or [SEPARATOR]
    for _ in range(length):
        window = torch.tensor([tokens[-model.config.context :]], device=device)
        logits = model(window)[0, -1].float().cpu()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            chances = (logits / temperature).softmax(dim=-1)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return Corpus.decode(tokens if prompt else tokens[1:])


def speedup(baseline: Curve, arm: Curve) -> float | None:
    """Return the baseline's steps over the steps at which `arm` first reaches the baseline's final loss.

    The arm's loss is interpolated linearly between evaluations. None: not reached, or before the first
    step, so that there is nothing to compare.

    Raises:
        ValueError: a curve without evaluations.

    >>> speedup([(0, 5.0), (100, 2.0)], [(0, 5.0), (50, 3.0), (100, 1.0)])
    1.3333333333333333
    """
    if not baseline or not arm:
        raise ValueError("baseline and arm must have at least one evaluation each")
    steps, target = baseline[-1]
    before_step, before = arm[0]
    if before <= target:
        return None
    for step, loss in arm[1:]:
        if loss <= target:
            return steps / (before_step + (step - before_step) * (before - target) / (before - loss))
        before_step, before = step, loss
    return None
