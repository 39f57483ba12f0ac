"""Evaluate a trained model: its loss, and samples of its text."""

import operator
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from symexplin.checks import check_not_negative, check_whole
from symexplin.lab.data.tokenizer import Tokenizer
from symexplin.lab.model import Transformer
from symexplin.lab.parallel import ALONE, Ranks

__all__ = ["evaluate", "sample"]

# Below this temperature quotients overflow, and sampling is that of temperature 0.
_GREEDY = 1e-6


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *, autocast: bool = False, ranks: Ranks = ALONE
) -> float:
    """Return the mean cross entropy in nats per token over `batches` of (inputs, targets), shared by `ranks`."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    losses, counts = [], []
    for batch in batches:
        rows = ranks.rows(len(batch[0]))
        own = rows.stop - rows.start
        # All processes must compute a sharded model: one without rows takes a row that does not count.
        inputs, targets = (part[rows] if own else part[:1] for part in batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            # A compiled model may overwrite its last result (CUDA graphs).
            losses.append(model(inputs.to(device), targets.to(device)).clone())
        counts.append(own * targets.shape[-1])
    model.train(was_training)
    # All at once: each look at a number waits for the device.
    values = torch.stack(losses).tolist()
    total, count = map(sum, zip(*ranks.gather((sum(map(operator.mul, values, counts)), sum(counts))), strict=True))
    return float(total / count)


@torch.no_grad()
def sample(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    length: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """Return `prompt` and the text of `length` more tokens; an empty prompt begins a new document.

    The `temperature` divides the logits; 0 takes the most likely token. The same arguments give the same text.

    >>> from symexplin.lab.model import ModelConfig
    >>> model, tokenizer = Transformer(ModelConfig(width=16, depth=1, heads=2, context=8)), Tokenizer.from_name("byte")
    >>> sample(model, tokenizer, "a", 5) == sample(model, tokenizer, "a", 5)
    True
    """
    check_whole("length", length, minimum=0)
    check_whole("seed", seed, minimum=0)
    check_not_negative("temperature", temperature)
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ValueError(f"prompt must be UTF-8 text, got {prompt!r}") from None
    size = model.config.vocab_size
    if tokenizer.vocab_size != size:
        raise ValueError(f"tokenizer must have the model's {size} tokens, got {tokenizer.vocab_size}")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = tokenizer.encode(prompt) or [tokenizer.end]
    for _ in range(length):
        window = torch.tensor([tokens[-model.config.context :]], dtype=torch.int64, device=device)
        tokens.append(_draw(model(window)[0, -1].float().cpu(), temperature, generator))
    return tokenizer.decode(tokens if prompt else tokens[1:])


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature < _GREEDY:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator))
