"""What is refused: one table of calls and what their errors say. test_state has the states that do not fit."""

import math

import pytest
import torch
from torch import nn

import symexplin as sel
from training import PAPER, backward, build, network

NAN = float("nan")
ANNEALED = sel.preset("frozen", e=sel.Scale("row", k=(50, 8), base_lr=None))
ADAMW = sel.SELAdamW


def made(kind=ADAMW, **settings):
    return lambda: kind(network(), **settings)


def grouped(**settings):
    return lambda: sel.param_groups(network(), **settings)


def edited(**changes):
    """Build an optimizer over groups of which the first was edited."""
    groups = sel.param_groups(network(), lr=1e-2, config=sel.preset("frozen"))
    groups[0] |= changes
    return lambda: ADAMW(groups)


def added(**group):
    """Add a group to an optimizer, which must stay as it was."""

    def call():
        optimizer = build(network())
        try:
            optimizer.add_param_group(group)
        finally:
            assert len(optimizer.param_groups) == 2

    return call


def replaced(name, *shape):
    """Build an optimizer over curved groups in which the first parameter has another shape, and its state."""
    groups = sel.param_groups(network(), config=sel.preset("frozen"))
    groups[0]["params"][0] = (name, nn.Parameter(torch.zeros(shape)))
    return lambda: ADAMW(groups).create_state()


def repeated():
    groups = sel.param_groups(network())
    ADAMW([*groups, {"params": [groups[1]["params"][0]], "role": "plain"}])


def infinite():
    model = network()
    model[3].weight.data[0, 0] = math.inf
    backward(model, 0)
    build(model).step()


def sparse():
    model = nn.ModuleDict({"words": nn.Embedding(5, 4, sparse=True), "up": nn.Linear(4, 4)})
    optimizer = ADAMW(model)
    model["up"](model["words"](torch.tensor([1]))).sum().backward()
    optimizer.step()


def annealed(model, total_steps=None):
    sel.anneal_scales(torch.optim.SGD(sel.param_groups(model, lr=3e-4)), total_steps)


PARAMETERS = (nn.Module.parameters, nn.Module.named_parameters, lambda model: list(model.parameters()))
Q = ("q", nn.Parameter(torch.zeros(2, 2)))
PHASE = ("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
LISTS = {"axes": ["oi"], "position": [0], "shape": [(2, 2)]}
CURVED = {"role": "curved", "config": sel.SELConfig().resolve(2).to_json()}
SWITCHES = ("amsgrad", "capturable", "differentiable", "maximize")
# Calls, and what their errors must name, in this order: the argument, the value, what would be right.
TABLE = [
    # settings of the rule
    *(
        (made(lr=lr), f"lr .*{got}")
        for lr, got in ((-1.0, "-1"), (None, "None"), (torch.ones(2), "tensor"), ("a", "'a'"))
    ),
    (made(lr=torch.tensor(1e-3, requires_grad=True)), "lr .*requires_grad"),
    (made(eps=NAN), "eps .*nan"),
    (made(weight_decay=-0.1), "weight_decay .*-0.1"),
    *((made(betas=b), "betas .*two numbers") for b in (None, (None, 0.9), ("a", 0.9), 0.9, (0.9, 1.0), (0.9,))),
    *((made(total_steps=total), f"total_steps .*{total}") for total in (0, 2.5)),
    (made(config=ANNEALED), "total_steps must be given.*learning rate of e"),
    (lambda: build(network()).set_total_steps(0), "total_steps .*0"),
    (lambda: build(network()).set_total_steps(9, restart=PAPER), "restart .*SELConfig"),
    *((made(max_grad_norm=x), f"max_grad_norm .*{x}") for x in (0.0, -1.0, math.inf)),
    # torch's switches
    *((edited(**{switch: True}), f"{switch} .*True") for switch in SWITCHES),
    # a map in another place, or in another form
    (made(config="paper"), "config .*'paper'"),
    (made(config={"beta": 7.5}), "config must be a SELConfig.*7.5"),
    (made(lr=PAPER), "^lr .*SELConfig"),
    (lambda: sel.SELConfig("paper"), "beta .*'paper'"),
    (lambda: sel.SELLinear(8, 4, 7.5), "bias .*7.5"),
    (lambda: sel.stats(network(), PAPER), "optimizer .*SELConfig"),
    (lambda: annealed(sel.convert(network(), PAPER), PAPER), "total_steps .*SELConfig"),
    # parameters and groups
    *(
        (lambda of=of: ADAMW(of(network())), "params must be the model itself, .* or its .*param_groups")
        for of in PARAMETERS
    ),
    (lambda: ADAMW(network().parameters(), config=PAPER), "params must be the model itself"),
    (lambda: ADAMW([{"params": list(network().parameters())}]), "params .* curved group, got dict"),
    (lambda: ADAMW(sel.convert(network())), "nothing to curve|curved group"),
    (lambda: ADAMW(sel.param_groups(sel.convert(network()), lr=1e-3)), "params .*model itself.*curved group"),
    (lambda: ADAMW(sel.param_groups((model := network())[1], whole=model)), "params .*curved group"),
    (repeated, "more than one parameter group"),
    (lambda: ADAMW(sel.param_groups(network()), config=PAPER), "config .* model"),
    (added(params=[PHASE]), "phase .*complex64"),
    (added(params=[Q], role="curved"), "axes"),
    (added(params=[Q], max_grad_norm=0.1), "max_grad_norm .*1.0.*0.1"),
    (added(params=[Q, ("r", nn.Parameter(torch.zeros(2, 2)))], **CURVED, **LISTS), "axes .*1 for 2"),
    (added(params=[Q], lr=-1.0), "lr .*-1.0"),
    (replaced("cube", 2, 2, 2), "cube .*20, 12.*2, 2, 2"),
    (replaced("0.weight", 6, 20), "0.weight .*20, 12.*6, 20"),
    (infinite, "3.weight.* 1 of 120 .*finite"),
    (sparse, "words.weight.*sparse=False"),
    # param_groups
    (grouped(config=ANNEALED.from_dict({"e": {"pattern": "row"}})), "lr must be given"),
    (grouped(weight_decay=True), "weight_decay .*True"),
    (lambda: sel.routing(network(), weight_decay=-1), "weight_decay .*-1"),
    (grouped(lr={"4.*": 1e-3, "*": 1e-3}), r"lr .*4\.\*"),
    (grouped(lr={"1.*": 1e-3}), r"lr .*every name, got none for '0\.weight'"),
    (grouped(lr={"*": 1e-3, "1.*": 2e-3}), r"lr pattern '1\.\*' .*that earlier ones leave"),
    (grouped(lr=[1e-3, 2e-3]), "lr .*0.001, 0.002"),
    (grouped(no_decay=["norm.*"]), "no_decay .*norm"),
    (grouped(no_decay="bias"), "no_decay .*'usual'.*'bias'"),
    (grouped(no_decay=[0]), r"no_decay .*\[0\]"),
    (grouped(no_decay=True), "no_decay .*True"),
    (grouped(whole=network()), "whole"),
    (lambda: sel.param_groups(nn.Sequential(nn.LayerNorm(4))), "nothing to curve"),
    (lambda: sel.param_groups(list(network().parameters())), "model .*Module, got list"),
    (lambda: sel.routing(None), "model .*Module, got NoneType"),
    (lambda: sel.stats(build(network())), "model .*Module, got SELAdamW"),
    (lambda: sel.fold(list(network())), "model .*Module, got list"),
    (lambda: sel.routing(network(), whole=list(network())), "whole .*Module, got list"),
    (grouped(whole="0"), "whole .*Module, got str"),
    *((lambda x=x: ADAMW(x), "params must be the model itself") for x in (None, PAPER, nn.Linear)),
    (lambda: build(network()).add_param_group([("params", [Q])]), "param_group .*dict.*list"),
    *((lambda x=x: sel.SELConfig.from_dict(x), "values .*dictionary, got") for x in (None, PAPER, [("beta", 2.0)])),
    (lambda: sel.preset("paper", l={"pattern": "rows"}), "l: pattern .*'rows'"),
    (lambda: sel.param_groups(sel.convert(network()), config=PAPER), "config .*converted"),
    (lambda: sel.functional.effective(Q[1], beta=torch.tensor(7.5, requires_grad=True)), "beta .*requires_grad"),
    # annealing, initialization
    (lambda: annealed(sel.convert(network(), PAPER)), "total"),
    (lambda: sel.anneal_scales(torch.optim.SGD(network().parameters()), 20), "param_groups"),
    (lambda: sel.init_(network(), PAPER, xavier="no"), "xavier .*'no'"),
    (lambda: sel.init_(network().to("meta"), PAPER), "model .*0.weight on the device 'meta'"),
    (
        lambda: sel.convert(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, dtype=torch.complex64))),
        "no layer to convert",
    ),
]


@pytest.mark.parametrize(("call", "message"), TABLE, ids=[f"{i}: {message}" for i, (_, message) in enumerate(TABLE)])
def test_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        call()
    assert len(str(error.value).splitlines()[0]) < 340  # not the repr of everything


def test_switches_that_are_off_are_accepted():
    edited(**dict.fromkeys(SWITCHES, False))()
