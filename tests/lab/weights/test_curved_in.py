"""The rules by name find what `symexplin.routing` finds in the modules."""

import pytest
from torch import nn

import symexplin as sel
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.weights.files import TensorSpec
from symexplin.lab.weights.folding import curved_in


def routed(shapes, dtype="F32", **patterns):
    """The decisions for a file with tensors of these shapes."""
    specs = {name: TensorSpec(tuple(shape), dtype) for name, shape in shapes.items()}
    return curved_in("file", specs, {}, sel.SELConfig(**patterns))


def lab(**changes):
    return Transformer(ModelConfig(width=16, depth=2, heads=2, vocab_size=16, context=8, **changes))


def hub(kind, head="ForCausalLM", **settings):
    """A model of transformers with random weights, built from its configuration alone."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**settings)
    return getattr(transformers, kind + head)(config)


LLAMA = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
GPT2 = {
    "vocab_size": 32,
    "n_positions": 8,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MODELS = {
    "lab": lab,
    "lab, tied, no bias": lambda: lab(tie_head=True, bias=False),
    "Llama, tied, biases": lambda: hub("Llama", **LLAMA, tie_word_embeddings=True, attention_bias=True),
    "GPT-2": lambda: hub("GPT2", "LMHeadModel", **GPT2),
    "GPT-NeoX": lambda: hub("GPTNeoX", **{k: v for k, v in LLAMA.items() if "key_value" not in k}),
    "OPT": lambda: hub("OPT", vocab_size=32, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2),
    "BERT": lambda: hub("Bert", "ForMaskedLM", **LLAMA, max_position_embeddings=8),
    "T5": lambda: hub("T5", "ForConditionalGeneration", vocab_size=32, d_model=16, d_ff=24, num_layers=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_names_agree_with_modules(name):
    model = MODELS[name]()
    found = routed({name: p.shape for name, p in model.named_parameters()})
    assert [(r.name, r.curved, r.axes) for r in found] == [(r.name, r.curved, r.axes) for r in sel.routing(model)]
    assert (found.config, found.width) == (sel.routing(model).config, sel.routing(model).width)


def test_routers_and_step_biases_are_those_of_the_modules():
    experts = nn.ModuleDict({"gate": nn.Linear(4, 2), "experts": nn.ModuleList([nn.Linear(4, 8)])})
    mixer = nn.ModuleDict({"gate": nn.Linear(8, 4), "dt_proj": nn.Linear(2, 8)})
    ffn = nn.ModuleDict({"gate": nn.Linear(8, 4), "up": nn.Linear(8, 4)})
    model = nn.ModuleDict({"mlp": experts, "ffn": ffn, "mixer": mixer})
    plain = [
        route.name for route in routed({name: p.shape for name, p in model.named_parameters()}) if not route.curved
    ]
    assert plain == ["mlp.gate.weight", "mlp.gate.bias", "mixer.gate.weight", "mixer.gate.bias", "mixer.dt_proj.bias"]
    assert plain == [route.name for route in sel.routing(model) if not route.curved]


def test_gpt2s_names_on_ordinary_layers():
    """nanoGPT and others have c_attn as nn.Linear: stored (outputs, inputs)."""
    ordinary = {"h.0.c_attn.weight": (12, 4), "h.0.c_proj.weight": (4, 4), "h.0.c_fc.weight": (16, 4)}
    assert [route.axes for route in routed(ordinary)] == ["oi"] * 3
    assert [route.axes for route in routed({name: shape[::-1] for name, shape in ordinary.items()})] == ["io"] * 3


def test_patterns():
    shapes = {"a.weight": (4, 4), "a.bias": (4,), "b.weight": (4, 4), "head.weight": (9, 4)}
    found = routed(shapes, include=("head.*",), exclude=("b.*", "*.bias"))
    assert [route.name for route in found.curved] == ["a.weight", "head.weight"]


def test_a_pattern_that_matches_nothing():
    with pytest.raises(ValueError, match=r"include pattern 'nrom.\*' matches no parameter"):
        routed({"a.weight": (4, 4)}, include=("nrom.*",))


def test_shapes_and_dtypes_that_are_never_curved():
    specs = {
        "conv.weight": TensorSpec((4, 4, 3), "F32"),
        "codes.weight": TensorSpec((4, 4), "I8"),
        "half.weight": TensorSpec((4, 4), "BF16"),
        "half.lora.weight": TensorSpec((4, 2), "F32"),
        "empty.weight": TensorSpec((0, 4), "F32"),
        "weight": TensorSpec((2, 2), "F32"),
        "bias": TensorSpec((2,), "F32"),
        "scale": TensorSpec((), "F32"),
    }
    found = curved_in("file", specs, {}, sel.SELConfig())
    assert {route.name for route in found.curved} == {"half.weight", "half.lora.weight", "weight", "bias"}
