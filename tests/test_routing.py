"""Routing of small models: which parameters are curved, with a reason for each."""

import pytest
import torch
from torch import nn

import symexplin as sel
from symexplin.routes import is_convertible

HEAD, ROUTER = "output head", "router of a mixture of experts"
INPUT, ONLY = "attention input projection (optimizer only)", " (optimizer only)"


def reasons(model, config=None):
    return {route.name: (route.curved, route.reason) for route in sel.routing(model, config)}


def layers(model):
    """Return the names of the modules with curved weights, of heads and of routers."""
    by_kind = {"curved": set(), HEAD: set(), ROUTER: set()}
    for route in sel.routing(model):
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


def language(vocabulary=32, width=16, attributes=(), **more):
    """Return an embedding, a body and an output layer without a usual name."""
    body = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
    return Model(attributes, embed=nn.Embedding(vocabulary, width), body=body, out=nn.Linear(width, vocabulary), **more)


class Router(nn.Linear):
    """A router as a type of its own."""


class Experts(nn.Module):
    """Two weights of four experts each in one tensor, and the biases of one."""

    def __init__(self, **attributes):
        super().__init__()
        self.__dict__.update(attributes)
        self.w1, self.w2 = nn.Parameter(torch.zeros(4, 6, 8)), nn.Parameter(torch.zeros(4, 8, 6))
        self.w1_bias = nn.Parameter(torch.zeros(4, 6))


def named(name, module=None):
    return Model(body=linear(), **{name: linear(3) if module is None else module})


def returns(layer):
    """Return attributes of a model that returns this layer of itself as its head, or none."""
    return {"get_output_embeddings": lambda: layer}


def configured(model, vocabulary):
    model.config = type("Config", (), {"vocab_size": vocabulary})
    return model


NAMES = ("head", "lm_head", "value_head", "classifier", "score", "output")
LAST = linear(6)
BYTES = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
START = nn.Sequential(nn.Embedding(9, 8), linear())
BLOCKS = nn.ModuleList([Model(output=linear(4), up=linear(32), head=linear())])
SMALL = Model(up=linear(), out=linear(3), drop=nn.Dropout())
# The modules with curved weights, the heads and the routers of small models.
LAYERS = {
    # what the model returns
    "returned": (language(attributes=returns(LAST), last=LAST), "body.0 out", "last", ""),
    "returned by a part": (
        Model(module=language(attributes=returns(LAST), last=LAST)),  # as under DistributedDataParallel
        "module.body.0 module.out",
        "module.last",
        "",
    ),
    "returned none": (language(attributes=returns(None)), "body.0", "out", ""),
    "wrapped by an adapter": (
        Model(returns(wrap := Model(base=linear(9), A=linear(2))), wrap=wrap, body=linear()),
        "body",
        "wrap.base wrap.A",
        "",
    ),
    # a usual name
    **{name: (named(name), "body", name, "") for name in NAMES},
    "several": (Model(a=linear(), policy_head=linear(4), value_head=linear(1)), "a", "policy_head value_head", ""),
    "before a vocabulary": (language(score=linear(2, 16)), "body.0 out", "score", ""),
    "a small module": (named("head", SMALL), "body head.up", "head.out", ""),
    "not in numbered blocks": (Model(h=BLOCKS, end=linear(5)), "h.0.output h.0.up h.0.head end", "", ""),
    # over the vocabulary
    "over the vocabulary": (language(), "body.0", "out", ""),
    "of a configuration": (configured(Model(body=linear(), out=linear(40)), 40), "body", "out", ""),
    "the last one": (Model(embed=nn.Embedding(32, 8), up=linear(32), out=linear(32)), "up", "out", ""),
    "not as narrow as its input": (language(16), "body.0 out", "", ""),
    "not inside of numbered blocks": (Model(wpe=nn.Embedding(32, 8), h=BLOCKS), "h.0.output h.0.up h.0.head", "", ""),
    # the end of a chain after an embedding
    "the end of a chain": (Model(module=BYTES), "module.1", "module.3", ""),
    "not in the middle": (Model(start=START, end=linear(5)), "start.1 end", "", ""),
    # routers
    "gates": (Model(router=linear(), shared_expert_gate=linear(1)), "", "", "router shared_expert_gate"),
    "beside a type": (Model(router=Model(layer=linear(4)), input=Experts()), "input", "", "router.layer"),
    "by type": (Model(choose=Router(8, 4), body=linear()), "body", "", "choose"),
    "half of a layer": (Model(gate=linear(4), up=linear(4), down=linear(8, 4)), "gate up down", "", ""),
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
    "tied": (tied, {"embed.weight": "embedding", "out.bias": HEAD, "body.0.bias": "o: linear bias"}),
    "norm": (language, {"body.1.weight": "LayerNorm"}),
    "alias": (alias, {"before": "oi: linear weight", "layer.bias": "o: linear bias"}),
    "convolution": (lambda: nn.Conv2d(3, 3, 3), {"weight": "Conv2d", "bias": "Conv2d"}),
    "other types": (lambda: nn.LSTM(4, 4), {"weight_ih_l0": "LSTM"}),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
        {
            **{"in_proj_weight": f"oi: {INPUT}", "in_proj_bias": f"o: {INPUT}", "bias_k": "MultiheadAttention"},
            **{"out_proj.weight": "oi: linear weight", "out_proj.bias": "o: linear bias"},
        },
    ),
    "attention to others": (lambda: nn.MultiheadAttention(8, 2, kdim=4), {"k_proj_weight": f"oi: {INPUT}"}),
    "a subclass": (lambda: type("Mine", (nn.Linear,), {})(8, 4), {"bias": f"o: linear bias{ONLY}"}),
    "experts": (
        Experts,
        {"w1": f"eoi: experts, outputs by inputs{ONLY}", "w1_bias": f"eo: expert bias{ONLY}"},
    ),
    "transposed experts": (
        lambda: Experts(is_transposed=True),
        {"w2": f"eio: experts, inputs by outputs{ONLY}", "w1_bias": f"eo: expert bias{ONLY}"},
    ),
    "integers": (lambda: nn.ParameterList([nn.Parameter(torch.tensor([1]), False)]), {"0": "not floating point"}),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_the_decision_about_a_parameter(case):
    build, expected = DECISIONS[case]
    routes = {route.name: route for route in sel.routing(build())}
    decisions = {name: f"{routes[name].axes}: {routes[name].reason}".removeprefix(": ") for name in expected}
    assert decisions == expected
    assert all(route.curved == bool(route.axes) for route in routes.values())


def test_conv1d_of_transformers():
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(8, 4)
    assert [(r.axes, r.reason) for r in sel.routing(layer)] == [("io", "Conv1D weight"), ("o", "Conv1D bias")]
    assert is_convertible(layer)
    mine = type("Mine", (type(layer),), {})(8, 4)
    assert [r.reason for r in sel.routing(mine)] == [f"Conv1D weight{ONLY}", f"Conv1D bias{ONLY}"]
    assert not is_convertible(type("Conv1D", (nn.Linear,), {})(8, 4))


def test_patterns_override_the_rules_and_exclude_wins():
    config = sel.SELConfig(include=("out.*", "embed.weight", "stack"), exclude=("*.bias",))
    model = language()
    model.stack = nn.Parameter(torch.zeros(2, 3, 4))
    told = reasons(model, config)
    assert told["out.weight"] == (True, "included by 'out.*'")
    assert told["embed.weight"] == (True, f"included by 'embed.weight'{ONLY}")
    assert told["stack"] == (True, f"included by 'stack'{ONLY}")
    assert told["body.0.bias"] == told["out.bias"] == (False, "excluded by '*.bias'")
    axes = {route.name: route.axes for route in sel.routing(model, config)}
    assert (axes["out.weight"], axes["stack"]) == ("oi", "eoi")
    assert reasons(alias(), sel.SELConfig(exclude=("after.alias",)))["before"] == (False, "excluded by 'after.alias'")


def flat():
    layer = linear()
    layer.weight = nn.Parameter(layer.weight.detach().flatten())
    return layer


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (nn.LayerNorm(4), {"include": ("weight",)}, r"weight must be a matrix, .* got LayerNorm with shape \(4,\)"),
        (nn.Conv1d(2, 4, 3), {"include": ("*",)}, r"weight must be .* got Conv1d with shape \(4, 2, 3\)"),
        (nn.ParameterList([torch.tensor(1.0)]), {"include": ("0",)}, r"0 must be .* got ParameterList with shape \(\)"),
        (flat(), {}, r"weight must be .* got linear weight with shape \(64,\)"),
        (linear(), {"include": ("wieght",)}, "include pattern 'wieght' matches no parameter"),
        (linear(), {"exclude": ("x.*",)}, r"exclude pattern 'x\.\*' matches no parameter"),
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
    assert sel.routing(factors, sel.SELConfig(exclude=("*.weight",))).width == 2048  # the lengths of the biases
    assert sel.routing(Model(experts=Experts(), a=nn.Linear(1, 6))).width == 6  # one expert's sides
    nothing = sel.routing(nn.LayerNorm(4))
    assert (nothing.width, nothing.config) == (None, sel.SELConfig())


def test_frozen_matrices_count_for_the_width():
    """Otherwise small adapters on a large frozen model would have the beta of their rank."""
    base = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 2048), nn.Linear(2048, 512)).requires_grad_(False)
    adapters = nn.Sequential(nn.Linear(512, 8), nn.Linear(8, 512), nn.Linear(512, 8), nn.Linear(8, 2048))
    assert sel.routing(adapters).width == 8
    model = nn.Sequential(base, adapters)
    assert sel.routing(model).width == 512
    assert set(reasons(base).values()) == {(False, "frozen")}
    assert sel.routing(model, sel.SELConfig(exclude=("0.*",))).width == 8
    group = sel.param_groups(model, lr=1e-3)[0]
    assert (group["width"], len(group["params"])) == (512, 8)
    adapters.requires_grad_(False)
    assert sel.routing(model).width is None
    assert sel.routing(Model(body=nn.Linear(6, 4), score=linear(9, 9).requires_grad_(False))).width == 6  # not heads


def test_a_part_is_routed_as_in_the_whole():
    mixture = Model(experts=nn.ModuleList([nn.Linear(16, 16)]), gate=nn.Linear(16, 16))
    model = language(32, mixture=mixture)
    model.out.weight = model.embed.weight
    config = sel.SELConfig(exclude=("body.0.bias",))
    whole = list(sel.routing(model, config))
    for part in (model.body, model.out, mixture.gate, model):
        ids = set(map(id, part.parameters()))
        assert list(sel.routing(part, config, whole=model)) == [r for r in whole if id(r.parameter) in ids]
    assert [r.name for r in sel.routing(model.out, whole=model)] == ["embed.weight", "out.bias"]


def test_the_table_shows_the_rates_that_the_optimizer_has():
    """The first pattern that matches counts; "-" is the optimizer's own."""
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    settings = {"lr": {"0.*": 1e-3, "*": 3e-4}, "no_decay": "usual"}
    table = sel.routing(model, **settings)
    optimizer = sel.SELAdamW(sel.param_groups(model, **settings), weight_decay=0.1)
    used = {route.name: (route.lr, route.weight_decay) for route in sel.routing(optimizer)}
    assert {route.name: (route.lr, 0.1 if route.weight_decay is None else 0.0) for route in table} == used
    lines = str(table).splitlines()
    assert lines[0].split() == ["parameter", "shape", "lr", "decay", "reason"]
    assert lines[1].split() == ["0.weight", "4x8", "curved", "0.001", "-", "linear", "weight"]
    assert lines[2].split()[:5] == ["0.bias", "4", "curved", "0.001", "0"]


def test_what_decays():
    model = language(experts=Experts())
    decays = {r.name for r in sel.routing(model, weight_decay=0.1, no_decay="usual") if r.weight_decay == 0.1}
    assert decays == {"body.0.weight", "out.weight", "experts.w1", "experts.w2"}
    rest = sel.routing(model, weight_decay={"out.*": 0.2, "*": 0.1}, no_decay=("body.*",))
    assert {r.weight_decay for r in rest if r.name.startswith("body")} == {0.0}
    assert {r.weight_decay for r in rest if r.name.startswith("out")} == {0.2}


def test_the_map_that_an_optimizer_trains():
    """In the order of the model, with present rates; a group that is added later comes last."""
    model = Model(body=nn.Sequential(linear(), nn.LayerNorm(8)), experts=Experts(is_transposed=True), head=linear(3))
    config = sel.preset("structured_linear")
    optimizer = sel.SELAdamW(model, lr={"*bias": 2e-3, "*": 1e-3}, weight_decay=0.1, config=config, total_steps=9)
    optimizer.add_param_group({"params": [("new", nn.Parameter(torch.ones(2)))], "lr": 0.5})
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    *found, new = (table := sel.routing(optimizer))
    wanted = sel.routing(model, config)
    assert (table.config, table.width) == (wanted.config, wanted.width)
    assert [(r.name, id(r.parameter), r.position, r.curved, r.axes) for r in found] == [
        (r.name, id(r.parameter), r.position, r.curved, r.axes) for r in wanted
    ]
    assert {r.lr for r in found if r.name.endswith("bias")} == {1e-3}
    assert {r.lr for r in found if not r.name.endswith("bias")} == {5e-4}
    assert (new.name, new.curved, new.lr, new.weight_decay) == ("new", False, 0.25, 0.1)
    lines = str(table).splitlines()
    assert lines[1].split()[:5] == ["body.0.weight", "8x8", "mapped", "0.0005", "0.1"]
    assert lines[-2].startswith("mapped: 5 of 10 tensors")


def test_what_has_no_table():
    model = linear()
    with pytest.raises(ValueError, match="model must be a module or an optimizer that trains one map, got AdamW with"):
        sel.routing(torch.optim.AdamW(sel.param_groups(sel.convert(linear()))))
    with pytest.raises(ValueError, match=r"config, lr, .* must not be given with an optimizer"):
        sel.routing(sel.SELAdamW(model), lr=1e-3)
    with pytest.raises(ValueError, match="must be a part of whole, but its parameter 'weight' is not in whole"):
        sel.routing(model, whole=linear())


def test_the_parameters_of_converted_layers():
    """Scales that shape the map do not decay: e, l and s do, m, a and n do not."""
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


@pytest.mark.parametrize("wrap", [torch.compile, lambda model: nn.DataParallel(torch.compile(model))])
def test_wrappers_change_no_name(wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    rates = {"0.*": 1e-3, "*": 2e-3}
    assert str(sel.routing(wrap(model), lr=rates)) == str(sel.routing(model, lr=rates))
