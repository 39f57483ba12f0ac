"""Few of many inputs matter: find a sparse linear target from few examples.

    python benchmarks/sparse_target.py --out results/sparse-target

1,000 inputs of which 10 matter, 200 noisy examples, 500 steps. Every family has 24 settings, six learning rates times
four of its own. Three seeds choose one, eight fresh seeds measure it. The error is ||w - w*||^2, the held-out loss
above the noise. About ten minutes on a core.
"""

import argparse
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

import symexplin as sel
from symexplin.experiments.comparison import interval_of
from symexplin.experiments.measures import CONFIDENCE
from symexplin.lab.config import TrainConfig
from symexplin.lab.files import write_csv
from symexplin.lab.provenance import provenance
from symexplin.lab.sparse import Sparsifier

INPUTS, RELEVANT, EXAMPLES, NOISE = 1000, 10, 200, 0.3
STEPS, BATCH, START = 500, 32, 0.01
CHOOSE, MEASURE = range(3), range(10, 18)
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)
SLOW_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # an exponential lengthens the steps
REFERENCE = "AdamW + log-sum"  # what the others are compared with: it needs no map


class Setting(NamedTuple):
    """A map or none, and what is done to the weights after each step."""

    mode: str = ""
    beta: float = 1.0
    decay: float = 0.0
    l1: float = 0.0
    l1_falloff: float = 0.0
    sparsity: float = 0.0

    def __str__(self) -> str:
        """Return what differs from AdamW without decay."""
        pairs = zip(self._fields, self, Setting(), strict=True)
        return ", ".join(f"{name} {value}" for name, value, usual in pairs if value != usual)


FAMILIES = {
    REFERENCE: [Setting(l1=l1, l1_falloff=falloff) for l1 in (0.4, 0.8) for falloff in (30.0, 100.0)],
    "AdamW": [Setting(decay=decay) for decay in (0.0, 0.1, 1.0, 10.0)],
    "AdamW + L1": [Setting(l1=l1) for l1 in (0.05, 0.1, 0.2, 0.4)],
    "Gradual pruning": [Setting(sparsity=share) for share in (0.9, 0.97, 0.985, 0.99)],
    "Exponential": [Setting("exp_only", beta) for beta in (30.0, 100.0, 300.0, 1000.0)],
    "Exponential + L1": [Setting("exp_only", beta, l1=l1) for beta in (10.0, 30.0) for l1 in (0.4, 0.8)],
}


def problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's weights, the inputs and the noisy outputs."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.zeros(INPUTS)
    target[torch.randperm(INPUTS, generator=generator)[:RELEVANT]] = torch.randn(RELEVANT, generator=generator)
    inputs = torch.randn(EXAMPLES, INPUTS, generator=generator)
    return target, inputs, inputs @ target + NOISE * torch.randn(EXAMPLES, generator=generator)


def error_of(setting: Setting, lr: float, seed: int) -> float:
    """Train one linear layer and return ||w - w*||^2, infinite if it diverged."""
    target, inputs, outputs = problem(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    layer = nn.Linear(INPUTS, 1, bias=False)
    nn.init.uniform_(layer.weight, -START, START, generator=generator)
    optimizer: torch.optim.Optimizer
    if setting.mode:
        config = sel.SELConfig(mode=setting.mode, beta=setting.beta, include=("weight",))
        optimizer = sel.SELAdamW(layer, lr=lr, weight_decay=setting.decay, config=config)
    else:
        optimizer = torch.optim.AdamW(layer.parameters(), lr=lr, weight_decay=setting.decay)
    train = TrainConfig(steps=STEPS, l1=setting.l1, l1_falloff=setting.l1_falloff, sparsity=setting.sparsity)
    sparsifier = Sparsifier([layer.weight.detach()], train)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = now = lr * (1 - step / STEPS)
        rows = torch.randint(EXAMPLES, (BATCH,), generator=generator)
        loss = (layer(inputs[rows])[:, 0] - outputs[rows]).square().mean()
        if not loss.isfinite():
            return math.inf
        optimizer.zero_grad()
        loss.backward()
        sparsifier.before_step()
        optimizer.step()
        sparsifier.after_step(step + 1, now)
    error = float((layer.weight.detach()[0] - target).square().sum())
    return error if math.isfinite(error) else math.inf


def rows() -> Iterator[dict[str, Any]]:
    """Yield the row of each family: its best setting, its error with fresh seeds, and the difference from REFERENCE."""
    reference: list[float] = []
    for family, settings in tqdm(FAMILIES.items()):
        rates = SLOW_RATES if settings[0].mode == "exp_only" else RATES
        tried = [(setting, lr) for setting in settings for lr in rates]
        setting, lr = min(tried, key=lambda one: statistics.fmean(error_of(one[0], one[1], seed) for seed in CHOOSE))
        errors = [error_of(setting, lr, seed) for seed in MEASURE]
        reference = reference or errors
        low, high = interval_of([a - b for a, b in zip(errors, reference, strict=True)], CONFIDENCE)
        yield {
            **{"family": family, "settings": len(tried), "best": str(setting), "lr": lr, "seeds": len(errors)},
            **{"error": statistics.fmean(errors), "lowest": min(errors), "highest": max(errors)},
            **{"difference": statistics.fmean(errors) - statistics.fmean(reference), "low": low, "high": high},
        }


def main() -> None:
    """Write OUT/table.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)  # before ten minutes of training
    torch.set_num_threads(1)
    place = provenance()
    facts = {key: place[key] for key in ("commit", "processor", "torch")}
    found = [row | facts for row in rows()]
    write_csv(out / "table.csv", found)
    for row in found:
        print(f"{row['family']:18} {row['error']:8.4f} ({row['lowest']:.4f} to {row['highest']:.4f})  {row['best']}")


if __name__ == "__main__":
    main()
