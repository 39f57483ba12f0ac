"""A trained model as a folder that transformers loads as a stock architecture, Qwen3.

Qwen3 is the model of the laboratory with other names: pre-norm with RMSNorm, rotary positions on the halves of a head,
RMSNorm on the queries and keys of each head before them, a gated feed-forward layer. It has no biases.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symexplin.lab.data.tokenizer import Tokenizer
from symexplin.lab.model import ROPE_BASE, Transformer
from symexplin.lab.weights import MODEL, write_tensors

__all__ = ["export_transformers"]

Echo = Callable[[str], None]

# The parts of a parameter's name, here and in Qwen3.
_NAMES = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn": "mlp",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
_PROBE = 64  # tokens that the two models are compared on


def export_transformers(
    model: Transformer,
    out: str | Path,
    tokenizer: Tokenizer,
    echo: Echo = lambda _: None,
) -> None:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads, in the model's dtype.

    Logits differ by rounding: transformers computes the angles of positions, and norms, in float32. The largest
    difference is measured and told.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        raise ValueError("export needs transformers: pip install 'symexplin[hf]'") from None
    if model.config.bias:
        raise ValueError(
            "model must have no biases, as stock architectures have none: train with --no-bias; "
            "symexplin.lab.weights.load_model reads the model.safetensors of any run"
        )
    for key in ("input_projection", "head_bias"):
        if getattr(model.config, key):
            raise ValueError(f"model must be without {key}, which Qwen3 does not have")
    if model.config.norm != "rms":
        raise ValueError(f"model must have norm 'rms', as Qwen3 has, got {model.config.norm!r}")
    target = Path(out).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"out must be a new or empty folder, got {str(out)!r}")
    size, end = model.config.vocab_size, tokenizer.end
    if tokenizer.vocab_size > size:
        raise ValueError(f"tokenizer must have at most the model's {size} tokens, got {tokenizer.vocab_size}")
    stock: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_settings(model), eos_token_id=end))
    weights = {
        ".".join(_NAMES.get(part, part) for part in name.split(".")): value for name, value in _separate(model).items()
    }
    stock.to(model.embedding.weight.dtype).load_state_dict(weights)
    if model.config.tie_head:
        del weights["lm_head.weight"]
    gap, largest = _difference(model, stock.eval())
    generation = transformers.GenerationConfig(eos_token_id=end, pad_token_id=end)  # type: ignore[no-untyped-call]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        folder = Path(temporary, target.name)
        folder.mkdir()
        for part in (stock.config, generation, _tokenizer(transformers, tokenizer, model.config.context)):
            part.save_pretrained(folder)
        write_tensors(folder / MODEL, weights, {"format": "pt"})
        files = sorted(path.name for path in folder.iterdir())
        folder.replace(target)
    echo(f"{target}: {', '.join(files)}")
    dtype = str(stock.dtype).removeprefix("torch.")
    echo(f"Qwen3ForCausalLM, {dtype}: largest difference between logits {gap:.3g}, largest logit {largest:.3g}")


def _settings(model: Transformer) -> dict[str, Any]:
    """Return the configuration of Qwen3 for a model's shape."""
    shape = model.config
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": model.embedding.weight.dtype,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "hidden_act": "gelu",  # the exact one
        "max_position_embeddings": shape.context,
        "rms_norm_eps": model.norm.eps or torch.finfo(model.embedding.weight.dtype).eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "tie_word_embeddings": shape.tie_head,
        "attention_bias": False,
        "bos_token_id": None,
    }


def _separate(model: Transformer) -> dict[str, Tensor]:
    """Return the weights of a model, those of `gate_up` as `gate` and `up`."""
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        halves = [name.replace("gate_up", half) for half in ("gate", "up")] if "gate_up" in name else [name]
        weights |= zip(halves, value.chunk(len(halves)), strict=True)
    return weights


@torch.no_grad()
def _difference(model: Transformer, stock: Any) -> tuple[float, float]:
    """Return the largest difference of a logit between the two models on random tokens, and the largest logit."""
    shape = (2, min(_PROBE, model.config.context))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, shape, generator=generator, dtype=torch.int64, device="cpu")
    logits = model(tokens)
    return float((logits - stock(tokens).logits).abs().max()), float(logits.abs().max())


def _tokenizer(transformers: Any, tokenizer: Tokenizer, context: int) -> Any:
    """Return transformers' tokenizer, which encodes as `tokenizer` does."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        eos_token=tokenizer.end_token,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # the name of the end token in a text is text
    )
