"""A small network, its training, a rule beside AdamW, and an independent reference: rules in float64, by autograd."""

import io
import math

import torch
from torch import nn

import symexplin as sel
from networks import strong

__all__ = [
    "PAPER",
    "RULE_CASES",
    "Reference",
    "SELSGD",
    "adamw",
    "assert_same_bits",
    "backward",
    "batch",
    "build",
    "network",
    "run_beside_reference",
    "same",
    "squares",
    "train",
]

PAPER = strong("paper")


def network(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 6)).to(dtype)


def batch(step, dtype=torch.float32):
    return torch.randn(16, 12, generator=torch.Generator().manual_seed(step)).to(dtype)


def backward(model, step):
    parameter = next(model.parameters())
    inputs = batch(step, parameter.dtype).to(parameter.device)
    found = model(inputs)
    (found if found.dtype == torch.float64 else found.float()).square().mean().backward()


def build(model, config=PAPER, lr=1e-2, kind=sel.SELAdamW, **kwargs):
    return kind(model, lr=lr, config=config, **{"total_steps": 100, "max_grad_norm": 1.0, **kwargs})


class SELSGD(sel.RawSpaceOptimizer):
    """SGD with momentum and decoupled decay."""

    moments = ("momentum_buffer",)

    def __init__(self, params, lr=1e-2, momentum=0.9, weight_decay=0.0, *, config=None, no_decay=(), **settings):
        rule = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, rule | settings, config, no_decay)

    def rule_(self, leaves, group):
        for leaf in leaves:
            buffer = leaf.moments["momentum_buffer"].mul_(group["momentum"]).add_(leaf.grad)
            leaf.decay_()
            leaf.value.sub_(buffer * leaf.lr)


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return model


def assert_same_bits(a, b):
    for (name, p), q in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert p.dtype == q.dtype, name
        assert torch.equal(torch.signbit(p), torch.signbit(q)), name  # -0.0 is not 0.0
        assert torch.equal(p, q), name


def same(a, b):
    """Whether two saved states are equal, as bytes."""
    files = []
    for state in (a, b):
        torch.save(state, file := io.BytesIO())
        files.append(file.getvalue())
    return files[0] == files[1]


def adamw(x, g, state, lr, decay, t, betas=(0.9, 0.999), eps=1e-8):
    """AdamW as its paper has it."""
    m = state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * g
    v = state["v"] = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * g * g
    return x * (1 - lr * decay) - lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)


K = {"e": (50.0, 8.0), "l": (50.0, 8.0), "m": (0.01, 0.5), "a": (0.01, 0.5), "n": (1.0, 1.0), "delta": (0.5, 0.5)}
DECAYED = ("raw", "plain", "e", "l")


def squares(inputs):
    """Return the loss of :func:`backward` as a function of the model's call."""
    return lambda call: call(inputs).square().mean()


class Reference:
    """A rule on the raw weights, scales and plain parameters of a float64 model, by autograd through Eq. 7.

    It takes the first values from the state of `optimizer`, raw weights of the default map from their closed form, and
    nothing else from the package. `K` are the multipliers of the roles by the paper, for the learning rate 3e-4.
    """

    def __init__(self, model, optimizer, beta, mode="mismatch", normalize=False, rule=adamw, lr=1e-2, decay=0.01):
        self.model, self.beta, self.mode, self.normalize = model, beta, mode, normalize
        self.rule, self.lr, self.decay, self.t, self.states = rule, lr, decay, 0, {}
        optimizer.create_state()
        self.parts = {name: {"plain": p.detach().double()} for name, p in model.named_parameters()}
        for name, curved in optimizer.curved():
            raw = curved.raw
            if not curved.tensors and mode == "exp_only":
                weight = model.get_parameter(name).detach().double()
                raw = weight.sign() * torch.log1p(beta * weight.abs()) / beta
            self.parts[name] = {key: value.double().clone() for key, value in {"raw": raw, **curved.tensors}.items()}

    def effective(self, parts):
        if "plain" in parts:
            return parts["plain"]
        w, one = parts["raw"], torch.ones((), dtype=torch.float64)

        def scale(role, empty=1.0):
            row, column = (parts.get(f"{role}_{side}", empty * one) for side in ("row", "column"))
            row = row[:, None] if w.dim() == 2 and row.dim() else row
            return row + column if role in "an" else row * column

        kappa = torch.exp(scale("a", 0.0)) if "a_row" in parts else self.beta * scale("m")
        d = kappa if self.normalize else self.beta
        side = torch.where(w < 0, -1.0, 1.0).double()  # not sign(w), whose derivative would leave zeros where they are
        exponential = side * scale("e") / d * torch.exp(-scale("n", 0.0)) * torch.expm1(kappa * side * w)
        linear = {"mismatch": scale("l") / d * w.abs(), "congruent": scale("l") / d * w, "exp_only": 0.0}[self.mode]
        value = exponential + linear
        return value + parts["delta_A"] @ parts["delta_B"] if "delta_A" in parts else value

    def step(self, loss_of, total=100, max_norm=1.0):
        """Take one step on ``loss_of(call)``; ``call(x)`` is the model at the present weights."""
        leaves = {(n, k): v.requires_grad_() for n, parts in self.parts.items() for k, v in parts.items()}
        weights = {name: self.effective(parts) for name, parts in self.parts.items()}
        loss = loss_of(lambda x: torch.func.functional_call(self.model, weights, x))
        grads = torch.autograd.grad(loss, list(leaves.values()))
        self.norm = torch.sqrt(sum(g.square().sum() for g in grads))
        clip = min(1.0, max_norm / (float(self.norm) + 1e-6))
        blend = 0.5 * (1.0 - math.cos(math.pi * min(self.t / total, 1.0)))
        self.t += 1
        for ((name, key), value), grad in zip(leaves.items(), grads, strict=True):
            role, lr = key.partition("_")[0], self.lr
            if role not in ("raw", "plain"):
                k0, k1 = K[role]
                lr = 3e-4 * k0 * (k1 / k0) ** blend / (self.beta if role == "delta" else 1.0)
            decay, state = self.decay if role in DECAYED else 0.0, self.states.setdefault((name, key), {})
            self.parts[name][key] = self.rule(value.detach(), clip * grad, state, lr, decay, self.t)

    def weights(self):
        return {name: self.effective(parts).detach() for name, parts in self.parts.items()}


# Maps with what :class:`Reference` needs of them for :func:`network`.
RULE_CASES = {
    "default": (sel.SELConfig(), {"beta": 7.5 * (20 / 1024) ** 0.5, "mode": "exp_only"}),
    "paper": (PAPER, {"beta": 7.5}),
}


def run_beside_reference(name, kind, rule, lr):
    """Take 30 steps in float64; return the model, one that was not trained, and the reference."""
    config, formula = RULE_CASES[name]
    model, twin = network(torch.float64), network(torch.float64)
    settings = {"lr": lr, "weight_decay": 0.1, "kind": kind}
    optimizer = build(model, config, **settings)
    reference = Reference(twin, build(twin, config, **settings), **formula, rule=rule, lr=lr, decay=0.1)
    for step in range(30):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        reference.step(squares(batch(step, torch.float64)))
    return model, twin, reference
