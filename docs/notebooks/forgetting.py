# %% [markdown]
# # Fine-tuning and forgetting
#
# A model trained on English text is trained further on Python code. Its loss on the code falls, and its loss on the
# English rises: it forgets. Does a map change how much? And what does the cheapest cure do, which needs no map?

# %%
import inspect
import math
import typing
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from torch import nn

import symexplin as sel

old, new = (torch.tensor(list(text.encode())) for text in ("\n".join(topics.values()), inspect.getsource(typing)))
CONTEXT, SEEDS = 16, (0, 1, 2)


def windows(data, number, seed):
    """Return `number` windows of the text and the byte that follows each."""
    start = torch.randint(len(data) - CONTEXT, (number, 1), generator=torch.Generator().manual_seed(seed))
    return data[start + torch.arange(CONTEXT)], data[start[:, 0] + CONTEXT]


def network(seed=0):
    """Return a model that reads 16 bytes and predicts the next one."""
    torch.manual_seed(seed)
    hidden = [nn.Linear(16 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU()]
    return nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), *hidden, nn.Linear(128, 256))


def train(model, optimizer, data, steps, seed):
    """Train with cosine decay to zero."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    for step in range(steps):
        inputs, targets = windows(data, 64, 1000 * seed + step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def losses(model):
    """Return the loss on the new text and on the old one, in nats per byte."""
    pairs = (windows(data, 4096, -1) for data in (new, old))
    return [float(nn.functional.cross_entropy(model(inputs), targets)) for inputs, targets in pairs]


# %% [markdown]
# ## Train on the old text
#
# Three models, one per seed.

# %%
bases = [network(seed) for seed in SEEDS]
for seed, base in zip(SEEDS, bases, strict=True):
    train(base, torch.optim.AdamW(base.parameters(), lr=3e-3), old, 300, seed)
    print("seed {}: new {:.3f}, old {:.3f}".format(seed, *losses(base)))

# %% [markdown]
# ## Train on the new text
#
# AdamW and `SELAdamW` at five learning rates each. A small rate learns little and forgets little, so we compare the
# old loss *at equal new loss*. beta follows from the standard deviation of the trained weights.

# %%
deviation = float(torch.cat([base[i].weight.detach().flatten() for base in bases for i in (2, 4)]).std())
curves = sel.SELConfig(beta=sel.functional.beta_for(deviation))
print(f"beta {curves.beta:.1f}")
tuned = {(name, seed): [] for name in ("AdamW", "SELAdamW") for seed in SEEDS}
for (name, seed), models in tuned.items():
    for lr in [1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3]:
        model = network()
        model.load_state_dict(bases[seed].state_dict())
        if name == "AdamW":
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        else:
            optimizer = sel.SELAdamW(model, lr=lr, weight_decay=0.0, config=curves)
        train(model, optimizer, new, 100, seed)
        models.append(model)

# %% [markdown]
# ## The cheapest cure
#
# Average the weights before and after, parameter by parameter. Each dotted line goes from the first model to the one
# tuned at the largest rate. This costs no training, and works with either optimizer, because both leave ordinary
# weights. There is one line per seed.


# %%
def between(base, model, share):
    """Return the model whose weights lie between the first and the tuned ones."""
    mixed = network()
    first, last = base.state_dict(), model.state_dict()
    mixed.load_state_dict({name: torch.lerp(first[name], last[name], share) for name in first})
    return mixed


for (name, seed), models in tuned.items():
    color, label = {"AdamW": "C0", "SELAdamW": "C1"}[name], name if seed == 0 else None
    plt.plot(*zip(*(losses(model) for model in models), strict=True), ".-", color=color, label=label)
    mixed = [losses(between(bases[seed], models[-1], share)) for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    plt.plot(*zip(*mixed, strict=True), ":", color=color, label=label and f"{name}, averaged")
plt.gcf().set_size_inches(5.5, 3.5)
plt.xlabel("loss on the new text"), plt.ylabel("loss on the old text")
plt.legend()
plt.show()

# %% [markdown]
# Lower and further left is better. Averaging the weights gains more than the distance between the optimizers. In a
# larger experiment, with every method at its best and averaged, we detected no difference between them:
# [fine-tune without forgetting](../how-to/fine-tune.md).
