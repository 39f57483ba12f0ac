"""Architectures of transformers: routed by a rule, trained for twenty steps, saved and loaded as any other."""

import fnmatch
import re

import pytest
import torch

transformers = pytest.importorskip("transformers")

import symexplin as sel  # noqa: E402

TEXT = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = {**TEXT, "num_key_value_heads": 1, "max_position_embeddings": 16}
GPT2 = {
    "vocab_size": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
VIT = {**{k: v for k, v in TEXT.items() if k != "vocab_size"}, "image_size": 8, "patch_size": 4, "num_labels": 3}

# What is curved, written down from each architecture's own description: names of weights, and whether with biases.
ATTENTION, GATED = r"self_attn\.[qkvo]_proj", r"mlp\.(gate|up|down)_proj"
BERT = (
    r"bert\.encoder\.layer\.\d\.(attention\.self\.(query|key|value)|attention\.output\.dense"
    r"|intermediate\.dense|output\.dense)\.(weight|bias)"
)
CASES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, rf"model\.layers\.\d\.({ATTENTION}|{GATED})\.weight", 14),
    "qwen3": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**GROUPED, "head_dim": 8, "tie_word_embeddings": True},
        rf"model\.layers\.\d\.({ATTENTION}|{GATED})\.weight",
        14,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        GPT2,
        r"transformer\.h\.\d\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.(weight|bias)",
        16,
    ),
    "bert": ("BertForMaskedLM", "BertConfig", TEXT, rf"{BERT}|cls\.predictions\.transform\.dense\.(weight|bias)", 26),
    "bert-classes": (
        "BertForSequenceClassification",
        "BertConfig",
        {**TEXT, "num_labels": 3},
        rf"{BERT}|bert\.pooler\.dense\.(weight|bias)",
        26,
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        VIT,
        r"vit\.(embeddings\.patch_embeddings\.projection|layers\.\d\.(attention\.[qkvo]_proj|mlp\.fc[12]))\.(weight|bias)",
        26,
    ),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3},
        r"resnet\..*convolution\.weight",
        6,
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "num_labels": 3},
        r"convnext\..*(patch_embeddings|downsampling_layer\.1|dwconv|pwconv[12])\.(weight|bias)",
        16,
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 4},
        rf"model\.layers\.\d\.({ATTENTION}\.weight|mlp\.experts\.(gate_up|down)_proj)",
        12,
    ),
}
PLAIN = {
    r"(embed_tokens|wte|wpe|embeddings)\.weight$": "embedding",
    "lm_head|classifier|cls.predictions.bias": "output head",
    r"mlp\.gate\.weight": "router of a mixture of experts",
    "normalization": "BatchNorm2d",
    "downsampling_layer.0": "Norm",
    "layer_scale": "ConvNextLayer",
    "_token$|position_embeddings$": "ViTEmbeddings",
    "[nN]orm|ln_": "Norm",
}


def build(name):
    architecture, config, settings, _, _ = CASES[name]
    torch.manual_seed(0)
    return getattr(transformers, architecture)(getattr(transformers, config)(**settings)).eval()


def batch(name):
    generator = torch.Generator().manual_seed(1)
    if name in ("vit", "resnet", "convnext"):
        side = 8 if name == "vit" else 16
        return {"pixel_values": torch.randn(6, 3, side, side, generator=generator), "labels": torch.arange(6) % 3}
    ids = (torch.randint(0, 32, (6, 1), generator=generator) + torch.arange(12)) % 32
    return {"input_ids": ids, "labels": torch.arange(6) % 3 if name == "bert-classes" else ids}


@pytest.mark.parametrize("name", CASES)
def test_the_routing_is_right_and_says_why(name):
    *_, pattern, count = CASES[name]
    model = build(name)
    table = sel.routing(model, sel.preset("paper"))
    curved = {route.name for route in table.curved}
    assert curved == {n for n, _ in model.named_parameters() if re.fullmatch(pattern, n)}
    assert len(curved) == count
    for route in table:
        if not route.curved:
            assert any(re.search(key, route.name) and route.reason.endswith(why) for key, why in PLAIN.items()), route
    lines = str(table).splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == [n for n, _ in model.named_parameters()]
    assert lines[-2].startswith(f"curved: {count} of {len(table)} tensors")


T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "num_labels": 3}
BART = {
    **{"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_labels": 3},
    **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("ffn_dim", 24), ("attention_heads", 2))},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
}
FSMT = {
    **{k: v for k, v in BART.items() if k not in ("vocab_size", "num_labels")},
    **{"src_vocab_size": 36, "tgt_vocab_size": 40, "langs": ["en", "de"], "tie_word_embeddings": False},
}
WIDE = {**GROUPED, "vocab_size": 24}  # the feed-forward layers are as wide as the vocabulary
# Heads beside or instead of the one over the vocabulary, and routers, as each architecture's code has them.
HEADS = {
    "T5ForSequenceClassification": (T5, ["classification_head.out_proj"], []),
    "BartForSequenceClassification": (BART, ["classification_head.out_proj"], []),
    "FSMTForConditionalGeneration": (FSMT, ["model.decoder.output_projection"], []),
    "BertForPreTraining": (TEXT, ["cls.predictions", "cls.predictions.decoder", "cls.seq_relationship"], []),
    "XLMForSequenceClassification": (
        {"vocab_size": 40, "emb_dim": 16, "n_layers": 1, "n_heads": 2, "num_labels": 3},
        ["sequence_summary.summary"],
        [],
    ),
    "ElectraForPreTraining": ({**TEXT, "embedding_size": 16}, ["discriminator_predictions.dense_prediction"], []),
    "DeiTForImageClassificationWithTeacher": (VIT, ["cls_classifier", "distillation_classifier"], []),
    "JetMoeForCausalLM": (
        {**GROUPED, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        ["lm_head"],
        [f"model.layers.{i}.{part}.router.layer" for i in (0, 1) for part in ("mlp", "self_attention.experts")],
    ),
    "LlamaForCausalLM": (WIDE, ["lm_head"], []),
    "BertForMaskedLM": (WIDE, ["cls.predictions", "cls.predictions.decoder"], []),
    "MobileBertForMaskedLM": (
        {"num_hidden_layers": 1},
        ["cls.predictions", "cls.predictions.decoder", "cls.predictions.dense"],
        [],
    ),
    "RemBertForMaskedLM": ({"num_hidden_layers": 1}, ["cls.predictions.decoder"], []),  # its "dense" is a transform
    "LxmertForQuestionAnswering": (
        {"l_layers": 1, "x_layers": 1, "r_layers": 1},
        ["answer_head.logit_fc.3"],
        [],
    ),
    "PerceiverForSequenceClassification": (
        {"num_self_attends_per_block": 1, "num_cross_attention_heads": 1},
        ["perceiver.decoder.decoder.final_layer"],
        [],
    ),
    "XLNetForSequenceClassification": ({"n_layer": 1}, ["logits_proj"], []),
    "ElectraForMultipleChoice": ({"num_hidden_layers": 1}, ["classifier"], []),
    "Gemma3nForCausalLM": (
        {"num_hidden_layers": 1, "num_kv_shared_layers": 0},
        ["lm_head"],
        ["model.layers.0.altup.modality_router"],
    ),
}


@pytest.mark.parametrize("architecture", HEADS)
def test_every_head_and_router_is_found_and_nothing_else(architecture):
    settings, heads, routers = HEADS[architecture]
    kind = getattr(transformers, architecture)
    with torch.device("meta"):
        model = kind(kind.config_class(**settings))
    reasons = {"output head": set(), "router of a mixture of experts": set()}
    kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d)
    linears = {name for name, module in model.named_modules() if isinstance(module, kinds)}
    linears |= {name for name, module in model.named_modules() if type(module).__name__.endswith("ParallelExperts")}
    curved = set()
    for route in sel.routing(model):
        layer = route.name.rpartition(".")[0]
        reasons.get(route.reason, set()).add(layer)
        curved |= {layer} if route.curved else set()
    assert reasons["output head"] <= set(heads)
    assert reasons["router of a mixture of experts"] == set(routers)
    assert curved == linears - set(heads) - set(routers)


# Heads of detectors over the layers of the decoder and over the encoder's proposals: one list, or one layer.
BOXES, CLASSES = "bbox_embed.?.layers.2", "class_embed.?"
DETECTORS = {
    "LwDetrForObjectDetection": {
        *("class_embed", "bbox_embed.layers.2"),
        *("model.enc_out_class_embed.*", "model.enc_out_bbox_embed.*.layers.2"),
    },
    "RTDetrV2ForObjectDetection": {
        *(f"model.decoder.{CLASSES}", f"model.decoder.{BOXES}"),
        *("model.enc_score_head", "model.enc_bbox_head.layers.2"),
    },
    "GroundingDinoForObjectDetection": {"model.encoder_output_bbox_embed.layers.2", f"model.decoder.{BOXES}"},
    "OwlViTForObjectDetection": {"class_head.*", "box_head.dense2"},
}


@pytest.mark.parametrize("architecture", DETECTORS)
def test_the_heads_of_detectors(architecture):
    kind = getattr(transformers, architecture)
    with torch.device("meta"):
        model = kind(kind.config_class())
    routes = [route for route in sel.routing(model) if route.name.endswith("weight")]
    heads = {route.name.removesuffix(".weight") for route in routes if route.reason == "output head"}
    found = {name: {p for p in DETECTORS[architecture] if fnmatch.fnmatchcase(name, p)} for name in heads}
    assert all(found.values()), found
    assert set().union(*found.values()) == DETECTORS[architecture]


@pytest.mark.parametrize(("kind", "mixer"), [("Mamba", "mixer"), ("Jamba", "mamba")])
def test_the_step_biases_of_state_space_models_are_plain(kind, mixer):
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(num_hidden_layers=2))
    found = {route.name: route for route in sel.routing(model) if ".dt_proj." in route.name}
    assert {name for name in found if f".{mixer}.dt_proj.bias" in name}
    assert {name for name, route in found.items() if not route.curved} == {n for n in found if n.endswith("bias")}


def test_conv1d_counts_its_outputs_along_the_second_dimension():
    routes = {route.name: route for route in sel.routing(build("gpt2"))}
    assert routes["transformer.h.0.attn.c_attn.weight"].axes == "io"


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_train_and_the_saved_model_is_stock(name, tmp_path):
    model, data = build(name), batch(name)
    groups = sel.param_groups(model, lr=3e-3, config=sel.preset("paper", start="matched"))
    optimizer = sel.SELAdamW(groups, total_steps=20, max_grad_norm=1.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = []
    for _ in range(20):
        loss = model(**data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert {n for n, p in model.named_parameters() if torch.equal(p, before[n])} <= {
        "bert.embeddings.token_type_embeddings.weight"  # its second row alone has no gradient
    }

    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(again.eval()(**data).logits, model(**data).logits)
