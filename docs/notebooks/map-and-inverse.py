# %% [markdown]
# # The map and its inverse
#
# Each weight of a linear layer has a raw weight *w*, which the optimizer trains. The model holds the effective weight,
# which the map computes from it. The default map (mode `exp_only`) is
#
#     w_eff = sign(w) (exp(beta |w|) - 1)/beta
#
# and the paper's main mode, `mismatch`, adds (l/beta) |w|. This page draws both, their slope and their inverse.

# %%
import matplotlib.pyplot as plt
import torch

import symexplin as sel

w = torch.linspace(-0.4, 0.4, 401, dtype=torch.float64, requires_grad=True)
beta = sel.functional.auto_beta(1024)
modes = {"the default map": {"mode": "exp_only"}, "mismatch": {"mode": "mismatch"}}
print(f"beta at width 1024: {beta}")

# %% [markdown]
# ## The curve and its slope
#
# The slope is how far the effective weight moves per step of the raw weight. The default map has slope 1 at zero and
# 9.5 at |w| = 0.3. The second term of the mismatch map adds 1/beta to the slope on the right and subtracts it on the
# left.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for name, mode in modes.items():
    w_eff = sel.functional.effective(w, beta=beta, **mode)
    (slope,) = torch.autograd.grad(w_eff.sum(), w)
    left.plot(w.detach(), w_eff.detach(), label=name)
    right.plot(w.detach(), slope, label=name)
left.plot(w.detach(), w.detach(), ":", color="gray", label="no map")
left.set(xlabel="raw weight w", ylabel="effective weight", ylim=(-2, 2))
right.set(xlabel="raw weight w", ylabel="slope", yscale="log")
left.legend()
plt.show()

# %% [markdown]
# ## The slope as a function of the effective weight
#
# For the default map the slope, exp(beta |w|), is 1 + beta |w_eff|: a straight line in the effective weight. A weight
# of size 1/beta takes steps twice as long as those of a weight near zero.

# %%
w_eff = sel.functional.effective(w, beta=beta)
(slope,) = torch.autograd.grad(w_eff.sum(), w)
print(f"largest difference to 1 + beta |w_eff|: {(slope - 1 - beta * w_eff.abs()).abs().max():.1e}")
assert torch.allclose(slope, 1 + beta * w_eff.abs())

# %% [markdown]
# ## The inverse
#
# Training starts from the model's own weights, so the map must be inverted. The default map has a closed inverse,
# log(1 + beta |w_eff|)/beta; the mismatch map uses Newton's method. Both are exact up to rounding, over six powers of
# ten and both signs. Points at 1e-17 have no error at all.

# %%
targets = torch.logspace(-5, 1, 200, dtype=torch.float64)
targets = torch.cat([-targets, targets])
for name, mode in modes.items():
    raw = sel.functional.inverse(targets, beta=beta, **mode)
    error = (sel.functional.effective(raw, beta=beta, **mode) - targets).abs() / targets.abs()
    plt.loglog(targets[200:], error[200:].clamp_min(1e-17), ".", label=name)
    assert error.max() < 1e-13
plt.gcf().set_size_inches(5, 3)
plt.xlabel("effective weight"), plt.ylabel("relative error of map(inverse)")
plt.legend()
plt.show()

# %% [markdown]
# ## In the optimizer
#
# Because the inverse is closed, `SELAdamW` stores no raw weights. Building it changes no weight, and its state is
# AdamW's.

# %%
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
before = model.weight.detach().clone()
optimizer = sel.SELAdamW(model, lr=1e-2)
print(optimizer)
print(f"largest change of a weight: {(model.weight - before).abs().max():.0e}")
model(torch.randn(8, 64)).square().mean().backward()
optimizer.step()
print(f"state of a weight: {', '.join(optimizer.state[model.weight])}")
