"""Mixtures of experts of transformers: routed by type, and trained alike by the optimizer and as curved modules."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import symexplin as sel  # noqa: E402

SIZES = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "max_position_embeddings": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}
DEEPSEEK = {
    **{"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4},
}
MODELS = {
    "Mixtral": ({"num_local_experts": 4}, "model.layers.0.mlp.experts"),
    "Qwen3Moe": ({"num_experts": 4, "decoder_sparse_step": 1}, "model.layers.0.mlp.experts"),
    "DeepseekV3": (DEEPSEEK, "model.layers.1.mlp.experts"),
    "GptOss": ({"num_local_experts": 4, "head_dim": 8}, "model.layers.0.mlp.experts"),
}
STEPS = 12


def build(name):
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name][0])
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # the grouped product has no float64
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    with torch.no_grad():  # some types leave biases, and DeepSeek its correction of the router, unset or 0
        for parameter in model.parameters():
            if parameter.dim() < 3 and not bool(parameter.any()):
                parameter.normal_(std=0.02)
    return model


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


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Mixtral", sel.SELConfig()),
        ("Qwen3Moe", sel.preset("paper")),
        ("DeepseekV3", sel.preset("structured_linear")),
        (
            "GptOss",
            sel.preset(
                "paper",
                **{role: {"pattern": p} for role, p in zip("elm", ("row", "column", "elementwise"), strict=True)},
            ),
        ),
        ("GptOss", sel.preset("paper+offset")),
    ],
)
def test_both_homes_train_alike(name, config):
    axes = {route.name: route.axes for route in sel.routing(build(name))}
    bias, weight = "eo", "eio" if name == "GptOss" else "eoi"
    assert all(a == (bias if "bias" in n else weight) for n, a in axes.items() if n.startswith(MODELS[name][1]))
    routers = [a for n, a in axes.items() if ".gate.weight" in n or ".router." in n]
    assert set(routers) == {""}
    ours, theirs = (train(build(name), config, home) for home in ("optimizer", "module"))
    assert ours.keys() == theirs.keys()
    fresh = build(name).state_dict()
    for key, value in ours.items():
        assert float((value - theirs[key]).norm() / theirs[key].norm().clamp(min=1e-30)) < 1e-9, key
        if key.startswith(MODELS[name][1]):
            assert not torch.equal(value, fresh[key]), key
