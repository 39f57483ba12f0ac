import dataclasses
import math

import pytest
import torch
from torch.nn import functional

import symexplin as sel
from networks import moved
from symexplin.lab.model import ModelConfig, Transformer, attention, chunked_loss, cross_entropy, rope_tables

TINY = ModelConfig(width=16, depth=2, heads=2, vocab_size=11, context=12)


def build(config=TINY, seed=0, dtype=torch.float64):
    return Transformer(config, torch.Generator().manual_seed(seed)).to(dtype)


def tokens_of(config, rows=3, seed=1):
    shape = (rows, config.context)
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def rms_norm(x, weight, eps=1e-6):
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def layer_norm(x, weight):
    centered = x - x.mean(-1, keepdim=True)
    return rms_norm(centered, weight)


def complex_rope(x):
    """RoPE as multiplication by exp(i position theta), with nothing from the code under test."""
    half = x.shape[-1] // 2
    theta = torch.tensor([10_000.0 ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * theta
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


# One block of queries, two, four.
@pytest.mark.parametrize(
    ("length", "dtype"),
    [(1, torch.float32), (64, torch.float64), (65, torch.float32), (200, torch.float64), (300, torch.float32)],
)
def test_attention_is_the_masked_softmax(dtype, length):
    q, k, v, grad = torch.randn(4, 2, 3, length, 4, generator=torch.Generator().manual_seed(0), dtype=dtype)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    mask = torch.full((length, length), -math.inf, dtype=dtype).triu(1)
    expected = (q @ k.mT / 2.0 + mask).softmax(-1) @ v
    mixed = attention(q, k, v, mask)
    torch.testing.assert_close(mixed, expected)
    gradients = (torch.autograd.grad(x, (q, k, v), grad) for x in (mixed, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-5)


@pytest.mark.parametrize(("name", "norm"), [("rms", rms_norm), ("layer", layer_norm)])
def test_model_is_the_formula(name, norm):
    """The whole forward pass by hand, in float64, one head at a time; queries and keys always have RMSNorm."""
    model = moved(build(dataclasses.replace(TINY, norm=name)))
    weights = dict(model.named_parameters())
    tokens = tokens_of(TINY)
    x = weights["embedding.weight"][tokens]
    # The model's own tables come from float32; only here do they count, so give it exact ones.
    model.cos, model.sin = rope_tables(TINY.context, TINY.head_dim)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    for block in ("blocks.0", "blocks.1"):
        h = norm(x, weights[f"{block}.attention_norm.weight"])
        q, k, v = (linear(h, f"{block}.attention.{name}") for name in "qkv")
        outputs = []
        for head in range(TINY.heads):
            part = slice(head * TINY.head_dim, (head + 1) * TINY.head_dim)
            turned_q = complex_rope(rms_norm(q[..., part], weights[f"{block}.attention.q_norm.weight"]))
            turned_k = complex_rope(rms_norm(k[..., part], weights[f"{block}.attention.k_norm.weight"]))
            scores = turned_q @ turned_k.transpose(1, 2) / math.sqrt(TINY.head_dim)
            chances = torch.exp(scores).tril()
            outputs.append(chances / chances.sum(-1, keepdim=True) @ v[..., part])
        x = x + linear(torch.cat(outputs, dim=-1), f"{block}.attention.o")
        h = norm(x, weights[f"{block}.ffn_norm.weight"])
        gate = linear(h, f"{block}.ffn.gate")
        gelu = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
        x = x + linear(gelu * linear(h, f"{block}.ffn.up"), f"{block}.ffn.down")
    logits = norm(x, weights["norm.weight"]) @ weights["head.weight"].T
    torch.testing.assert_close(model(tokens), logits, rtol=1e-11, atol=1e-11)


AUTHOR = ModelConfig(width=16, depth=2, heads=2, vocab_size=11, context=12, harness="author")


def test_the_authors_model_is_ours_between_a_projection_and_a_head_with_a_bias():
    """Without biases on queries, keys and values, and with float64's rounding as eps."""
    model = moved(build(AUTHOR))
    weights = dict(model.named_parameters())
    tokens = tokens_of(TINY)
    eps = torch.finfo(torch.float64).eps
    x = weights["embedding.weight"][tokens]
    x = rms_norm(x, weights["input.norm.weight"], eps) @ weights["input.weight"].T + weights["input.bias"]
    for block in model.blocks:
        x = block(x, model.cos, model.sin, model.mask)
    logits = rms_norm(x, weights["norm.weight"], eps) @ weights["head.weight"].T + weights["head.bias"]
    torch.testing.assert_close(model(tokens), logits, rtol=1e-11, atol=1e-11)
    expected = -logits.log_softmax(-1).gather(-1, tokens[..., None]).mean()
    assert model(tokens, tokens).item() == pytest.approx(expected.item(), rel=1e-12)
    model.loss_chunk = 5
    assert model(tokens, tokens).item() == pytest.approx(expected.item(), rel=1e-12)
    hidden, d, v, depth = 64, TINY.width, TINY.vocab_size, TINY.depth
    attention = 4 * d * d + d + TINY.head_dim * 2
    block = attention + 2 * (d * hidden + hidden) + hidden * d + d + 2 * d
    assert sum(p.numel() for p in weights.values()) == v * d + d + d * d + d + depth * block + d + d * v + v
    assert {m.eps for m in model.modules() if isinstance(m, torch.nn.RMSNorm)} == {None}
    assert {
        name for name, p in weights.items() if p.dim() == 1 and not Transformer(AUTHOR).get_parameter(name).any()
    } == {
        *("input.bias", "head.bias"),
        *(f"blocks.{i}.{name}.bias" for i in range(2) for name in ("attention.o", "ffn.gate", "ffn.up", "ffn.down")),
    }
    curved = {route.name.split(".")[0] for route in sel.routing(model).curved}
    assert curved == {"blocks"}


def test_the_authors_start_is_drawn_in_order():
    generator = torch.Generator().manual_seed(5)
    weights = Transformer(AUTHOR, torch.Generator().manual_seed(5)).state_dict()
    d, v = TINY.width, TINY.vocab_size
    assert torch.equal(weights["embedding.weight"], torch.empty(v, d).normal_(0, d**-0.5, generator=generator))
    bound = math.sqrt(3 / d)
    assert torch.equal(weights["input.weight"], torch.empty(d, d).uniform_(-bound, bound, generator=generator))


def test_a_fused_projection_is_both_halves_of_geglu():
    model, fused = moved(build()), build(dataclasses.replace(TINY, fused_gate_up=True))
    weights = model.state_dict()
    for block in range(TINY.depth):
        for kind in ("weight", "bias"):
            halves = [weights.pop(f"blocks.{block}.ffn.{name}.{kind}") for name in ("gate", "up")]
            weights[f"blocks.{block}.ffn.gate_up.{kind}"] = torch.cat(halves)
    fused.load_state_dict(weights)
    tokens = tokens_of(TINY)
    torch.testing.assert_close(fused(tokens), model(tokens), rtol=1e-13, atol=1e-13)


def test_a_prefix_gives_the_prefix_of_the_logits():
    model = moved(build())
    tokens = tokens_of(TINY)
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5])
    with pytest.raises(ValueError, match="longer than the context, 12, got 13"):
        model(torch.zeros(1, 13, dtype=torch.long))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu():
    model = moved(build(dtype=torch.float32))
    tokens = tokens_of(TINY)
    expected = model(tokens)
    torch.testing.assert_close(model.cuda()(tokens.cuda()).cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [{}, {"init": "xavier_normal"}, {"qk_gain": 0.25, "norm": "layer"}, {"embedding_std": 32.0, "fused_gate_up": True}],
)
def test_the_start_is_drawn_from_the_generator_alone(changes):
    """The draws one after the other: the embedding, the linears in the order of the modules, the head."""
    config = ModelConfig(width=32, depth=2, heads=2, context=8, **changes)
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(99)
    weights = Transformer(config, torch.Generator().manual_seed(5)).state_dict()
    expected = {"embedding.weight": torch.empty(256, 32).normal_(0, config.embedding_std, generator=generator)}
    shapes = [("attention.q", 32, 32), ("attention.k", 32, 32), ("attention.v", 32, 32), ("attention.o", 32, 32)]
    halves = [("ffn.gate_up", 128, 32)] if config.fused_gate_up else [("ffn.gate", 64, 32), ("ffn.up", 64, 32)]
    shapes += [*halves, ("ffn.down", 32, 64)]
    for block in range(2):
        for name, d_out, d_in in shapes:
            deviation = math.sqrt(2 / (d_in + d_out))
            draw = torch.empty(d_out, d_in)
            if config.init == "xavier_normal":
                draw.normal_(0, deviation, generator=generator)
            else:
                draw.uniform_(-math.sqrt(3) * deviation, math.sqrt(3) * deviation, generator=generator)
            gain = config.qk_gain if name in ("attention.q", "attention.k") else 1.0
            expected[f"blocks.{block}.{name}.weight"] = gain * draw
    expected["head.weight"] = torch.empty(256, 32).normal_(0, 0.02, generator=generator)
    for name, weight in weights.items():
        draw = expected.get(name, torch.full_like(weight, 0.0 if name.endswith("bias") else 1.0))  # biases, norms
        assert torch.equal(weight, draw), name


# --- the loss in chunks -----------------------------------------------------------------------------------------------


def drawn(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 8, generator=generator, dtype=dtype)
    weight = torch.randn(5, 8, generator=generator, dtype=dtype)
    targets = torch.randint(5, (11,), generator=generator)
    targets[[3, 9]] = -100
    return x.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 11, 50])
def test_chunks_give_the_loss_and_the_gradients_of_all_at_once(chunk, has_bias):
    x, weight, targets = drawn()
    bias = torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_() if has_bias else None
    kept = targets >= 0
    expected = -functional.linear(x, weight, bias).log_softmax(-1)[kept].gather(1, targets[kept, None]).mean()
    loss = chunked_loss(x, weight, targets, chunk, bias)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0.0)
    inputs = (x, weight, bias) if has_bias else (x, weight)
    gradients = (torch.autograd.grad(3.0 * total, inputs) for total in (loss, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        torch.testing.assert_close(chunked_loss(x, weight, targets, chunk, bias), expected, rtol=1e-13, atol=0.0)


def test_large_logits_and_no_target_at_all():
    x, weight, targets = drawn()
    loss = chunked_loss(1e4 * x, weight, targets, 4)
    torch.testing.assert_close(loss, cross_entropy(1e4 * x @ weight.T, targets), rtol=1e-13, atol=0.0)
    nothing = chunked_loss(x, weight, torch.full_like(targets, -100), 4)
    assert nothing.isnan()
    assert not any(gradient.any() for gradient in torch.autograd.grad(nothing, (x, weight)))


def test_autocast_is_close_and_the_loss_and_gradients_keep_float32():
    x, weight, targets = drawn(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_loss(x, weight, targets, 4)
        whole = cross_entropy(functional.linear(x, weight), targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0.0)
    grads = torch.autograd.grad(loss, (x, weight))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    for mine, theirs in zip(grads, torch.autograd.grad(whole, (x, weight)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.002)
