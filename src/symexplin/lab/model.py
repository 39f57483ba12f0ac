"""The paper's language model (section 5.1): a pre-norm transformer with RMSNorm, RoPE, QK-norm and GeGLU.

    x <- x + o(attention(rope(norm(q(h))), rope(norm(k(h))), v(h))),    h = norm(x)
    x <- x + down(gelu(gate(h)) * up(h)),                               h = norm(x)

It is an ordinary module. The optimizer trains it in curved space.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from symexplin.lab.config import ModelConfig

__all__ = [
    "ROPE_BASE",
    "ModelConfig",
    "Transformer",
    "apply_rope",
    "attention",
    "chunked_loss",
    "cross_entropy",
    "rope_tables",
]

# Base of the rotary frequencies (Su et al. 2024) and the usual spread of the head (GPT-2). The author's are the same.
ROPE_BASE = 10_000.0
_HEAD_STD = 0.02
_IGNORED = -100  # target that the loss leaves out, as in torch
_FEWEST_QUERIES = 64  # smaller matrix products do not reach the CPU's pace


def rope_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position * base^(-2i/head_dim), each float64 of shape (length, head_dim/2)."""
    frequency = ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequency)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + head_dim/2}) of `x` (..., length, head_dim) by the angles of the tables."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(head_dim) + mask) v; q, k, v are (batch, heads, length, head_dim).

    `mask` (length, length) holds 0 up to the diagonal and -inf above. On CUDA the fused causal kernel ignores it. On
    the CPU a quarter of the queries at a time sees the keys up to its end, so that most of what the mask would hide is
    never computed; torch's fused kernel is slower there, several times so in bfloat16.
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
        on_qkv = config.bias and config.qkv_bias
        self.q, self.k, self.v = (nn.Linear(config.width, config.width, bias=on_qkv) for _ in range(3))
        self.o = nn.Linear(config.width, config.width, bias=config.bias)
        self.q_norm, self.k_norm = (_rms_norm(config, config.head_dim) for _ in range(2))

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
        self.fused = config.fused_gate_up
        if self.fused:
            self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=config.bias)
        else:
            self.gate, self.up = (nn.Linear(config.width, config.hidden, bias=config.bias) for _ in range(2))
        self.down = nn.Linear(config.hidden, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1) if self.fused else (self.gate(x), self.up(x))
        mixed: Tensor = self.down(functional.gelu(gate) * up)
        return mixed


class InputProjection(nn.Module):
    """RMSNorm and a linear map with a bias, between embeddings and blocks.

    It is no nn.Linear, so that the optimizer leaves it uncurved: the paper has its map in the blocks.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = _rms_norm(config, config.width)
        linear = nn.Linear(config.width, config.width)
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        return functional.linear(self.norm(x), self.weight, self.bias)


def _rms_norm(config: ModelConfig, size: int) -> nn.RMSNorm:
    return nn.RMSNorm(size, eps=None if isinstance(config.norm_eps, str) else config.norm_eps)


def _norm(config: ModelConfig) -> nn.RMSNorm | nn.LayerNorm:
    """Return a norm of the residual stream."""
    if config.norm == "rms":
        return _rms_norm(config, config.width)
    # nn.LayerNorm has no eps of the dtype: float32's, in which autocast computes it.
    eps = torch.finfo(torch.float32).eps if isinstance(config.norm_eps, str) else config.norm_eps
    return nn.LayerNorm(config.width, eps=eps, bias=False)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual path."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.ffn_norm = _norm(config)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        mixed: Tensor = x + self.ffn(self.ffn_norm(x))
        return mixed


class Transformer(nn.Module):
    """A decoder-only language model.

    To save memory in training set `recompute` (compute each block again in the backward pass) and `loss_chunk`
    (tokens whose logits the loss holds at once; 0: all). Both change the rounding alone. The initial weights come from
    `generator`, or from torch's global one.

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
        self.input = InputProjection(config) if config.input_projection else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=config.head_bias)
        if config.tie_head:
            self.head.weight = self.embedding.weight
        tables = [table.to(self.head.weight) for table in rope_tables(config.context, config.head_dim)]
        mask = self.head.weight.new_full((config.context, config.context), -math.inf, requires_grad=False).triu(1)
        for name, buffer in zip(("cos", "sin", "mask"), (*tables, mask), strict=True):
            self.register_buffer(name, buffer, persistent=False)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize all weights again."""
        draw = getattr(nn.init, f"{self.config.init}_")
        nn.init.normal_(self.embedding.weight, std=self.config.embedding_deviation, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.RMSNorm | nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | InputProjection) and module is not self.head:
                draw(module.weight, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Attention):
                module.q.weight.data.mul_(self.config.qk_gain)
                module.k.weight.data.mul_(self.config.qk_gain)
        if not self.config.tie_head:
            nn.init.normal_(self.head.weight, std=_HEAD_STD, generator=generator)
        if self.config.head_bias:
            nn.init.zeros_(self.head.bias)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output head, which :func:`symexplin.routing` leaves plain."""
        return self.head

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (batch, length, vocab_size), or given `targets` their mean cross entropy in nats.

        `tokens` and `targets`, the token after each, are int64 (batch, length). A target of -100 is left out.
        """
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ValueError(f"tokens must be no longer than the context, {self.config.context}, got {length}")
        cos, sin, mask = self.cos[:length], self.sin[:length], self.mask[:length, :length]
        x = self.embedding(tokens)
        if self.input is not None:
            x = self.input(x)
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, mask, use_reentrant=False)
            else:
                x = block(x, cos, sin, mask)
        x = self.norm(x)
        if targets is not None and self.loss_chunk:
            return chunked_loss(x.flatten(0, -2), self.head.weight, targets.flatten(), self.loss_chunk, self.head.bias)
        logits: Tensor = self.head(x)
        return logits if targets is None else cross_entropy(logits.flatten(0, -2), targets.flatten())


def chunked_loss(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, bias: Tensor | None = None) -> Tensor:
    """Return the mean over targets of -log softmax(x weight^T + bias)[target], in nats and at least float32.

    Each chunk's gradient is computed with its loss, so that no logits are kept and none are computed twice.

    Args:
        x: (tokens, width).
        weight: of the head, (vocabulary, width).
        targets: int64 (tokens,); -100 is left out.
        chunk: tokens whose logits exist at once.
        bias: of the head, (vocabulary,).

    >>> chunked_loss(torch.ones(6, 2), torch.ones(4, 2), torch.tensor([0, 1, 2, 3, 3, -100]), chunk=4)
    tensor(1.3863)
    """
    if torch.is_grad_enabled():
        total: Tensor = _ChunkedLoss.apply(x, weight, targets, chunk, bias)  # type: ignore[no-untyped-call]
    else:
        pieces = zip(torch.split(x, chunk), torch.split(targets, chunk), strict=True)
        total = torch.stack([cross_entropy(functional.linear(a, weight, bias), b, "sum") for a, b in pieces]).sum()
    count = (targets != _IGNORED).sum()
    # Without a target the mean is NaN, as torch's, and the gradients are 0, not 0 times an infinite one.
    return torch.where(count > 0, total / count.clamp(min=1), math.nan)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return torch's cross entropy of `logits` (tokens, vocabulary), computed in at least float32."""
    return functional.cross_entropy(_wide(logits), targets, ignore_index=_IGNORED, reduction=reduction)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, bias: Tensor | None) -> Tensor:
        """Sum the losses of all chunks and keep the gradients of that sum: softmax(logits) less one at each target."""
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        if torch.is_autocast_enabled(x.device.type):
            low = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(low), weight.to(low), None if bias is None else bias.to(low)
        losses, grads = [], []
        total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        of_bias = None if bias is None else total.new_zeros(len(total))
        for piece, target in zip(torch.split(x, chunk), torch.split(targets, chunk), strict=True):
            logits = _wide(functional.linear(piece, weight, bias))
            kept, target = (target != _IGNORED).unsqueeze(-1), target.clamp(min=0).unsqueeze(-1)
            top, hit = logits.amax(-1, keepdim=True), logits.gather(-1, target)
            chances = logits.sub_(top).exp_()  # in place: a chunk has one tensor of the size of its logits
            norm = chances.sum(-1, keepdim=True)
            losses.append(torch.where(kept, top - hit + norm.log(), 0.0).sum())
            error = chances.mul_(kept / norm).scatter_add_(-1, target, -kept.to(chances.dtype)).to(weight.dtype)
            grads.append(error @ weight)
            total += error.T @ piece
            if of_bias is not None:
                of_bias += error.sum(0, dtype=of_bias.dtype)
        ctx.save_for_backward(torch.cat(grads), total, of_bias)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, Tensor | None]:
        """Scale what was kept."""
        kept = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        x, weight, bias = (None if tensor is None else (tensor * grad).to(dtype) for tensor, dtype in kept)
        return cast(Tensor, x), cast(Tensor, weight), None, None, bias
