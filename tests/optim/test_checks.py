"""What is refused: one table of calls and what their errors say. test_state has the states that do not fit."""

import functools
import math
import re

import pytest
import torch
from torch import nn

import symexplin as sel
from training import PAPER, backward, build, network, train

NAN = float("nan")
ANNEALED = sel.preset("frozen", e=sel.Scale("row", k=(50, 8), base_lr=None))
ADAMW, MUON = sel.SELAdamW, sel.SELMuon


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
            train(network(), optimizer, 0)

    return call


def flattened():
    groups = sel.param_groups(network(), config=sel.preset("frozen"))
    groups[0]["params"][0] = ("0.weight", nn.Parameter(torch.zeros(6, 20)))
    ADAMW(groups).create_state()


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


def complex_model():
    model = network()
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    ADAMW(model)


def fsdp1():
    sel.param_groups(type("FullyShardedDataParallel", (nn.Module,), {})())


def switched(kind=torch.optim.AdamW, stepped=False, ours=ADAMW, over=None, **settings):
    def call():
        model = network()
        optimizer = build(model, kind=ours)
        if stepped:
            train(model, optimizer, 1)
        parameters = [p for i in over for p in model[i].parameters()] if over else model.parameters()
        sel.from_adamw(optimizer, kind(parameters, lr=1e-3, **settings))

    return call


def annealed(config=PAPER, total_steps=None, lr=3e-4):
    model = network() if config is None else sel.convert(network(), config)
    sel.anneal_scales(
        torch.optim.SGD(model.parameters() if config is None else sel.param_groups(model, lr=lr)), total_steps
    )


LIST = {
    "axes": ["oi"],
    "parts": [""],
    "position": [0],
    "shape": [(2, 2)],
    "config": sel.SELConfig().resolve(2).to_json(),
}
TABLE = [
    # settings of the rule
    (made(lr=-1.0), "lr must be a finite number >= 0, got -1.0"),
    (made(lr=None), "lr must be a finite number >= 0, got None"),
    (made(lr=torch.ones(2)), "lr must be a finite number >= 0, got tensor"),
    (made(lr="fast"), "lr must be a number, or {name pattern: number}, got 'fast'"),
    (made(eps=NAN), "eps must be a finite number >= 0, got nan"),
    (made(weight_decay=-0.1), "weight_decay must be a finite number >= 0, got -0.1"),
    *(
        (made(betas=b), "betas must be two numbers in [0, 1), got")
        for b in (None, (None, 0.9), ("a", 0.9), 0.9, (0.9, 1.0), (0.9,))
    ),
    (made(total_steps=0), "total_steps must be a whole number >= 1, got 0"),
    (made(total_steps=2.5), "total_steps must be a whole number >= 1, got 2.5"),
    (made(config=ANNEALED), 'total_steps must be given, a number or "later": e is annealed from k = 50 to 8'),
    (lambda: build(network()).set_total_steps(0), "total_steps must be a whole number >= 1, got 0"),
    (made(max_grad_norm=0.0), "max_grad_norm must be a positive finite number, got 0.0"),
    (made(moment_bits=4), "moment_bits must be 32 or 8, got 4"),
    (made(stochastic_rounding=1), "stochastic_rounding must be True or False, got 1"),
    (
        made(stochastic_rounding=True, config=sel.preset("frozen")),
        "stochastic_rounding must be False for a map that stores raw",
    ),
    (made(MUON, lr=-1.0), "lr must be a finite number >= 0, got -1.0"),
    (made(MUON, momentum=1.0), "momentum must be a number in [0, 1), got 1.0"),
    (made(MUON, nesterov=1), "nesterov must be True or False, got 1"),
    (made(MUON, ns_coefficients=(1.0, 2.0)), "ns_coefficients must be three numbers, got (1.0, 2.0)"),
    (made(MUON, ns_steps=100), "ns_steps must be a whole number <= 99, got 100"),
    (made(MUON, ns_eps=-1.0), "ns_eps must be a finite number >= 0, got -1.0"),
    (made(MUON, adjust_lr_fn="match_rms"), "; did you mean 'match_rms_adamw'?"),
    (made(MUON, split={"*qkv*": (4, 4)}), "split pattern '*qkv*' matches no parameter"),
    (made(MUON, split={"0.weight": (7, 4)}), "0.weight"),
    # unknown arguments and torch's switches
    (made(betta=0.9), "SELAdamW has no argument 'betta'; did you mean 'betas'?"),
    (made(MUON, momentun=0.9), "SELMuon has no argument 'momentun'; did you mean 'momentum'?"),
    (made(MUON, moment_bit=8), "SELMuon has no argument 'moment_bit'; did you mean 'moment_bits'?"),
    *(
        (call, f"{switch} must be left out, got True: SEL optimizers have no such switch")
        for switch in ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")
        for call in (made(**{switch: True}), made(MUON, **{switch: True}), edited(**{switch: True}))
    ),
    # parameters and groups
    (lambda: ADAMW(network().parameters()), "params has no curved group: pass a plain model itself"),
    (lambda: ADAMW(sel.param_groups(sel.convert(network()), lr=1e-3)), "params has no curved group"),
    (lambda: ADAMW(torch.zeros(2, 2)), "params argument given to the optimizer should be an iterable"),
    (lambda: ADAMW([]), "empty parameter list"),
    (repeated, "some parameters appear in more than one parameter group"),
    (lambda: ADAMW(sel.param_groups(network()), config=PAPER), "config and no_decay go with a model"),
    (complex_model, "phase must be real and floating point, got torch.complex64"),
    (added(params=[("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))]), "phase must be real and floating"),
    (added(params=[("q", nn.Parameter(torch.zeros(2, 2)))], role="curved"), "axes must have one entry per parameter"),
    (
        added(params=[("q", nn.Parameter(torch.zeros(2, 2)))], max_grad_norm=0.1),
        "max_grad_norm must be equal in all groups, 1.0",
    ),
    (
        added(params=[(n, nn.Parameter(torch.zeros(2, 2))) for n in "ab"], role="curved", **LIST),
        "axes must have one entry per parameter, got 1 for 2",
    ),
    (added(params=[("q", nn.Parameter(torch.zeros(2)))], lr=-1.0), "lr must be a finite number >= 0, got -1.0"),
    (flattened, "0.weight must have its shape (20, 12), got (6, 20): parameters flattened after the groups were built"),
    (infinite, "3.weight: cannot invert mode='mismatch' for 1 of 120 elements: the weights must be finite"),
    (sparse, "words.weight: sparse gradients are not supported: set sparse=False"),
    # param_groups
    (
        lambda: ADAMW(sel.param_groups(network(), weight_decay=NAN)),
        "weight_decay must be a finite number >= 0, got nan",
    ),
    (grouped(config=ANNEALED.from_dict({"e": {"pattern": "row"}})), "lr must be given"),
    (grouped(lr={"4.*": 1e-3, "*": 1e-3}), "lr pattern '4.*' matches no parameter"),
    (grouped(lr={"1.*": 1e-3}), "lr must have a pattern for every name, got none for '0.weight': end with '*'"),
    (grouped(lr={"*": 1e-3, "1.*": 2e-3}), "lr pattern '1.*' never counts, as the first pattern that matches"),
    (grouped(lr=[1e-3, 2e-3]), "lr must be a number, or {name pattern: number}, got [0.001, 0.002]"),
    (grouped(weight_decay={"nothing": 0.1}), "weight_decay pattern 'nothing' matches no parameter"),
    (grouped(no_decay=["norm.*"]), "no_decay pattern 'norm.*' matches no parameter; names are, for example"),
    (grouped(no_decay="bias"), "no_decay must be a sequence of patterns, or 'usual', got the string 'bias'"),
    (grouped(no_decay=[0]), "no_decay must have names or patterns of parameters, got [0]"),
    (grouped(no_decay=True), "no_decay must have names or patterns of parameters, got True"),
    (grouped(whole=network()), "model must be a part of whole"),
    (lambda: sel.param_groups(nn.Sequential(nn.LayerNorm(4))), "model has nothing to curve"),
    (lambda: sel.param_groups(sel.convert(network()), config=PAPER), "config must be None for a converted model"),
    (fsdp1, "model must not be wrapped by FullyShardedDataParallel (FSDP1)"),
    # switching from AdamW, annealing, suggesting a rate
    (switched(stepped=True), "optimizer must not have stepped or loaded a state: it would be lost"),
    (switched(amsgrad=True), "adamw must not use amsgrad"),
    (switched(maximize=True), "adamw must not use maximize"),
    (switched(torch.optim.Adam, weight_decay=0.1), "adamw must have decoupled weight decay"),
    (switched(torch.optim.SGD), "adamw must be a torch.optim.AdamW or Adam, got SGD"),
    (switched(over=(0, 3)), "adamw must be over the same parameters: it does not have 1.weight"),
    (switched(ours=MUON), "optimizer must be a symexplin.SELAdamW, got SELMuon"),
    (lambda: sel.to_adamw(MUON(network())), "optimizer must be a symexplin.SELAdamW, got SELMuon"),
    (
        lambda: sel.to_adamw(torch.optim.AdamW(network().parameters())),
        "optimizer must be a symexplin.SELAdamW, got AdamW",
    ),
    (annealed, "total must be the number of annealing steps"),
    (functools.partial(annealed, None, 20), "optimizer has no group with multipliers"),
    (lambda: sel.suggest_lr(network(), adamw_lr=0), "adamw_lr must be a positive finite number, got 0"),
    (lambda: sel.suggest_lr(nn.LayerNorm(4), adamw_lr=1e-3), "model has nothing to curve"),
]


@pytest.mark.parametrize(
    ("call", "message"), TABLE, ids=[f"{i}: {message[:40]}" for i, (_, message) in enumerate(TABLE)]
)
def test_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()


@pytest.mark.parametrize("switch", ["amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize"])
def test_switches_that_are_off_are_accepted(switch):
    made(**{switch: None})()
    made(MUON, **{switch: False})()
    edited(**{switch: False})()
