# %% [markdown]
# # SEL and AdamW on a small model
#
# A byte-level model with two curved layers learns from Python's own reference manual. AdamW and `SELAdamW` train it
# at the same learning rates and with the same three seeds: the same initial weights, the same batches. Is the best of
# one better than the best of the other?

# %%
import math
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from torch import nn

import symexplin as sel

text = torch.tensor(list("\n".join(topics.values()).encode()))
training, held_out = text[: 9 * len(text) // 10], text[9 * len(text) // 10 :]
CONTEXT, STEPS, SEEDS = 16, 200, (0, 1, 2)


def windows(data, number, seed):
    """Return `number` windows of the text and the byte that follows each."""
    start = torch.randint(len(data) - CONTEXT, (number, 1), generator=torch.Generator().manual_seed(seed))
    return data[start + torch.arange(CONTEXT)], data[start[:, 0] + CONTEXT]


def network(seed=0):
    """Return a model that reads 16 bytes and predicts the next one."""
    torch.manual_seed(seed)
    hidden = [nn.Linear(16 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU()]
    return nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), *hidden, nn.Linear(128, 256))


# %% [markdown]
# ## What is curved
#
# The two hidden layers are curved. The embedding and the output layer stay plain.

# %%
print(sel.routing(network()))

# %% [markdown]
# ## Train
#
# Warmup and cosine decay, clipping at 1, no weight decay. `SELAdamW` clips inside.


# %%
def train(curved, lr, seed):
    """Return the held-out loss in nats per byte, the trained model and its optimizer."""
    model = network(seed)
    if curved:
        optimizer = sel.SELAdamW(model, lr=lr, weight_decay=0.0, max_grad_norm=1.0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 30) * (1 + math.cos(math.pi * step / STEPS)) / 2
    )
    for step in range(STEPS):
        inputs, targets = windows(training, 64, 1000 * seed + step)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if not curved:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    inputs, targets = windows(held_out, 4096, 1)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(inputs), targets)), model, optimizer


# %%
rates = [3e-3, 6e-3, 1.2e-2, 2.4e-2]
runs = {(curved, lr, seed): train(curved, lr, seed) for curved in (False, True) for lr in rates for seed in SEEDS}

# %% [markdown]
# ## Compare each at its own best rate
#
# The lines are means over the seeds, the dots single seeds. Look at the lowest point of each line, not at one rate. On
# the left, the curved line is often lower: both need longer steps there, and a curve lengthens them.

# %%
names = {False: "AdamW", True: "SELAdamW"}
best = {}
for curved, name in names.items():
    losses = torch.tensor([[runs[curved, lr, seed][0] for seed in SEEDS] for lr in rates])
    means = losses.mean(1)
    (line,) = plt.semilogx(rates, means, "-", label=name)
    plt.plot(rates, losses, ".", color=line.get_color())
    best[curved] = losses[means.argmin()]
    print(f"{name}: best {means.min():.3f} at lr {rates[means.argmin()]}")
plt.gcf().set_size_inches(5, 3)
plt.xticks(rates, rates, minor=False), plt.minorticks_off()
plt.xlabel("learning rate"), plt.ylabel("held-out loss, nats per byte")
plt.legend()
plt.show()
difference = best[True] - best[False]
half = 9.92 * difference.std() / len(SEEDS) ** 0.5  # Student's t for 99% and three seeds
low, high = difference.mean() - half, difference.mean() + half
print(f"difference {difference.mean():+.3f}, 99% interval {low:+.3f} to {high:+.3f}")

# %% [markdown]
# If the interval contains zero, these runs detect no difference, whichever way its mean points. Three seeds of so small
# a model detect only large ones. `symexplin compare` does the same with more seeds, and
# [evidence](../explanation/evidence.md) has the results.
#
# ## The weights
#
# The trained models differ in the tail, because large weights took larger steps. All seeds together:

# %%
for curved, name in names.items():
    models = [runs[curved, 3e-3, seed][1] for seed in SEEDS]
    weights = torch.cat([model[i].weight.detach().flatten() for model in models for i in (2, 4)])
    plt.hist(weights.numpy(), bins=80, range=(-0.6, 0.6), log=True, histtype="step", label=name)
plt.gcf().set_size_inches(5, 3)
plt.xlabel("weight"), plt.ylabel("count")
plt.legend()
plt.show()
_, model, optimizer = runs[True, 3e-3, 0]
print({name: round(value, 3) for name, value in sel.stats(model, optimizer).items()})
