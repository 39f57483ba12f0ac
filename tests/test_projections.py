"""Fused projections: the matrices in one weight, for models whose own code says how they are divided."""

import pytest
import torch
from torch import nn

import symexplin as sel
from symexplin.optim.muon import SELMuon
from symexplin.presets import IDENTITY
from vision import import_timm

HEADS, GROUPS, SIZE, WIDTH = 4, 2, 4, 16


def parts(model, ending):
    (found,) = {route.parts for route in sel.routing(model) if route.name.endswith(ending)}
    return found


@pytest.mark.parametrize(
    ("kind", "ending", "expected"),
    [
        ("Phi3", "qkv_proj.weight", (HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE)),
        ("Phi3", "gate_up_proj.weight", (24, 24)),
        ("GPT2", "c_attn.weight", (WIDTH, WIDTH, WIDTH)),
        ("GPTNeoX", "query_key_value.weight", (SIZE, SIZE, SIZE)),
        ("Mixtral", "gate_up_proj", (24, 24)),
        ("GptOss", "gate_up_proj", (1, 1)),
        ("Mixtral", "q_proj.weight", ()),
        ("Mixtral", "down_proj", ()),
    ],
)
def test_the_parts_are_those_of_the_models_own_forward(kind, ending, expected):
    transformers = pytest.importorskip("transformers")
    sizes = {
        **{"vocab_size": 32, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": SIZE},
        **{"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "num_local_experts": 2, "pad_token_id": 0},
        **{"n_embd": WIDTH, "n_head": HEADS, "n_layer": 1},
    }
    if kind == "GPT2":
        sizes = {key: value for key, value in sizes.items() if key.startswith("n_") or key == "vocab_size"}
    elif kind == "GPTNeoX":
        sizes = {key: value for key, value in sizes.items() if key not in ("head_dim", "num_key_value_heads")}
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes))
    assert parts(model, ending) == expected


# By head, unless it says otherwise. What the forward of each model does, timm 1.0.
OF_TIMM = {
    "maxvit_rmlp_pico_rw_256": (32, 32, 32),
    "tiny_vit_5m_224": (32, 32, 32),
    "efficientformer_l1": (32, 32, 128),
    "mobilevitv2_050": (1, 64, 64),  # one query
    "lambda_resnet26t": (64, 16, 64),  # all queries, one key, one value
    "vit_tiny_patch16_224": (192, 192, 192),  # all queries, all keys, all values
}


@pytest.mark.parametrize("name", OF_TIMM)
def test_the_parts_of_timms_models(name):
    timm = import_timm()
    with torch.device("meta"):
        model = timm.create_model(name)
    first = next(route for route in sel.routing(model) if ".qkv" in route.name and route.is_weight)
    assert first.parts == OF_TIMM[name]
    assert "+".join(map(str, first.parts)) in str(sel.routing(model))


def test_keys_and_values_alone():
    """GCViT's blocks with global queries."""
    block = nn.ModuleDict({"qkv": nn.Linear(8, 16)})
    assert parts(block, "qkv.weight") == (8, 8)


def test_attention_of_torch():
    assert parts(nn.MultiheadAttention(8, 2), "in_proj_weight") == (8, 8, 8)


class Fused(nn.Module):
    """A layer of 8 and one of 4 outputs in one weight, one behind the other or two rows and one in turn."""

    def __init__(self, layers, alternate):
        super().__init__()
        self.both = nn.Linear(6, 12, bias=False)
        self.order = torch.tensor([0, 1, 8, 2, 3, 9, 4, 5, 10, 6, 7, 11] if alternate else range(12))
        self.both.weight.data = self.rows(layers).clone()

    def rows(self, layers):
        return torch.cat([layer.weight.detach() for layer in layers])[self.order]

    def forward(self, x):
        return self.both(x)[:, self.order.argsort()]


def two_layers():
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(6, 8, bias=False), nn.Linear(6, 4, bias=False)])


@pytest.mark.parametrize("alternate", [False, True])
def test_muon_takes_the_parts_as_matrices_of_their_own(alternate):
    layers = two_layers()
    fused, whole = Fused(layers, alternate), Fused(layers, alternate)
    split = {"both.weight": (2, 1) if alternate else (8, 4)}
    settings = {"lr": 1e-2, "config": IDENTITY}
    optimizers = [SELMuon(layers, **settings), SELMuon(fused, **settings, split=split), SELMuon(whole, **settings)]
    for step in range(5):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        for output in (torch.cat([layer(x) for layer in layers], 1), fused(x), whole(x)):
            (output - x.sum(-1)[:, None]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    expected = fused.rows(layers)
    torch.testing.assert_close(fused.both.weight.detach(), expected, rtol=0, atol=1e-6)
    assert float((whole.both.weight.detach() - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("sizes", [(5,), (8, -8, 12), (8, 9), "ab", 2])
def test_parts_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match=r"split of both.weight must be sizes that add up to its 12 outputs"):
        SELMuon(Fused(two_layers(), False), split={"both.weight": sizes})


def test_an_empty_split_makes_one_matrix():
    """Two steps of a weight whose name says three matrices equal those of a weight whose name says nothing."""
    weights = []
    for name, split in (("qkv", {"qkv.weight": ()}), ("qkv", None), ("up", None)):
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(8, 24, bias=False)})
        optimizer = SELMuon(model, lr=1e-2, config=IDENTITY, split=split)
        for step in range(2):
            model[name].weight.grad = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        weights.append(model[name].weight.detach())
    empty, inferred, one = weights
    torch.testing.assert_close(empty, one, rtol=0, atol=0)
    assert not torch.equal(inferred, one)


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="split pattern 'x' matches no parameter"):
        SELMuon(nn.Linear(4, 4), split={"x": (2, 2)})
