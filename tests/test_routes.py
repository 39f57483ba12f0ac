"""Routing: by the type of the module, with a reason for every parameter."""

import pytest
import torch
from torch import nn

import symexplin as sel


def reasons(model, config=None):
    return {r.name: (r.curved, r.reason) for r in sel.routing(model, config)}


class Language(nn.Module):
    """Embedding, a body of linears, a head; width and vocabulary may coincide."""

    def __init__(self, vocabulary=16, width=16, tie=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        self.out = nn.Linear(width, vocabulary)
        if tie:
            self.out.weight = self.embed.weight


def test_a_head_as_wide_as_the_vocabulary_is_plain_even_when_the_body_is_as_wide():
    found = reasons(Language())
    assert found["body.0.weight"] == (True, "linear weight")
    assert found["body.0.bias"] == (True, "linear bias")
    assert found["out.weight"] == found["out.bias"] == (False, "output head")
    assert found["embed.weight"] == (False, "embedding")
    assert found["body.1.weight"] == (False, "LayerNorm")


def test_a_tied_head_is_counted_once_and_plain():
    found = reasons(Language(tie=True))
    assert found["embed.weight"] == (False, "tied to an embedding")
    assert "out.weight" not in found
    assert found["out.bias"] == (False, "output head")


def test_usual_names_of_heads_without_a_vocabulary():
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "classifier": nn.Linear(8, 3)})
    found = reasons(model)
    assert found["classifier.weight"] == (False, "output head")
    assert found["body.weight"][0]


class Classifier(nn.Module):
    """Tokens and places, a feed-forward layer as wide as the table of places, and a head of a usual name."""

    def __init__(self, places, tokens=11):
        super().__init__()
        self.embed = nn.Embedding(tokens, 16)
        self.add_module(places, nn.Embedding(32, 16))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.classifier = nn.Linear(16, 3)


def heads_of(model):
    return {name.rpartition(".")[0] for name, (_, reason) in reasons(model).items() if reason == "output head"}


@pytest.mark.parametrize("places", ["position", "wpe", "segment_embeddings", "token_type_embeddings"])
def test_a_table_of_places_is_no_vocabulary(places):
    assert heads_of(Classifier(places)) == {"classifier"}
    del (unnamed := Classifier(places)).classifier
    assert heads_of(unnamed) == set()


def test_names_come_before_width():
    assert heads_of(Classifier("position", tokens=32)) == {"classifier"}  # the layer called up is read by another


def test_a_chain_that_begins_as_wide_as_the_vocabulary_has_one_head():
    """A table of 4 entries of width 2 is read as 8 numbers, by a vocabulary of 8."""
    table = sel.routing(
        nn.Sequential(nn.Embedding(8, 2), nn.Flatten(), nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 8))
    )
    assert [r.name for r in table if r.curved and r.parameter.ndim == 2] == ["2.weight", "3.weight"]


def test_a_layer_as_wide_as_the_vocabulary_that_another_reads_is_no_head():
    classifier = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    assert not heads_of(classifier)
    del classifier[3]
    assert heads_of(classifier) == {"1"}


@pytest.mark.parametrize("vocabulary", [16, 32, 9])
def test_another_head_after_that_over_the_vocabulary(vocabulary):
    model = Language(vocabulary, width=16)
    model.score = nn.Linear(16, 2)
    assert heads_of(model) == {"out", "score"}
    assert reasons(model)["body.0.weight"][0]


def test_routers_of_experts_are_plain_but_gates_of_feed_forward_layers_are_not():
    mixture = nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": nn.ModuleList([nn.Linear(8, 8)])})
    nested = nn.ModuleDict({"router": nn.ModuleDict({"layer": nn.Linear(8, 4)}), "input_linear": nn.Linear(8, 8)})
    model = nn.ModuleDict({"mixture": mixture, "ffn": nn.ModuleDict({"gate": nn.Linear(8, 8)}), "nested": nested})
    found = reasons(model)
    assert found["nested.router.layer.weight"] == (False, "router of a mixture of experts")
    assert found["nested.input_linear.weight"][0]
    assert found["mixture.gate.weight"] == (False, "router of a mixture of experts")
    assert found["mixture.experts.0.weight"][0]
    assert found["ffn.gate.weight"][0]


@pytest.mark.parametrize("name", ["gate", "gating"])
def test_a_gate_beside_no_experts_is_a_router_if_it_has_few_outputs_and_nothing_to_multiply(name):
    def curved(outputs, **beside):
        layers = nn.ModuleDict({name: nn.Linear(8, outputs), **beside})
        return reasons(nn.ModuleDict({"ffn": layers}))[f"ffn.{name}.weight"][0]

    assert not curved(4)
    assert not curved(4, out=nn.Linear(16, 8))
    assert not curved(8, expert_list=nn.ModuleList([nn.Linear(8, 8)]))
    assert curved(8)
    assert curved(16, up=nn.Linear(8, 16))
    assert curved(4, up=nn.Linear(8, 4), down=nn.Linear(4, 8))  # a narrow gated feed-forward layer


def test_routers_by_name_need_no_experts_beside_them():
    layers = {name: nn.Linear(8, 4) for name in ("modality_router", "router_gate", "shared_expert_gate", "router")}
    assert {reason for _, reason in reasons(nn.ModuleDict(layers)).values()} == {"router of a mixture of experts"}


def test_step_biases_of_state_space_models_are_plain():
    model = nn.ModuleDict({"mixer": nn.ModuleDict({"dt_proj": nn.Linear(2, 8)}), "other": nn.Linear(2, 8)})
    found = reasons(model)
    assert found["mixer.dt_proj.bias"] == (False, "state-space step bias")
    assert found["mixer.dt_proj.weight"][0]
    assert found["other.bias"][0]
    assert reasons(model, sel.SELConfig(include=("*.dt_proj.bias",)))["mixer.dt_proj.bias"][0]


class TopRouter(nn.Module):
    """A router as a type of its own, with a layer inside."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8))
        self.layer = nn.Linear(8, 4)


class StackedExperts(nn.Module):
    """The weights of four experts in one tensor."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 8, 8))


def test_routers_and_experts_that_are_types_of_their_own():
    mixture = nn.ModuleDict({"choose": TopRouter(), "shared_expert_gate": nn.Linear(8, 1), "experts": StackedExperts()})
    found = reasons(nn.ModuleDict({"mixture": mixture, "body": nn.Linear(8, 8), "gate": nn.Linear(8, 8)}))
    router = (False, "router of a mixture of experts")
    assert {name: reason for name, reason in found.items() if "mixture" in name} == {
        "mixture.choose.weight": router,
        "mixture.choose.layer.weight": router,
        "mixture.choose.layer.bias": router,
        "mixture.shared_expert_gate.weight": router,
        "mixture.shared_expert_gate.bias": router,
        "mixture.experts.up": (True, "experts, outputs by inputs"),
    }
    assert found["body.weight"][0]
    assert found["gate.weight"][0]  # beside no experts


class OwnExperts(nn.Module):
    """Inputs of 8, feed-forward width of 6."""

    def __init__(self, **attributes):
        super().__init__()
        self.__dict__.update(attributes)
        self.w1, self.w2 = nn.Parameter(torch.zeros(4, 6, 8)), nn.Parameter(torch.zeros(4, 8, 6))


@pytest.mark.parametrize(
    ("attributes", "axes"),
    [({}, "eoi"), ({"hidden_dim": 6}, "eoi"), ({"hidden_size": 8}, "eoi"), ({"is_transposed": True}, "eio")],
)
def test_experts_of_ones_own_have_outputs_first_unless_they_say_otherwise(attributes, axes):
    model = nn.ModuleDict({"experts": OwnExperts(**attributes)})
    assert [route.axes for route in sel.routing(model)] == [axes, axes]
    assert ("outputs by inputs" if axes == "eoi" else "inputs by outputs") in str(sel.routing(model))


def test_one_weight_that_is_not_square_tells_of_all_experts_of_transformers():
    """Llama 4's gate_up_proj is square if the experts' width is half of the model's."""
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    config = llama4.Llama4TextConfig(hidden_size=16, intermediate_size=8, num_local_experts=2)
    assert {route.axes for route in sel.routing(llama4.Llama4TextExperts(config))} == {"eio"}


def test_a_layer_decides_about_its_weight_wherever_else_it_is_named():
    model = nn.Module()
    layer = nn.Linear(8, 8)
    model.alias, model.layer = layer.weight, layer
    assert reasons(model)["alias"] == (True, "linear weight")


def test_heads_may_be_convolutions():
    head = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 3, 1))
    found = reasons(nn.ModuleDict({"body": nn.Conv2d(3, 8, 3), "decode_head": nn.ModuleDict({"classifier": head})}))
    plain = {name for name, (curved, _) in found.items() if not curved}
    assert plain == {"decode_head.classifier.1.weight", "decode_head.classifier.1.bias"}
    found = reasons(nn.ModuleDict({"body": nn.Conv2d(3, 8, 3), "fc": nn.Conv2d(8, 3, 1)}))
    assert found["fc.weight"] == (False, "output head")


def test_depthwise_convolutions_do_not_count_for_the_width():
    def block():
        return nn.Sequential(nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 64, 1))

    assert sel.routing(nn.Sequential(block(), block())).width in (32, 64)
    assert sel.routing(nn.Sequential(nn.Conv2d(32, 32, 3, groups=32))).width == 32 * 9


def test_the_head_of_a_head_is_its_last_layer():
    head = nn.ModuleDict({"dense": nn.Linear(8, 8), "out_proj": nn.Linear(8, 3)})
    found = reasons(nn.ModuleDict({"body": nn.Linear(8, 8), "classifier": head}))
    assert found["classifier.dense.weight"][0]
    assert found["classifier.out_proj.weight"] == found["classifier.out_proj.bias"] == (False, "output head")


class Resnet(nn.Module):
    """A convolution, a squeeze, blocks of layers called fc, and fc at the end; or not at the end."""

    def __init__(self, after=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList([nn.ModuleDict({"fc": nn.Linear(8, 8)})])
        self.fc = nn.Linear(8, 3)
        if after:
            self.project = nn.Linear(3, 2)


def test_fc_is_a_head_where_it_is_the_last_layer():
    wrapped = nn.ModuleDict({"model": Resnet()})
    found = {**reasons(Resnet()), **reasons(wrapped)}
    assert found["fc.weight"] == found["fc.bias"] == found["model.fc.weight"] == (False, "output head")
    assert found["blocks.0.fc.weight"][0]
    assert found["model.blocks.0.fc.weight"][0]
    assert reasons(Resnet(after=True))["fc.weight"][0]
    assert reasons(nn.ModuleList([nn.ModuleDict({"fc": nn.Linear(8, 8)})]))["0.fc.weight"][0]


class Boxes(nn.Module):
    """A head of a detector: a stack that ends in four numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])


class AttentionPoolingHead(nn.Module):
    """What gathers an image into one vector, by attention and a feed-forward layer."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(8, 16), "fc2": nn.Linear(16, 8)})


def test_heads_of_detectors_one_a_layer_or_one_in_all():
    decoder = {
        "class_embed": nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)]),
        "bbox_embed": nn.ModuleList([Boxes(), Boxes()]),
    }
    model = {"decoder": nn.ModuleDict(decoder), "enc_score_head": nn.Linear(8, 3), "bbox_predictor": Boxes()}
    found = reasons(nn.ModuleDict(model))
    assert {name for name, (curved, _) in found.items() if curved and name.endswith("weight")} == {
        "decoder.bbox_embed.0.layers.0.weight",
        "decoder.bbox_embed.1.layers.0.weight",
        "bbox_predictor.layers.0.weight",
    }


def test_what_is_called_a_head_but_prepares_for_one_is_curved():
    transform = nn.ModuleDict({"dense": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})
    model = {"tower": nn.ModuleDict({"head": AttentionPoolingHead()}), "head": transform, "classifier": nn.Linear(8, 3)}
    found = reasons(nn.ModuleDict(model))
    plain = {name for name, (curved, _) in found.items() if not curved}
    assert plain == {"head.norm.weight", "head.norm.bias", "classifier.weight", "classifier.bias"}


class Decoder(Language):
    """Names its head; beside it are another as wide as the vocabulary, and feed-forward layers as wide."""

    def __init__(self):
        super().__init__(vocabulary=32)
        self.speech = nn.ModuleDict({"decoder": nn.Linear(16, 48)})
        self.words = nn.Linear(16, 32)
        self.layers = nn.ModuleList([nn.ModuleDict({"fused": nn.Linear(16, 32), "small": nn.Linear(4, 16)})])
        self.config = torch.nn.Module()
        self.config.vocab_size = 48

    def get_output_embeddings(self):
        return self.out


def test_other_heads_as_wide_as_a_vocabulary_beside_the_one_that_the_model_names():
    found = reasons(Decoder())
    assert {name for name, (_, reason) in found.items() if reason == "output head"} == {
        f"{layer}.{kind}" for layer in ("out", "words", "speech.decoder") for kind in ("weight", "bias")
    }
    mixed = Decoder()
    mixed.down = nn.Linear(32, 16)  # so a layer of that width is read by another: which is a head nobody can say
    assert reasons(mixed)["words.weight"][0]
    assert not reasons(mixed)["out.weight"][0]


def test_attention_projections_and_other_types():
    found = reasons(nn.TransformerEncoderLayer(8, 2, 16))
    assert found["self_attn.in_proj_weight"] == (True, "attention input projection")
    assert found["self_attn.in_proj_bias"] == (True, "attention input projection")
    assert found["self_attn.out_proj.weight"][0]
    apart = reasons(nn.MultiheadAttention(8, 2, kdim=4, vdim=6))
    assert apart["k_proj_weight"][0]
    assert reasons(nn.Conv2d(3, 3, 3))["bias"] == (True, "convolution bias")
    assert reasons(nn.LSTM(4, 4))["weight_ih_l0"] == (False, "LSTM")


def test_conv1d_of_transformers_is_transposed():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    (weight, bias) = sel.routing(nn.Sequential(conv1d(12, 2048)))
    assert (weight.curved, weight.axes, weight.reason) == (True, "io", "Conv1D weight")
    assert tuple(weight.parameter.shape) == (2048, 12)
    assert (bias.curved, bias.axes) == (True, "o")


def test_head_named_by_the_model_wins():
    model = Language(vocabulary=5)
    model.get_output_embeddings = lambda: model.body[0]
    found = reasons(model)
    assert found["body.0.weight"] == (False, "output head")
    assert found["out.weight"][0]


def test_a_model_that_says_it_has_no_head_is_believed():
    model = Language()
    model.get_output_embeddings = lambda: None
    assert all(curved for name, (curved, _) in reasons(model).items() if name.startswith(("body.0", "out")))


def test_patterns_override_the_rules_and_exclude_wins():
    config = sel.SELConfig(include=("out.*", "embed.weight"), exclude=("*.bias",))
    found = reasons(Language(), config)
    assert found["out.weight"] == (True, "included by 'out.*'")
    assert found["embed.weight"] == (True, "included by 'embed.weight'")
    assert found["body.0.bias"] == found["out.bias"] == (False, "excluded by '*.bias'")


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (
            nn.LayerNorm(4),
            {"include": ("weight",)},
            r"weight \(included by 'weight'\) has shape \(4,\): weights and biases",
        ),
        (nn.Linear(2, 2), {"include": ("wieght",)}, "include pattern 'wieght' matches no parameter"),
        (nn.Linear(2, 2), {"exclude": ("x.*",)}, "exclude pattern 'x.*' matches no parameter"),
    ],
)
def test_bad_patterns(model, config, message):
    with pytest.raises(ValueError, match=message):
        sel.routing(model, sel.SELConfig(**config))


def test_a_flattened_linear_weight_is_refused():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(layer.weight.detach().flatten())
    with pytest.raises(ValueError, match=r"weight \(linear weight\) has shape \(16,\): .* unflatten"):
        sel.routing(layer)


def test_frozen_parameters_are_plain():
    layer = nn.Linear(4, 4).requires_grad_(False)
    assert reasons(layer)["weight"] == (False, "frozen")


def test_a_power_leaves_plain_what_would_never_move():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.zeros_(model[1].weight)
    found = reasons(model, sel.SELConfig(mode="power"))
    assert found["0.weight"] == (True, "linear weight")
    assert found["1.weight"] == (False, "starts at 0, where the slope is 0")
    assert found["0.bias"] == found["1.bias"] == (False, "bias, and the slope at 0 is 0")
    assert reasons(model.to("meta"), sel.SELConfig(mode="power"))["1.weight"][0]


def test_the_width_is_the_side_that_occurs_most_often_the_larger_on_a_tie():
    table = sel.routing(nn.Sequential(nn.Linear(256, 64), nn.Linear(256, 64), nn.Linear(256, 256)))
    assert (table.width, table.config.beta, table.config.l.start) == (256, 3.75, 0.5)
    assert str(table).endswith("map: mismatch, beta 3.75, l 0.5, matched start; width 256")
    factors = nn.Sequential(nn.Linear(2048, 4), nn.Linear(4, 2048), nn.Linear(8, 2048))
    assert sel.routing(factors).width == 2048
    assert sel.routing(factors[0], whole=factors).config == sel.routing(factors).config
    assert sel.routing(factors, sel.preset("paper")).config.beta == 7.5
    biases = sel.routing(factors, sel.SELConfig(exclude=("*.weight",)))  # their weights count
    assert (biases.width, biases.config.beta) == (2048, sel.routing(factors).config.beta)
    nothing = sel.routing(nn.LayerNorm(4))
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got None"):
        sel.routing(None)
    assert (nothing.width, nothing.config) == (None, sel.SELConfig())


def test_frozen_matrices_count_for_the_width():
    """Else small adapters on a large frozen model would have the beta of their rank."""
    base = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 2048), nn.Linear(2048, 512)).requires_grad_(False)
    adapters = nn.Sequential(nn.Linear(512, 8), nn.Linear(8, 512), nn.Linear(512, 8), nn.Linear(8, 2048))
    assert sel.routing(adapters).width == 8
    model = nn.Sequential(base, adapters)
    assert sel.routing(model).width == 512
    group = sel.param_groups(model, lr=1e-3)[0]
    assert (group["width"], len(group["params"])) == (512, 8)
    assert "width 512" in str(sel.SELAdamW(model))
    adapters.requires_grad_(False)
    assert sel.routing(model).width is None


def test_empty_layers_are_plain_and_a_presets_name_is_no_config():
    assert reasons(nn.Sequential(nn.Linear(0, 4)))["0.bias"] == (False, "empty")
    with pytest.raises(
        ValueError, match=r"config must be a SELConfig, such as symexplin.preset\('paper'\), got 'paper'"
    ):
        sel.routing(nn.Linear(2, 2), "paper")
    with pytest.raises(ValueError, match="model has nothing to curve"):
        sel.init_(sel.convert(nn.Linear(2, 2)), sel.preset("paper"))


def test_what_wraps_a_model_does_not_change_its_routing():
    """DistributedDataParallel hides `get_output_embeddings`; a LightningModule has the model as an attribute."""

    class Speaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.middle = nn.Embedding(16, 8), nn.Linear(8, 16)
            self.proj, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

        def get_output_embeddings(self):
            return self.proj

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = Speaks()
    plain = {route.name: route.curved for route in sel.routing(model)}
    assert plain["last.weight"]
    assert not plain["proj.weight"]
    wrapped = {route.name.removeprefix("module."): route.curved for route in sel.routing(Wrapper(model))}
    assert wrapped == plain


def test_a_part_is_routed_as_in_the_whole():
    model = Language(vocabulary=32, tie=True)
    model.gate = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(16, 16)]), "gate": nn.Linear(16, 16)})
    config = sel.SELConfig(exclude=("body.0.bias",))
    whole = {id(route.parameter): route for route in sel.routing(model, config)}
    for part in (model.body, model.out, model.gate["gate"], model):
        table = sel.routing(part, config, whole=model)
        assert [vars(route) for route in table] == [
            vars(whole[id(p)]) for p in sorted(part.parameters(), key=in_order(whole))
        ]
    assert [(r.name, r.reason) for r in sel.routing(model.out, whole=model)] == [
        ("embed.weight", "tied to an embedding"),
        ("out.bias", "output head"),
    ]
    with pytest.raises(ValueError, match=r"model must be a part of whole, .*'0\.weight'"):
        sel.routing(nn.Sequential(nn.Linear(4, 4)), whole=model)


def in_order(routes):
    return lambda parameter: routes[id(parameter)].position


def test_the_table_shows_the_rates_that_the_optimizer_has():
    """The first pattern that matches counts; "-" is the optimizer's own."""
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    settings = {"lr": {"0.*": 1e-3, "*": 3e-4}, "no_decay": "usual"}
    table = sel.routing(model, **settings)
    optimizer = sel.SELAdamW(sel.param_groups(model, **settings), weight_decay=0.1)
    used = {name: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for name in g["param_names"]}
    assert {route.name: (route.lr, 0.1 if route.weight_decay is None else 0.0) for route in table} == used
    lines = str(table).splitlines()
    assert lines[0].split() == ["parameter", "shape", "lr", "decay", "reason"]
    assert lines[1].split() == ["0.weight", "4x8", "curved", "0.001", "-", "linear", "weight"]
    assert lines[2].split()[:5] == ["0.bias", "4", "curved", "0.001", "0"]
