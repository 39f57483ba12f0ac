"""Queries and keys that start small: what is scaled is what a model computes its attention from, in every layout."""

import copy
import warnings

import pytest
import torch
from torch import nn

import symexplin as sel

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
MPT = {"vocab_size": 32, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 16}
VIT = {**{k: v for k, v in TEXT.items() if k != "vocab_size"}, "image_size": 8, "patch_size": 4}
SEPARATE = {
    "LlamaForCausalLM": (GROUPED, "q_proj k_proj"),
    "Qwen3ForCausalLM": ({**GROUPED, "head_dim": 8}, "q_proj k_proj"),
    "BertForMaskedLM": (TEXT, "query key"),
    "DistilBertForMaskedLM": (
        {"vocab_size": 32, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4},
        "q_lin k_lin",
    ),
    "T5ForConditionalGeneration": ({"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2}, "q k"),
    "ViTForImageClassification": (VIT, "q_proj k_proj"),
}
FUSED = {
    "GPT2LMHeadModel": GPT2,
    "GPTNeoXForCausalLM": TEXT,
    "PersimmonForCausalLM": {**TEXT, "pad_token_id": 0},
    "BloomForCausalLM": {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "Phi3ForCausalLM": GROUPED,
    "MptForCausalLM": MPT,
    "ModernBertForMaskedLM": {**TEXT, "pad_token_id": 0},
}


class Block(nn.Module):
    """nanoGPT's names."""

    def __init__(self, name="c_attn", bias=True):
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(8, 24, bias), "c_proj": nn.Linear(8, 8)})


def build(name, settings, device="cpu"):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    with torch.device(device):
        model = kind._from_config(kind.config_class(**settings), attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() == 2 and device != "meta":
            nn.init.normal_(parameter, std=0.5)
    return model


def changed(model, before):
    """Return the names of the parameters that are not as `before`, with how much smaller they are."""
    old = dict(before.named_parameters())
    return {n: float((p / old[n]).detach().mean()) for n, p in model.named_parameters() if not torch.equal(p, old[n])}


@pytest.mark.parametrize("name", SEPARATE)
def test_separate_projections_are_scaled_and_slowed_and_biases_are_faster(name):
    settings, both = SEPARATE[name]
    model = build(name, settings)
    before = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        rates = sel.scale_qk_(model, lr=0.5)
    assert [str(each.message)[:10] for each in caught] == ["no QK-norm"] * (name != "Qwen3ForCausalLM")
    weights = {n for n, _ in model.named_parameters() if n.split(".")[-2] in both.split() and n.endswith("weight")}
    assert changed(model, before) == pytest.approx(dict.fromkeys(weights, 0.05))
    linear = {f"{n}.bias" for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.bias is not None}
    plain = {route.name for route in sel.routing(model) if not route.curved}  # the head's among them
    wanted = {n: 0.025 if n in weights else 2.5 if n in linear - plain else 0.5 for n, _ in model.named_parameters()}
    if name == "ViTForImageClassification":
        wanted["vit.embeddings.patch_embeddings.projection.bias"] = 2.5  # a convolution
    for optimizer in (
        sel.SELAdamW(model, lr=rates),
        torch.optim.AdamW(sel.param_groups(model, lr=rates, weight_decay=0.01, curved=False)),
    ):
        found = {n: group["lr"] for group in optimizer.param_groups for n in group["param_names"]}
        assert found == pytest.approx(wanted)


@pytest.mark.parametrize("name", FUSED)
def test_of_fused_projections_the_rows_of_queries_and_keys_are_scaled(name):
    """Without them attention does not depend on the tokens; a sequence of one shows that the values are as before."""
    model = build(name, FUSED[name])
    alone, tokens = torch.tensor([[5]]), torch.tensor([[1, 2, 3, 4], [8, 9, 5, 6]])
    with torch.no_grad():
        before = model(alone).logits
        assert all(float((a[0] - a[1]).abs().max()) > 0.2 for a in model(tokens, output_attentions=True).attentions)
        assert sel.scale_qk_(model, 1e-6) == {}
        torch.testing.assert_close(model(alone).logits, before)
        for attention in model(tokens, output_attentions=True).attentions:
            torch.testing.assert_close(attention[0], attention[1], atol=1e-4, rtol=0.0)


def test_fused_projections_of_torch_and_of_nanogpt():
    model = nn.ModuleDict(
        {"torch": nn.MultiheadAttention(8, 2), "apart": nn.MultiheadAttention(8, 2, kdim=4), "own": Block()}
    )
    nn.init.ones_(model["own"].attn["c_attn"].weight)
    before = copy.deepcopy(model)
    sel.scale_qk_(model, 0.5)
    names = ("torch.in_proj_weight", "apart.q_proj_weight", "apart.k_proj_weight", "own.attn.c_attn.weight")
    assert set(changed(model, before)) == set(names)
    for name in (names[0], names[3]):
        now, old = model.get_parameter(name), before.get_parameter(name)
        torch.testing.assert_close(now, torch.cat([0.5 * old[:16], old[16:]]))


@pytest.mark.parametrize(("norms", "warned"), [(["norm"], 1), (["pre_norm"], 1), (["q_norm", "k_norm"], 0)])
def test_a_norm_of_the_input_is_no_qk_norm(norms, warned):
    names = {name: nn.LayerNorm(8) for name in norms} | {name: nn.Linear(8, 8) for name in ("to_q", "to_k", "to_v")}
    with warnings.catch_warnings(record=True) as caught:
        sel.scale_qk_(nn.ModuleDict({"attention": nn.ModuleDict(names)}), lr=0.5)
    assert len(caught) == warned


def falcon():
    return build(
        "FalconForCausalLM", {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    )


REFUSED = [
    (lambda: sel.scale_qk_(nn.Linear(4, 4)), "model .*found none: looked for q_proj and k_proj, .*c_attn"),
    (lambda: sel.scale_qk_(sel.convert(build("LlamaForCausalLM", GROUPED))), "found none"),
    (lambda: sel.scale_qk_(build("LlamaForCausalLM", GROUPED, "meta")), "on the device 'meta'"),
    (lambda: sel.scale_qk_(build("GPT2LMHeadModel", GPT2), lr=1.0), r"lr .*transformer\.h\.0\.attn\.c_attn\.weight"),
    (lambda: sel.scale_qk_(falcon()), r"0\.self_attention\.query_key_value\.weight .* FalconAttention"),
    (lambda: sel.scale_qk_(Block("Wqkv")), r"attn\.Wqkv\.weight .* ModuleDict"),
    (lambda: sel.scale_qk_(build("LlamaForCausalLM", GROUPED), 0.0), "factor .*0.0"),
    (lambda: sel.param_groups(nn.Linear(4, 4), config=sel.SELConfig(), curved=False), "curved .*config, got False"),
    (lambda: sel.param_groups(sel.convert(nn.Linear(4, 4)), curved=False), "curved .*converted.*, got False"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_refusal_changes_nothing():
    model = nn.ModuleDict({"first": Block(), "second": Block("Wqkv")})
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="Wqkv"):
        sel.scale_qk_(model)
    assert changed(model, before) == {}
