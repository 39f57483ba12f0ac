"""A trained model for other people's tools: a folder that transformers loads as a stock architecture, Qwen3.

Qwen3 is this model under other names: pre-norm with RMSNorm, rotary positions on halves of a head, RMSNorm on every
head's queries and keys before them, a gated feed-forward whose activation is configurable. Only biases are not in it.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from torch import Tensor

from symexplin.lab.data.tokenizer import Tokenizer
from symexplin.lab.model import ROPE_BASE, Transformer
from symexplin.lab.weights.files import load_model, write_tensors

__all__ = ["export_transformers"]

Echo = Callable[[str], None]

_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_PARTS = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_PROBE = 64  # tokens that the exported model is tried on


def export_transformers(
    model_or_path: Transformer | str | Path,
    out: str | Path,
    tokenizer_json: str | Path | None = None,
    end_token_id: int | None = None,
    echo: Echo = lambda _: None,
) -> dict[str, Any]:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads, of the model's dtype.

    The logits are those of `model_or_path` but for rounding: transformers computes angles of positions and norms in
    float32. The difference on a probe is measured before the folder gets its name. Nothing is fetched.

    Args:
        model_or_path: a model without biases, or the file of one (:func:`symexplin.lab.weights.load_model`).
        out: the folder to make; it must not exist, or be empty.
        tokenizer_json: the model's `tokenizers` file, for `AutoTokenizer.from_pretrained`; texts never yield its end.
        end_token_id: the token that ends a document; None: the one that :class:`symexplin.lab.data.tokenizer.Tokenizer`
            finds, if there is a tokenizer.
        echo: takes the lines of the report.

    Returns:
        "architecture", "dtype", "files" by name, "largest_difference" of a logit, computed in float32 at least, and
        the "largest_logit".

    Raises:
        ValueError: a model with biases or raw weights, a folder with files, a tokenizer that does not fit, no
            transformers.
        OSError: the disk is full, ...; nothing is left behind.

    >>> from symexplin.lab.model import ModelConfig
    >>> model = Transformer(ModelConfig(width=16, depth=1, heads=2, context=8, bias=False))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_transformers(model, Path(folder, "out"))["files"]
    ['config.json', 'generation_config.json', 'model.safetensors']
    """
    transformers = _transformers()
    model = model_or_path if isinstance(model_or_path, Transformer) else load_model(model_or_path)
    _check_model(model)
    target = _check_target(Path(out))
    tokenizer = None
    if tokenizer_json is not None:
        tokenizer, end_token_id = _tokenizer(transformers, model, Path(tokenizer_json), end_token_id)
    if end_token_id is not None and not 0 <= end_token_id < model.config.vocab_size:
        raise ValueError(f"end_token_id must be a token from 0 to {model.config.vocab_size - 1}, got {end_token_id}")
    config, weights = _config(transformers, model, end_token_id), _renamed(model)
    gap, size = _differences(transformers, model, config, weights)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        folder = Path(temporary, target.name)
        folder.mkdir()
        config.save_pretrained(folder)
        transformers.GenerationConfig(eos_token_id=end_token_id, pad_token_id=end_token_id).save_pretrained(folder)
        write_tensors(folder / "model.safetensors", weights, {"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        files = sorted(path.name for path in folder.iterdir())
        folder.replace(target)
    echo(f"{target}: {', '.join(files)}")
    echo(
        f"{config.architectures[0]}, {config.dtype}: largest difference of a logit {gap:.3g}, largest logit {size:.3g}"
    )
    return {
        "architecture": config.architectures[0],
        "dtype": str(config.dtype).removeprefix("torch."),
        "files": files,
        "largest_difference": gap,
        "largest_logit": size,
    }


def _transformers() -> ModuleType:
    try:
        import transformers
    except ModuleNotFoundError:
        raise ValueError("export needs transformers: pip install 'symexplin[hf]'") from None
    return transformers


def _check_model(model: Transformer) -> None:
    names = [name for name, _ in model.named_parameters()]
    raw = next((name for name in names if name.endswith("raw_weight")), None)
    if raw is not None:
        raise ValueError(f"model must have plain weights, got the raw one {raw!r}: fold it first")
    if model.config.bias:
        raise ValueError(
            "model must have no biases, as stock architectures have none: symexplin.lab.weights.load_model reads its "
            "model.safetensors as it is; training with --no-bias makes a model that can be exported"
        )


def _check_target(out: Path) -> Path:
    if not str(out) or (out.exists() and not out.is_dir()):
        raise ValueError(f"out must name a new folder, got {str(out)!r}")
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"out must be a new or empty folder, got {str(out)!r} with {next(out.iterdir()).name!r} in it")
    return out.resolve()


def _config(transformers: ModuleType, model: Transformer, end: int | None) -> Any:
    shape = model.config
    return transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype=model.embedding.weight.dtype,
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        hidden_act="gelu",  # the exact one
        max_position_embeddings=shape.context,
        rms_norm_eps=model.norm.eps,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        tie_word_embeddings=shape.tie_head,
        attention_bias=False,
        bos_token_id=None,
        eos_token_id=end,
    )


def _renamed(model: Transformer) -> dict[str, Tensor]:
    """Return the weights by their names in Qwen3; a tied head is left out."""
    weights = {}
    for name, value in model.state_dict().items():
        if name == "head.weight" and model.config.tie_head:
            continue
        if name not in _NAMES:
            _, number, part = name.removesuffix(".weight").split(".", 2)
            weights[f"model.layers.{number}.{_PARTS[part]}.weight"] = value
        else:
            weights[_NAMES[name]] = value
    return weights


@torch.no_grad()
def _differences(
    transformers: ModuleType, model: Transformer, config: Any, weights: dict[str, Tensor]
) -> tuple[float, float]:
    """Return the largest difference of a logit between the two models on a probe, and the largest logit.

    Both compute in float32 at least: what bfloat16 rounds differs, and says nothing about the export.
    """
    dtype = torch.promote_types(config.dtype, torch.float32)
    stock = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)  # sets its dtype
    missing, unexpected = stock.load_state_dict(weights, strict=False)
    if unexpected or missing != (["lm_head.weight"] if model.config.tie_head else []):
        raise ValueError(
            f"export does not know the Qwen3 of transformers {transformers.__version__}: it lacks the weights "
            f"{unexpected} and wants {missing}"
        )
    ours = Transformer(model.config).to(dtype)
    ours.load_state_dict(model.state_dict())
    shape = (2, min(_PROBE, model.config.context))
    tokens = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    logits = ours(tokens).double()
    return float((logits - stock.eval()(tokens).logits.double()).abs().max()), float(logits.abs().max())


def _tokenizer(transformers: ModuleType, model: Transformer, path: Path, end: int | None) -> tuple[Any, int]:
    """Return transformers' tokenizer, which encodes as the project's does, and the id of its end."""
    if end is None:
        end = Tokenizer.load(path).end
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except OSError:
        raise
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(
            f"tokenizer_json must be a file of the tokenizers library, got {str(path)!r}: {error}"
        ) from None
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= model.config.vocab_size:
        raise ValueError(
            f"tokenizer_json must have ids below the model's vocab_size, {model.config.vocab_size}, got {largest} "
            f"in {str(path)!r}"
        )
    name = backend.id_to_token(end) if end >= 0 else None
    if name is None:
        raise ValueError(f"end_token_id must be a token of {str(path)!r}, got {end}")
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None  # which may add tokens that training did not
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=name,
        model_max_length=model.config.context,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # the end's name in a text is text
    )
    return tokenizer, end
