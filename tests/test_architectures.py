"""Architectures of transformers: what stays plain in each; they train, and they save and load as usual."""

import fnmatch

import pytest
import torch

transformers = pytest.importorskip("transformers")

import symexplin as sel  # noqa: E402

TEXT = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"num_labels": 3, "pad_token_id": 0}
LLAMA = {**TEXT, "num_key_value_heads": 1, "max_position_embeddings": 16, "head_dim": 8}
MOE = {**LLAMA, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
DEEPSEEK = {
    **{**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "pad_token_id": 0}
VIT = {**TEXT, "image_size": 8, "patch_size": 4}
CLIP = {"text_config": {**TEXT, "bos_token_id": 1, "eos_token_id": 2}, "vision_config": VIT, "projection_dim": 8}
WHISPER = {
    **{"vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    **{"max_source_positions": 8, "max_target_positions": 8, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
}

# The matrices, stacks and convolutions that are plain in each, without ".weight": all others are curved. A tied head is
# its embedding.
EMBEDDING, BERT = "model.embed_tokens", "bert.embeddings.*"
PLAIN = {
    "LlamaForCausalLM": (LLAMA, EMBEDDING, "lm_head"),
    "LlamaForSequenceClassification": (LLAMA, EMBEDDING, "score"),
    "Qwen3ForCausalLM": ({**LLAMA, "tie_word_embeddings": True}, EMBEDDING),
    "Phi3ForCausalLM": (LLAMA, EMBEDDING, "lm_head"),
    "GPT2LMHeadModel": (GPT2, "transformer.wte", "transformer.wpe"),
    "MixtralForCausalLM": (MOE, EMBEDDING, "lm_head", "model.layers.?.mlp.gate"),
    "DeepseekV3ForCausalLM": (DEEPSEEK, EMBEDDING, "lm_head", "model.layers.1.mlp.gate"),
    "GptOssForCausalLM": (MOE, EMBEDDING, "lm_head", "model.layers.?.mlp.router"),
    "BertForMaskedLM": (TEXT, BERT),  # whose cls.predictions.transform is curved
    "RobertaForSequenceClassification": (TEXT, "roberta.embeddings.*", "classifier.out_proj"),
    "T5ForConditionalGeneration": (T5, "shared", "*.relative_attention_bias"),
    "ViTForImageClassification": (VIT, "vit.embeddings.*", "classifier"),
    "CLIPModel": (CLIP, "*_model.embeddings.*"),  # whose projections are curved
    "WhisperForConditionalGeneration": (WHISPER, "model.encoder.conv?", "model.*.embed_*"),
}


def build(architecture, settings, device="cpu"):
    torch.manual_seed(0)
    kind = getattr(transformers, architecture)
    with torch.device(device):
        return kind(kind.config_class(**settings)).eval()


@pytest.mark.parametrize("name", PLAIN)
def test_what_stays_plain(name):
    settings, *plain = PLAIN[name]
    routes = {route.name.removesuffix(".weight"): route for route in sel.routing(build(name, settings, "meta"))}
    large = {key for key, route in routes.items() if route.parameter.dim() > 1}
    matched = {pattern: set(fnmatch.filter(large, pattern)) for pattern in plain}
    assert all(matched.values())
    assert {key for key in large if not routes[key].curved} == set().union(*matched.values())
    for key in routes.keys() - large:  # a bias is curved if its weight is
        weight = routes.get(key.removesuffix(".bias"))
        assert routes[key].curved == (key.endswith(".bias") and weight is not None and weight.curved), key
    stacks = {key for key, route in routes.items() if ".experts." in key}
    assert stacks == {key for key, route in routes.items() if "optimizer only" in route.reason}
    assert {routes[key].axes for key in stacks} <= ({"eio", "eo"} if "GptOss" in name else {"eoi"})
    assert bool(stacks) == (settings in (MOE, DEEPSEEK))


# A type of layer each.
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "ViTForImageClassification", "GptOssForCausalLM"])
def test_twenty_steps_train_and_the_saved_model_is_stock(name, tmp_path):
    model = build(name, PLAIN[name][0])
    generator = torch.Generator().manual_seed(1)
    if "Image" in name:
        data = {"pixel_values": torch.randn(6, 3, 8, 8, generator=generator), "labels": torch.arange(6) % 3}
    else:
        ids = (torch.randint(0, 32, (6, 1), generator=generator) + torch.arange(12)) % 32
        data = {"input_ids": ids, "labels": ids}
    optimizer = sel.SELAdamW(model, lr=3e-3, config=sel.preset("paper"), total_steps=20, max_grad_norm=1.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = []
    for _ in range(20):
        loss = model(**data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert not any(torch.equal(p, before[n]) for n, p in model.named_parameters())

    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(again.eval()(**data).logits, model(**data).logits)
