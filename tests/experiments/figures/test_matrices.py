import pytest
import torch
from safetensors.torch import save_file

import symexplin as sel
from symexplin.experiments.figures.matrices import curved_matrices
from symexplin.lab.model import ModelConfig, Transformer


def hub(kind, **settings):
    """A model of transformers with random weights, built from its configuration alone."""
    model = getattr(pytest.importorskip("transformers"), kind)
    return model(model.config_class(**settings))


LLAMA = {"vocab_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
MODELS = {
    "lab": lambda: Transformer(ModelConfig(width=16, depth=2, heads=2, vocab_size=16, context=8)),
    "Llama": lambda: hub("LlamaForCausalLM", **LLAMA, tie_word_embeddings=True, attention_bias=True),
    "GPT-2": lambda: hub("GPT2LMHeadModel", vocab_size=32, n_embd=8, n_layer=2, n_head=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_names_agree_with_the_routing_of_modules(tmp_path, name):
    model = MODELS[name]()
    save_file({name: parameter.detach() for name, parameter in model.named_parameters()}, tmp_path / "m")
    found, wanted = curved_matrices(tmp_path / "m"), sel.routing(model)
    assert {name for name, _ in found} == {route.name for route in wanted.curved if route.is_weight}


def test_files_without_curved_weights(tmp_path):
    eye = torch.eye(4)
    for tensor in (torch.ones(3), eye[:0], eye.to(torch.float8_e5m2), eye.to(torch.int8)):
        save_file({"up.weight": tensor}, tmp_path / "model")
        with pytest.raises(
            ValueError, match=r"model' must hold 2-D weights to curve, in one of bfloat16, float16, .* got none$"
        ):
            list(curved_matrices(tmp_path / "model"))
    save_file({"up.raw_weight": torch.eye(3)}, tmp_path / "model")
    with pytest.raises(ValueError, match="holds raw weights, not plain ones"):
        list(curved_matrices(tmp_path / "model"))
