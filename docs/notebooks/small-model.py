# %% [markdown]
# # SEL and AdamW on a small model
#
# A byte-level model with two curved layers learns from Python's own reference manual. AdamW and `SELAdamW` train it
# at the same learning rates, from the same first weights, on the same batches. The question is always the same: is
# the best of one better than the best of the other?

# %%
import math
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from torch import nn

import symexplin as sel

text = torch.tensor(list("\n".join(topics.values()).encode()))
training, held_out = text[: 9 * len(text) // 10], text[9 * len(text) // 10 :]
CONTEXT, STEPS = 16, 200


def windows(data, number, seed):
    """Return `number` pieces of the text and the byte that follows each."""
    start = torch.randint(len(data) - CONTEXT, (number, 1), generator=torch.Generator().manual_seed(seed))
    return data[start + torch.arange(CONTEXT)], data[start[:, 0] + CONTEXT]


def network():
    """Return a model that reads 16 bytes and says what comes next."""
    torch.manual_seed(0)
    hidden = [nn.Linear(16 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU()]
    return nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), *hidden, nn.Linear(128, 256))


# %% [markdown]
# ## What is curved
#
# The two hidden layers are. The embedding and the output layer stay plain.

# %%
print(sel.routing(network()))

# %% [markdown]
# ## Train
#
# Warm-up and a cosine, clipping at 1, no weight decay. `SELAdamW` clips inside.


# %%
def train(curved, lr):
    """Return the held-out loss in nats per byte, the trained model and its optimizer."""
    model = network()
    if curved:
        optimizer = sel.SELAdamW(model, lr=lr, weight_decay=0.0, max_grad_norm=1.0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 30) * (1 + math.cos(math.pi * step / STEPS)) / 2
    )
    for step in range(STEPS):
        inputs, targets = windows(training, 64, step)
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
runs = {(curved, lr): train(curved, lr) for curved in (False, True) for lr in rates}

# %% [markdown]
# ## Compare each at its own best rate
#
# Look at the lowest point of each line, not at one rate. To the left, the curved line is often the lower one: there
# both want longer steps, and a curve lengthens them.

# %%
names = {False: "AdamW", True: "SELAdamW"}
for curved, name in names.items():
    losses = [runs[curved, lr][0] for lr in rates]
    plt.semilogx(rates, losses, "o-", label=name)
    print(f"{name}: best {min(losses):.3f} at lr {rates[losses.index(min(losses))]}")
plt.gcf().set_size_inches(5, 3)
plt.xticks(rates, rates, minor=False), plt.minorticks_off()
plt.xlabel("learning rate"), plt.ylabel("held-out loss, nats per byte")
plt.legend()
plt.show()

# %% [markdown]
# At its best rate one may end a little lower than the other. One seed of so small a model cannot tell whether a map
# helps. `symexplin compare` does it properly, and [where it helps](../explanation/where-it-helps.md) says what came of
# it.
#
# ## The weights
#
# The trained models differ in the tail: large weights took larger steps.

# %%
for curved, name in names.items():
    _, model, _ = runs[curved, 3e-3]
    weights = torch.cat([layer.weight.detach().flatten() for layer in (model[2], model[4])])
    plt.hist(weights.numpy(), bins=80, range=(-0.6, 0.6), log=True, histtype="step", label=name)
plt.gcf().set_size_inches(5, 3)
plt.xlabel("weight"), plt.ylabel("how many")
plt.legend()
plt.show()
_, model, optimizer = runs[True, 3e-3]
print({name: round(value, 3) for name, value in sel.stats(model, optimizer).items()})
