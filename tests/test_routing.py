"""Routing of small models: which parameters are curved, with a reason for each."""

import pytest
import torch
from torch import nn

import symexplin as sel

HEAD, ROUTER = "output head", "router of a mixture of experts"
INPUT, STEP = "attention input projection", "state-space step bias"


def reasons(model, config=None):
    return {route.name: (route.curved, route.reason) for route in sel.routing(model, config)}


def layers(model, config=None):
    """Return the names of the modules with curved weights, of heads and of routers."""
    by_kind = {"curved": set(), HEAD: set(), ROUTER: set()}
    for route in sel.routing(model, config):
        if route.is_weight or not route.curved:
            by_kind.get("curved" if route.curved else route.reason, set()).add(route.name.rpartition(".")[0])
    return tuple(by_kind.values())


class Model(nn.Module):
    """Modules by name, with attributes of the model itself."""

    def __init__(self, attributes=(), **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.__dict__.update(attributes)


def linear(outputs=8, inputs=8):
    return nn.Linear(inputs, outputs)


def language(vocabulary=16, width=16, attributes=(), **more):
    """Return an embedding, a body and an output layer without a usual name; vocabulary and width may coincide."""
    body = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
    return Model(attributes, embed=nn.Embedding(vocabulary, width), body=body, out=nn.Linear(width, vocabulary), **more)


def placed(places):
    """Return a model whose feed-forward layer is as wide as its table of positions."""
    tables = {"embed": nn.Embedding(11, 16), places: nn.Embedding(32, 16)}
    return Model(**tables, up=nn.Linear(16, 32), down=nn.Linear(64, 16))


class Router(nn.Linear):
    """A router as a type of its own."""


class Experts(nn.Module):
    """Two weights of four experts each in one tensor; inputs of 8, feed-forward width of 6."""

    def __init__(self, **attributes):
        super().__init__()
        self.__dict__.update(attributes)
        self.w1, self.w2 = nn.Parameter(torch.zeros(4, 6, 8)), nn.Parameter(torch.zeros(4, 8, 6))


def named(name, module=None, **more):
    return Model(body=linear(), **{name: linear(3) if module is None else module}, **more)


def gated(outputs, name="gate", **beside):
    return Model(ffn=Model(**{name: linear(outputs)}, **beside))


def returns(layer):
    """Return attributes of a model that returns this layer of itself as its head, or none."""
    return {"get_output_embeddings": lambda: layer}


def speaking():
    model = language(32, words=nn.Linear(16, 32), speech=Model(decoder=nn.Linear(16, 48)))
    model.blocks = nn.ModuleList([Model(fused=nn.Linear(16, 32))])
    model.config = type("Config", (), {"vocab_size": 48})
    model.get_output_embeddings = lambda: model.out
    return model


TABLE = nn.Sequential(nn.Embedding(8, 2), nn.Flatten(), nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 8))
BYTES = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
START = nn.Sequential(nn.Embedding(9, 8), linear())
BOXES = nn.Sequential(linear(), linear(4))
SAM = Model(proj_in=linear(), proj_out=linear(4), mid=linear())
MASKS = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 3, 1))
LAST = linear(6)
CHAIN = {"up": linear(32), "down": linear(8, 32)}
PLACES = "position wpe segment_embeddings token_type_embeddings"
NAMES = "head lm_head ctc_head classifier qa_classifier score cls logits unembed qa_outputs"
# The modules with curved weights, the heads and the routers of small models.
LAYERS = {
    # by the vocabulary
    "as wide as the vocabulary and the body": (language(), "body.0", "out", ""),
    "narrower than the body, beside another head": (language(9, score=nn.Linear(16, 2)), "body.0", "out score", ""),
    "not what another layer reads": (Model(embed=nn.Embedding(32, 8), **CHAIN, head=linear(2)), "up down", "head", ""),
    **{f"{name} is no vocabulary": (placed(name), "up down", "", "") for name in PLACES.split()},
    # by the model itself
    "several as wide as a vocabulary": (speaking(), "body.0 blocks.0.fused", "out words speech.decoder", ""),
    "the model returns another": (language(5, attributes=returns(LAST), last=LAST), "body.0 out", "last", ""),
    "the model returns none": (language(attributes=returns(None)), "body.0 out", "", ""),
    # by its place
    "the end of a chain after an embedding": (TABLE, "2 3", "4", ""),
    "of a classifier over bytes": (BYTES, "1", "3", ""),
    "of a chain inside a wrapper": (Model(module=BYTES), "module.1", "module.3", ""),
    "not in the middle": (Model(start=START, end=linear(5)), "start.1 end", "", ""),
    "fc at the end": (Model(block=nn.ModuleList([Model(fc=linear())]), fc=linear(3)), "block.0.fc", "fc", ""),
    "fc in a wrapper": (Model(model=named("fc")), "model.body", "model.fc", ""),
    "output": (named("output"), "body", "output", ""),
    "fc before the end": (Model(fc=linear(), project=linear(3)), "fc project", "", ""),
    "output in a block": (Model(h=nn.ModuleList([Model(output=linear(4))])), "h.0.output", "", ""),
    # by its name
    **{name: (named(name, then=linear(5)), "body then", name, "") for name in NAMES.split()},
    "the last of a stack": (named("head", Model(up=linear(), out=linear(3))), "body head.up", "head.out", ""),
    "a square one": (Model(classifier=linear(), then=linear(5)), "then", "classifier", ""),
    "the last of two": (named("head", Model(a=linear(3), b=linear(5))), "body head.a", "head.b", ""),
    "one that nobody reads": (named("a_head", SAM), "body a_head.proj_in a_head.mid", "a_head.proj_out", ""),
    "convolutions": (Model(body=nn.Conv2d(3, 8, 3), cls=MASKS), "body cls.0", "cls.1", ""),
    "a list": (named("class_embed", nn.ModuleList([linear(3), linear(3)])), "body", "class_embed.0 class_embed.1", ""),
    "stacks": (named("x_bbox_embed", nn.ModuleList([BOXES])), "body x_bbox_embed.0.0", "x_bbox_embed.0.1", ""),
    "pooling": (Model(head=Model(fc1=linear(16), fc2=linear(8, 16))), "head.fc1 head.fc2", "", ""),  # SigLIP's
    "inner": (Model(k_head=linear(6), conv_head=nn.Conv2d(3, 8, 1), head=linear(2)), "k_head conv_head", "head", ""),
    "adapters": (named("head", Model(base_layer=linear(3), A=linear(2))), "body", "head.base_layer head.A", ""),
    # routers
    "beside experts": (Model(gate=linear(), experts=nn.ModuleList([linear()])), "experts.0", "", "gate"),
    "beside a list": (gated(8, "gating", expert_list=linear()), "ffn.expert_list", "", "ffn.gating"),
    "few outputs alone": (gated(4, out=linear(8, 16)), "ffn.out", "", "ffn.gate"),
    "many outputs": (gated(8), "ffn.gate", "", ""),
    "half of a layer": (gated(4, up=linear(4), down=linear(8, 4)), "ffn.gate ffn.up ffn.down", "", ""),
    "by name": (Model(x_router=linear(4), shared_expert_gate=linear(1)), "", "", "x_router shared_expert_gate"),
    "with a layer": (Model(router=Model(layer=linear(4)), input=linear()), "input", "", "router.layer"),
    "by type": (Model(choose=Router(8, 4), experts=Experts()), "experts", "", "choose"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_the_curved_layers_the_heads_and_the_routers(case):
    model, *expected = LAYERS[case]
    assert layers(model) == tuple(set(names.split()) for names in expected)


def alias():
    layer = linear()
    model = Model(layer=layer, after=Model())
    model.before, model.after.alias = layer.weight, layer.weight
    return model


def tied():
    model = language()
    model.out.weight = model.embed.weight
    return model


# The decision and the axes of single parameters.
DECISIONS = {
    "tied": (tied, {"embed.weight": "tied to an embedding", "out.bias": HEAD, "body.0.bias": "o: linear bias"}),
    "embedding": (language, {"embed.weight": "embedding", "body.1.weight": "LayerNorm"}),
    "alias": (alias, {"before": "oi: linear weight", "layer.bias": "o: linear bias"}),
    "convolution": (lambda: nn.Conv2d(3, 3, 3), {"weight": "oiii: convolution weight", "bias": "o: convolution bias"}),
    "transposed": (lambda: nn.ConvTranspose1d(4, 2, 3), {"weight": "ioi: transposed convolution weight"}),
    "other types": (lambda: nn.LSTM(4, 4), {"weight_ih_l0": "LSTM"}),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2),
        {"in_proj_weight": f"oi: {INPUT}", "in_proj_bias": f"o: {INPUT}"},
    ),
    "attention to others": (lambda: nn.MultiheadAttention(8, 2, kdim=4), {"k_proj_weight": f"oi: {INPUT}"}),
    "step bias": (lambda: Model(dt_proj=linear()), {"dt_proj.bias": STEP, "dt_proj.weight": "oi: linear weight"}),
    "step bias inside": (lambda: Model(mixer=Model(dt_proj=linear())), {"mixer.dt_proj.bias": STEP}),
    "experts": (Experts, {"w1": "eoi: experts, outputs by inputs", "w2": "eoi: experts, outputs by inputs"}),
    "experts of one's own": (lambda: Experts(hidden_dim=6), {"w1": "eoi: experts, outputs by inputs"}),
    "transposed experts": (lambda: Experts(is_transposed=True), {"w2": "eio: experts, inputs by outputs"}),
    "frozen": (lambda: linear().requires_grad_(False), {"weight": "frozen", "bias": "frozen"}),
    "empty": (lambda: nn.Linear(0, 4), {"weight": "empty", "bias": "empty"}),
    "integers": (lambda: nn.ParameterList([nn.Parameter(torch.tensor([1]), False)]), {"0": "not floating point"}),
}


@pytest.mark.parametrize("case", DECISIONS)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_the_decision_about_a_parameter(case):
    build, expected = DECISIONS[case]
    routes = {route.name: route for route in sel.routing(build())}
    decisions = {name: f"{routes[name].axes}: {routes[name].reason}".removeprefix(": ") for name in expected}
    assert decisions == expected
    assert all(route.curved == bool(route.axes) for route in routes.values())


def test_patterns_override_the_rules_and_exclude_wins():
    config = sel.SELConfig(include=("out.*", "embed.weight"), exclude=("*.bias",))
    told = reasons(language(), config)
    assert told["out.weight"] == (True, "included by 'out.*'")
    assert told["embed.weight"] == (True, "included by 'embed.weight'")
    assert told["body.0.bias"] == told["out.bias"] == (False, "excluded by '*.bias'")
    model = Model(dt_proj=nn.Linear(2, 8), conv=nn.ConvTranspose1d(2, 4, 3), head=nn.ConvTranspose1d(4, 2, 3))
    routes = {r.name: r.axes for r in sel.routing(model, sel.SELConfig(include=("dt_proj.bias", "head.*")))}
    assert (routes["dt_proj.bias"], routes["head.weight"], routes["head.bias"]) == ("o", "ioi", "o")
    assert reasons(alias(), sel.SELConfig(exclude=("after.alias",)))["before"] == (False, "excluded by 'after.alias'")


def flat():
    layer = linear()
    layer.weight = nn.Parameter(layer.weight.detach().flatten())
    return layer


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (nn.LayerNorm(4), {"include": ("weight",)}, r"weight \(included by 'weight'\) has shape \(4,\): weights"),
        (nn.ParameterList([torch.tensor(1.0)]), {"include": ("0",)}, r"0 \(included by '0'\) has shape \(\)"),
        (linear(), {"include": ("wieght",)}, "include pattern 'wieght' matches no parameter"),
        (linear(), {"exclude": ("x.*",)}, r"exclude pattern 'x\.\*' matches no parameter"),
        (flat(), {}, r"weight \(linear weight\) has shape \(64,\): .* unflatten"),
        (linear(), {"mode": "mismatch", "beta": 0.5, "l": sel.Scale(start=1)}, "map of mode 'mismatch' needs"),
    ],
)
def test_what_cannot_be_curved_is_refused(model, config, message):
    with pytest.raises(ValueError, match=message):
        sel.routing(model, sel.SELConfig(**config))


def test_the_width_is_the_side_that_occurs_most_often_the_larger_on_a_tie():
    table = sel.routing(nn.Sequential(nn.Linear(256, 64), nn.Linear(256, 64), nn.Linear(256, 256)))
    assert (table.width, table.config.beta) == (256, 3.75)
    assert str(table).endswith("map: exp_only, beta 3.75; width 256")
    factors = nn.Sequential(nn.Linear(2048, 4), nn.Linear(4, 2048), nn.Linear(8, 2048))
    assert sel.routing(factors).width == 2048
    assert sel.routing(factors[0], whole=factors).config == sel.routing(factors).config
    assert sel.routing(factors, sel.SELConfig(beta=7.5)).config.beta == 7.5
    biases = sel.routing(factors, sel.SELConfig(exclude=("*.weight",)))  # their weights count
    assert (biases.width, biases.config.beta) == (2048, sel.routing(factors).config.beta)
    nothing = sel.routing(nn.LayerNorm(4))
    assert (nothing.width, nothing.config) == (None, sel.SELConfig())


def test_convolutions_count_by_their_fans_and_depthwise_ones_do_not_count():
    depthwise = nn.Conv2d(32, 32, 3, groups=32)
    assert sel.routing(nn.Sequential(depthwise, nn.Conv2d(32, 64, 1), nn.Conv2d(32, 32, 3, groups=32))).width == 64
    assert sel.routing(depthwise).width == 32 * 9
    assert sel.routing(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(18, 5))).width == 18
    assert sel.routing(Model(experts=Experts(), a=nn.Linear(1, 6))).width == 6  # one expert's sides


def test_frozen_matrices_count_for_the_width():
    """Otherwise small adapters on a large frozen model would have the beta of their rank."""
    base = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 2048), nn.Linear(2048, 512)).requires_grad_(False)
    adapters = nn.Sequential(nn.Linear(512, 8), nn.Linear(8, 512), nn.Linear(512, 8), nn.Linear(8, 2048))
    assert sel.routing(adapters).width == 8
    model = nn.Sequential(base, adapters)
    assert sel.routing(model).width == 512
    group = sel.param_groups(model, lr=1e-3)[0]
    assert (group["width"], len(group["params"])) == (512, 8)
    adapters.requires_grad_(False)
    assert sel.routing(model).width is None
    assert sel.routing(Model(body=nn.Linear(6, 4), score=linear(9, 9).requires_grad_(False))).width == 6  # not heads


def test_a_wrapper_changes_no_decision():
    """DistributedDataParallel hides `get_output_embeddings`; a LightningModule has the model as an attribute."""
    proj, last = nn.Linear(16, 16), nn.Linear(16, 16)
    model = language(attributes=returns(proj), proj=proj, last=last)
    plain = reasons(model)
    assert plain["last.weight"][0]
    assert plain["proj.weight"] == (False, HEAD)
    assert {name.removeprefix("module."): reason for name, reason in reasons(Model(module=model)).items()} == plain


def test_a_part_is_routed_as_in_the_whole():
    mixture = Model(experts=nn.ModuleList([nn.Linear(16, 16)]), gate=nn.Linear(16, 16))
    model = language(32, mixture=mixture)
    model.out.weight = model.embed.weight
    config = sel.SELConfig(exclude=("body.0.bias",))
    whole = list(sel.routing(model, config))
    for part in (model.body, model.out, mixture.gate, model):
        ids = set(map(id, part.parameters()))
        assert list(sel.routing(part, config, whole=model)) == [r for r in whole if id(r.parameter) in ids]
    assert [(r.name, r.reason) for r in sel.routing(model.out, whole=model)] == [
        ("embed.weight", "tied to an embedding"),
        ("out.bias", HEAD),
    ]


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


def test_what_decays():
    model = language(experts=Experts())
    model.experts.w1_bias = nn.Parameter(torch.zeros(4, 6))
    decays = {r.name for r in sel.routing(model, weight_decay=0.1, no_decay="usual") if r.weight_decay == 0.1}
    assert decays == {"body.0.weight", "out.weight", "experts.w1", "experts.w2"}
    rest = sel.routing(model, weight_decay={"out.*": 0.2, "*": 0.1}, no_decay=("body.*",))
    assert {r.weight_decay for r in rest if r.name.startswith("body")} == {0.0}
    assert {r.weight_decay for r in rest if r.name.startswith("out")} == {0.2}


def test_the_parameters_of_converted_layers():
    """Scales that shape the map do not decay (DESIGN, section 1: e, l, s do; m, a, n do not)."""
    model = sel.convert(nn.Sequential(nn.Linear(4, 6)), sel.preset("paper"))
    table = sel.routing(model, weight_decay=0.1)
    assert {(r.curved, r.reason) for r in table} == {(False, "curved in its module")}
    assert {r.name for r in table if r.weight_decay == 0.0} == {"0.m_row", "0.m_column", "0.bias_m_row"}
    head = sel.convert(named("head"), sel.SELConfig(include=("head.*",)))
    assert {r.reason for r in sel.routing(head)} == {"curved in its module"}
    usual = sel.routing(model, weight_decay=0.1, no_decay="usual")
    assert {r.name for r in usual if r.weight_decay} == {
        f"0.{name}" for name in ("raw_weight", "e_row", "e_column", "l_row", "l_column")
    }
