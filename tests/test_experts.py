"""Mixtures of experts of transformers: routed by type, and trained alike by the optimizer and as curved modules."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import symexplin as sel  # noqa: E402
from test_parity import CONFIGS  # noqa: E402

SIZES = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "max_position_embeddings": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}
DEEPSEEK = {
    **SIZES,
    **{"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4},
}
MODELS = {
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4}, "model.layers.0.mlp.experts"),
    "qwen": ("Qwen3Moe", {**SIZES, "num_experts": 4, "decoder_sparse_step": 1}, "model.layers.0.mlp.experts"),
    "deepseek": ("DeepseekV3", DEEPSEEK, "model.layers.1.mlp.experts"),
    "gpt-oss": ("GptOss", {**SIZES, "num_local_experts": 4, "head_dim": 8}, "model.layers.0.mlp.experts"),
}
STEPS = 100


def build(name):
    kind, sizes, _ = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # the grouped product has no float64
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    with torch.no_grad():  # some types leave biases, and DeepSeek its correction of the router, unset or 0
        for parameter in model.parameters():
            if parameter.dim() < 3 and not bool(parameter.any()):
                parameter.normal_(std=0.02)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_curved_and_routers_plain(name):
    model, path = build(name), MODELS[name][2]
    routes = {route.name: route for route in sel.routing(model)}
    experts = {n: route for n, route in routes.items() if n.startswith(path)}
    assert {route.curved for route in experts.values()} == {True}
    inputs_first = name == "gpt-oss"
    for n, route in experts.items():
        assert route.axes == ("eo" if n.endswith("bias") else "eio" if inputs_first else "eoi"), n
    routers = [route for n, route in routes.items() if ".gate.weight" in n or ".router." in n]
    assert routers
    assert {route.curved for route in routers} == {False}


def train(model, config, home):
    settings = {"lr": 3e-4, "weight_decay": 0.1}
    if home == "module":
        sel.convert(model, config)
        optimizer = torch.optim.AdamW(sel.param_groups(model, **settings))
        sel.anneal_scales(optimizer, STEPS)
    else:
        optimizer = sel.SELAdamW(model, config=config, total_steps=STEPS, max_grad_norm=0.25, **settings)
    for step in range(STEPS):
        tokens = torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        if home == "module":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    return sel.fold(model).state_dict()


PATTERNED = [name for name in CONFIGS if name in ("paper", "structured_linear") or name.startswith("paper, (")]


@pytest.mark.parametrize(
    ("name", "config"), [(tuple(MODELS)[i % len(MODELS)], config) for i, config in enumerate(PATTERNED)]
)
def test_both_homes_train_alike(name, config):
    curve = sel.SELConfig.from_dict(CONFIGS[config].to_dict() | {"start": "matched"})
    ours, theirs = (train(build(name), curve, home) for home in ("optimizer", "module"))
    assert ours.keys() == theirs.keys()
    fresh = build(name).state_dict()
    for key, value in ours.items():
        gap = (value - theirs[key]).norm() / theirs[key].norm().clamp(min=1e-30)
        assert float(gap) < 1e-9, key
    moved = {key for key, value in ours.items() if not torch.equal(value, fresh[key])}
    assert {key for key in fresh if key.startswith(MODELS[name][2])} <= moved
