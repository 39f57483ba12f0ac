"""Architectures of transformers: the routing is right, they train, and they save and load as usual."""

import fnmatch
import re

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import symexplin as sel  # noqa: E402

TEXT = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = {**TEXT, "num_key_value_heads": 1, "max_position_embeddings": 16}
QWEN = {**GROUPED, "head_dim": 8, "tie_word_embeddings": True}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0}
VIT = {**{k: v for k, v in TEXT.items() if k != "vocab_size"}, "image_size": 8, "patch_size": 4, "num_labels": 3}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "num_labels": 3}
EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}

# What is curved, written down from each architecture's own description, and how many parameters that is.
ATTENTION, BOTH = r"self_attn\.[qkvo]_proj", r"\.(weight|bias)"
LLAMA = rf"model\.layers\.\d\.({ATTENTION}|mlp\.(gate|up|down)_proj)\.weight"
MOE = rf"model\.layers\.\d\.({ATTENTION}\.weight|mlp\.experts\.(gate_up|down)_proj)"
BLOCK = r"attention\.self\.(query|key|value)|attention\.output\.dense|intermediate\.dense|output\.dense"
BERT = rf"bert\.encoder\.layer\.\d\.({BLOCK}){BOTH}"
PATCHES = r"embeddings\.patch_embeddings\.projection"
CASES = {
    "LlamaForCausalLM": (GROUPED, LLAMA, 14),
    "Qwen3ForCausalLM": (QWEN, LLAMA, 14),
    "GPT2LMHeadModel": (GPT2, rf"transformer\.h\.\d\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj){BOTH}", 16),
    "BertForMaskedLM": (TEXT, rf"{BERT}|cls\.predictions\.transform\.dense{BOTH}", 26),
    "BertForSequenceClassification": ({**TEXT, "num_labels": 3}, rf"{BERT}|bert\.pooler\.dense{BOTH}", 26),
    "ViTForImageClassification": (VIT, rf"vit\.({PATCHES}|layers\.\d\.(attention\.[qkvo]_proj|mlp\.fc[12])){BOTH}", 26),
    "ResNetForImageClassification": (RESNET, r"resnet\..*convolution\.weight", 6),
    "ConvNextForImageClassification": (
        CONVNEXT,
        rf"convnext\..*(patch_embeddings|downsampling_layer\.1|dwconv|pwconv[12]){BOTH}",
        16,
    ),
    "MixtralForCausalLM": (EXPERTS, MOE, 12),
    "GptOssForCausalLM": (
        {**EXPERTS, "head_dim": 8},
        rf"model\.layers\.\d\.({ATTENTION}{BOTH}|mlp\.experts\.(gate_up|down)_proj(_bias)?)",
        24,
    ),
}
PLAIN = {
    r"(embed_tokens|wte|wpe|embeddings)\.weight$": "embedding",
    "lm_head|classifier|cls.predictions.bias": "output head",
    r"mlp\.(gate|router)\.": "router of a mixture of experts",
    "normalization": "BatchNorm2d",
    "downsampling_layer.0|[nN]orm|ln_": "Norm",
    "layer_scale": "ConvNextLayer",
    "_token$|position_embeddings$": "ViTEmbeddings",
    r"sinks$": "GptOssAttention",
}


def build(architecture, settings, device="cpu"):
    torch.manual_seed(0)
    kind = getattr(transformers, architecture)
    with torch.device(device):
        return kind(kind.config_class(**settings)).eval()


@pytest.mark.parametrize("name", CASES)
def test_the_routing_is_right_and_says_why(name):
    settings, pattern, count = CASES[name]
    model = build(name, settings)
    table = sel.routing(model, sel.preset("paper"))
    assert {r.name for r in table.curved} == {n for n, _ in model.named_parameters() if re.fullmatch(pattern, n)}
    assert len(table.curved) == count
    for route in table:
        if not route.curved:
            assert any(re.search(key, route.name) and route.reason.endswith(why) for key, why in PLAIN.items()), route
    lines = str(table).splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == [n for n, _ in model.named_parameters()]
    assert lines[-2].startswith(f"curved: {count} of {len(table)} tensors")


# A type of layer each.
TRAINED = ["GPT2LMHeadModel", "BertForSequenceClassification", "ViTForImageClassification"]
TRAINED += ["ConvNextForImageClassification", "GptOssForCausalLM"]


@pytest.mark.parametrize("name", TRAINED)
def test_twenty_steps_train_and_the_saved_model_is_stock(name, tmp_path):
    model = build(name, CASES[name][0])
    generator = torch.Generator().manual_seed(1)
    if "Image" in name:
        side = VIT["image_size"] if "ViT" in name else 16
        data = {"pixel_values": torch.randn(6, 3, side, side, generator=generator), "labels": torch.arange(6) % 3}
    else:
        ids = (torch.randint(0, 32, (6, 1), generator=generator) + torch.arange(12)) % 32
        data = {"input_ids": ids, "labels": torch.arange(6) % 3 if "Classification" in name else ids}
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
    unmoved = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert unmoved <= {"bert.embeddings.token_type_embeddings.weight"}  # its second row alone has no gradient

    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(again.eval()(**data).logits, model(**data).logits)


BART = {
    **{"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 2},
    **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 40},
}
FSMT = {**BART, "src_vocab_size": 36, "tgt_vocab_size": 40, "langs": ["en", "de"], "tie_word_embeddings": False}
WIDE = {**GROUPED, "vocab_size": 24}  # the feed-forward layers are as wide as the vocabulary
JET = {**GROUPED, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
PERCEIVER = {"num_self_attends_per_block": 1, "num_cross_attention_heads": 1}
ONE = {"num_hidden_layers": 1}
# Heads beside or instead of the one over the vocabulary, and routers, as each architecture's code has them. A tied
# weight counts as its embedding's.
HEADS = {
    "FSMTForConditionalGeneration": (FSMT, "model.decoder.output_projection", ""),
    "XLMForSequenceClassification": ({"emb_dim": 16, "n_layers": 1, "n_heads": 2}, "sequence_summary.summary", ""),
    "ElectraForPreTraining": ({**TEXT, "embedding_size": 16}, "discriminator_predictions.dense_prediction", ""),
    "DeiTForImageClassificationWithTeacher": (VIT, "cls_classifier distillation_classifier", ""),
    "JetMoeForCausalLM": (JET, "", "model.layers.?.mlp.router.layer model.layers.?.self_attention.experts.*"),
    "LlamaForCausalLM": (WIDE, "lm_head", ""),
    "MobileBertForPreTraining": (ONE, "cls.predictions cls.predictions.dense cls.seq_relationship", ""),
    "RemBertForMaskedLM": (ONE, "cls.predictions.decoder", ""),  # its "dense" is a transform
    "DistilBertForSequenceClassification": ({"n_layers": 1}, "classifier", ""),  # "pre_classifier" is curved
    "PerceiverForSequenceClassification": (PERCEIVER, "perceiver.decoder.decoder.final_layer", ""),
    "XLNetForSequenceClassification": ({"n_layer": 1}, "logits_proj", ""),
    "ViTMAEForPreTraining": ({**ONE, "decoder_num_hidden_layers": 1}, "decoder.decoder_pred", ""),
    "Gemma3nForCausalLM": ({**ONE, "num_kv_shared_layers": 0}, "", "model.layers.0.altup.modality_router"),
    # detectors: heads over the layers of the decoder and over the encoder's proposals, one list or one layer
    "LwDetrForObjectDetection": (
        {},
        "class_embed bbox_embed.layers.2 model.enc_out_class_embed.* model.enc_out_bbox_embed.*.layers.2",
        "",
    ),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_every_head_and_router_is_found_and_nothing_else(name):
    settings, *patterns = HEADS[name]
    model = build(name, settings, "meta")
    owners = {n.rpartition(".")[0] for n, p in model.named_parameters() if p.numel()}
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    modules = {n: m for n, m in model.named_modules() if n in owners and "weight" in m._parameters}
    left = {n for n, m in modules.items() if isinstance(m, kinds) or type(m).__name__.endswith("ParallelExperts")}
    routes = [(route, route.name.rpartition(".")[0]) for route in sel.routing(model)]
    for reason, wanted in zip(("output head", "router of a mixture of experts"), patterns, strict=True):
        plain = {layer for route, layer in routes if route.reason == reason}
        matched = {pattern: set(fnmatch.filter(plain, pattern)) for pattern in wanted.split()}
        assert all(matched.values()), matched
        assert plain == set().union(*matched.values())
        left -= plain
    assert {layer for route, layer in routes if route.curved} == left


DEEPSEEK = {
    **{**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
}
# The axes of the experts' weights. A square gate_up_proj does not tell them: another weight tells of both.
STACKS = {
    "Llama4ForCausalLM": ({**EXPERTS, "intermediate_size": 8, "head_dim": 8}, "eio"),
    "GptOssForCausalLM": ({**EXPERTS, "head_dim": 8}, "eio"),
    "Qwen3MoeForCausalLM": ({**EXPERTS, "decoder_sparse_step": 1}, "eoi"),
    "DeepseekV3ForCausalLM": (DEEPSEEK, "eoi"),
}


@pytest.mark.parametrize("name", STACKS)
def test_the_axes_of_experts(name):
    """test_modules and test_batches train such stacks."""
    settings, axes = STACKS[name]
    routes = list(sel.routing(build(name, settings, "meta")))
    stacks = [r for r in routes if ".experts." in r.name and r.parameter.dim() == 3]
    assert {r.axes for r in stacks} == {axes}
    biases = [r.axes for r in routes if ".experts." in r.name and "bias" in r.name]
    assert biases == ["eo"] * len(biases)
    assert {r.axes for r in routes if ".gate.weight" in r.name or ".router." in r.name} == {""}
