"""A trained model as a folder that transformers loads as a stock architecture, Qwen3.

Qwen3 is the model of the laboratory with other names: pre-norm with RMSNorm, rotary positions on the halves of a head,
RMSNorm on the queries and keys of each head before them, a gated feed-forward layer. It has no biases.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symexplin.lab.data.tokenizer import Tokenizer
from symexplin.lab.model import ROPE_BASE, Transformer

__all__ = ["export_transformers"]

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


def export_transformers(model: Transformer, out: str | Path, tokenizer: Tokenizer) -> None:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads, in the model's dtype.

    Logits differ by rounding: transformers computes the angles of positions, and norms, in float32.
    """
    import transformers

    for key, needed in (("bias", False), ("input_projection", False), ("head_bias", False), ("norm", "rms")):
        if (found := getattr(model.config, key)) != needed:
            raise ValueError(
                f"model must have {key} = {needed!r}, as Qwen3 has, got {found!r}; symexplin.lab.weights.load_model "
                "reads the model.safetensors of any run"
            )
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"out must be a new or empty folder, got {str(out)!r}")
    stock: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_settings(model), eos_token_id=tokenizer.end))
    weights = {
        ".".join(_NAMES.get(part, part) for part in name.split(".")): value for name, value in _separate(model).items()
    }
    stock.to(model.embedding.weight.dtype).load_state_dict(weights)
    stock.generation_config.pad_token_id = tokenizer.end  # there is none of its own
    stock.save_pretrained(target)
    _tokenizer(transformers, tokenizer, model.config.context).save_pretrained(target)


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


def _tokenizer(transformers: Any, tokenizer: Tokenizer, context: int) -> Any:
    """Return transformers' tokenizer, which encodes as `tokenizer` does."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        eos_token=tokenizer.end_token,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # the name of the end token in a text is text
    )
