"""The paper's language model (section 5.1): a pre-norm transformer with RMSNorm, RoPE, QK-norm and GeGLU.

    x <- x + o(attention(rope(norm(q(h))), rope(norm(k(h))), v(h))),    h = norm(x)
    x <- x + down(gelu(gate(h)) * up(h)),                               h = norm(x)

It is an ordinary module. The optimizer trains it in curved space.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from symexplin.lab.loss import chunked_loss, cross_entropy
from symexplin.validation import check_choice, check_flag, check_whole

__all__ = ["INITS", "ROPE_BASE", "ModelConfig", "Transformer", "apply_rope", "attention", "rope_tables"]

# How the blocks' matrices may be drawn (section 4.3, "Xavier uniform over normal").
INITS = {"xavier_uniform": nn.init.xavier_uniform_, "xavier_normal": nn.init.xavier_normal_}
# Base of the rotary frequencies (Su et al. 2024) and the usual spread of embeddings and head (GPT-2).
ROPE_BASE = 10_000.0
_EMBEDDING_STD = 0.02
# Explicit: nn.RMSNorm's default depends on the dtype and is 2^-7 in bfloat16.
_NORM_EPS = 1e-6
_FEWEST_QUERIES = 64  # smaller matrix products do not reach the CPU's pace


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a :class:`Transformer`.

    Args:
        width: size of the residual stream.
        depth: number of blocks.
        heads: attention heads; width / heads must be whole and even, as RoPE turns pairs.
        vocab_size: number of tokens.
        context: longest sequence, in tokens.
        tie_head: share the output head's weight with the embedding.
        bias: biases on the linears of the blocks.
        init: how the matrices of the blocks are drawn: "xavier_uniform" or "xavier_normal", with the same deviation.

    Raises:
        ValueError: a value out of range.

    >>> ModelConfig(width=128).hidden
    320
    """

    width: int = 128
    depth: int = 4
    heads: int = 4
    vocab_size: int = field(default=256, metadata={"derived": True})  # that of the data's tokenizer
    context: int = 128
    tie_head: bool = False
    bias: bool = True
    init: str = field(default="xavier_uniform", metadata={"choices": tuple(INITS)})

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("width", "depth", "heads", "vocab_size", "context"):
            check_whole(name, getattr(self, name))
        for name in ("tie_head", "bias"):
            check_flag(name, getattr(self, name))
        check_choice("init", self.init, INITS)
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of 2 * heads = {2 * self.heads}, so that a head's size is even, "
                f"got {self.width}"
            )

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Inner size of GeGLU: 8/3 of the width, to the nearest multiple of 64 (section 5.1)."""
        return 64 * max(1, math.floor(self.width * 8 / 3 / 64 + 0.5))


def rope_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position * base^(-2i/head_dim), each float64 of shape (length, head_dim/2).

    >>> cos, sin = rope_tables(4, 2)
    >>> [round(x, 4) for x in sin[:, 0].tolist()]
    [0.0, 0.8415, 0.9093, 0.1411]
    """
    frequency = ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + head_dim/2}) of `x` (..., length, head_dim) by the angles of the tables.

    >>> apply_rope(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    tensor([[-4.,  3.]])
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(head_dim) + mask) v; q, k, v are (batch, heads, length, head_dim).

    `mask` (length, length) holds 0 up to the diagonal and -inf above. On CUDA the fused causal kernel ignores it. On
    the CPU a quarter of the queries at a time sees the keys up to its end, so that most of what the mask would hide is
    never computed; torch's fused kernel is slower there, several times so in bfloat16.

    >>> x = torch.ones(1, 1, 2, 4)
    >>> attention(x, x, x, torch.tensor([[0.0, -math.inf], [0.0, 0.0]])).shape
    torch.Size([1, 1, 2, 4])
    """
    if q.is_cuda:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    size = max(_FEWEST_QUERIES, -(-len(mask) // 4))
    flat_q, flat_k, flat_v, mask = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask.to(q.dtype)
    mixed, seen = [], 0
    for queries, rows in zip(torch.split(flat_q, size, dim=1), torch.split(mask, size), strict=True):
        seen += len(rows)
        scores = torch.baddbmm(rows[:, :seen], queries, flat_k[:, :seen].mT, alpha=q.shape[-1] ** -0.5)
        mixed.append(scores.softmax(dim=-1) @ flat_v[:, :seen])
    return torch.cat(mixed, dim=1).view_as(q)


class Attention(nn.Module):
    """Causal multi-head self-attention with RMSNorm on queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q, self.k, self.v, self.o = (nn.Linear(config.width, config.width, bias=config.bias) for _ in range(4))
        self.q_norm = nn.RMSNorm(config.head_dim, eps=_NORM_EPS)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=_NORM_EPS)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = apply_rope(self.q_norm(q), cos, sin), apply_rope(self.k_norm(k), cos, sin)
        mixed: Tensor = self.o(attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """GeGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=config.bias)
        self.up = nn.Linear(config.width, config.hidden, bias=config.bias)
        self.down = nn.Linear(config.hidden, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        mixed: Tensor = self.down(functional.gelu(self.gate(x)) * self.up(x))
        return mixed


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual path."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=_NORM_EPS)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=_NORM_EPS)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        mixed: Tensor = x + self.ffn(self.ffn_norm(x))
        return mixed


class Transformer(nn.Module):
    """A decoder-only language model.

    The blocks' weights start as `config.init` says, their biases at zero, embedding and head normal (deviation 0.02).
    Two attributes save memory in training and change only the rounding: `recompute` (recompute each block in the
    backward pass) and `loss_chunk` (tokens whose logits the loss holds at a time; 0: all).

    Args:
        config: the shape.
        generator: source of the initial weights; None: torch's global one.

    >>> config = ModelConfig(width=16, depth=1, heads=2, context=8)
    >>> model = Transformer(config, torch.Generator().manual_seed(0))
    >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
    torch.Size([2, 8, 256])
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        self.loss_chunk = 0
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.width, eps=_NORM_EPS)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie_head:
            self.head.weight = self.embedding.weight
        cos, sin = rope_tables(config.context, config.head_dim)
        dtype = self.head.weight.dtype
        self.register_buffer("cos", cos.to(dtype), persistent=False)
        self.register_buffer("sin", sin.to(dtype), persistent=False)
        mask = torch.full((config.context, config.context), -math.inf, dtype=dtype).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew."""
        draw = INITS[self.config.init]
        nn.init.normal_(self.embedding.weight, std=_EMBEDDING_STD, generator=generator)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                draw(module.weight, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        self.norm.reset_parameters()
        if not self.config.tie_head:
            nn.init.normal_(self.head.weight, std=_EMBEDDING_STD, generator=generator)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output head, which :func:`symexplin.routing` leaves plain."""
        return self.head

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (batch, length, vocab_size), or given `targets` their mean cross entropy in nats.

        Args:
            tokens: int64 (batch, length).
            targets: int64 (batch, length), the token after each; -100 is left out.

        Raises:
            ValueError: a sequence longer than the context.
        """
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ValueError(f"tokens must be no longer than the context, {self.config.context}, got {length}")
        cos, sin, mask = self.cos[:length], self.sin[:length], self.mask[:length, :length]
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, mask, use_reentrant=False)
            else:
                x = block(x, cos, sin, mask)
        x = self.norm(x)
        if targets is not None and self.loss_chunk:
            return chunked_loss(x.flatten(0, -2), self.head.weight, targets.flatten(), self.loss_chunk)
        logits: Tensor = self.head(x)
        return logits if targets is None else cross_entropy(logits.flatten(0, -2), targets.flatten())
