"""bfloat16 parameters without master copies: the loss, the state and the step of stochastic rounding.

    python benchmarks/rounding.py --steps 1000 --seeds 0 1 2

Trains a small transformer whose parameters are bfloat16 on the sources of Python's standard library, as bytes, with
float32 master copies, with the same in another order of the data, and with stochastic rounding. Stochastic rounding
costs nothing if its distance from the master copies is that of a reshuffle.
"""

import argparse
import statistics
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import symexplin as sel
from symexplin.lab.config import ModelConfig
from symexplin.lab.model import Transformer

BATCH, CONTEXT, HELD_OUT, LR = 8, 128, 64, 2e-3
# What each variant changes: rounding, and what is added to the seed of the data.
VARIANTS = {"masters": (False, 0), "masters, reshuffled": (False, 1000), "stochastic rounding": (True, 0)}


class Result(NamedTuple):
    """The held-out loss, the bytes of state per parameter, and the median time of an optimizer step in ms."""

    loss: float
    state: float
    step: float


def corpus() -> Tensor:
    """Return the bytes of the standard library's modules, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def batch(tokens: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences from random places, and the same one token later."""
    starts = torch.randint(len(tokens) - CONTEXT - 1, (size,), generator=generator)
    found = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts.tolist()])
    return found[:, :-1], found[:, 1:]


def train(tokens: Tensor, variant: str, seed: int, steps: int) -> Result:
    """Train one model, and evaluate it on the last tenth of the tokens."""
    rounds, shift = VARIANTS[variant]
    cut = len(tokens) * 9 // 10
    model = Transformer(ModelConfig(width=128, depth=2, heads=4, context=CONTEXT), torch.Generator().manual_seed(seed))
    model.bfloat16()
    optimizer = sel.SELAdamW(model, lr=LR, max_grad_norm=1.0, stochastic_rounding=rounds)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 100, 1 - step / steps))
    generator, times = torch.Generator().manual_seed(seed + shift), []
    for _ in range(steps):
        model(*batch(tokens[:cut], BATCH, generator)).backward()
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
        optimizer.zero_grad()
        schedule.step()
    held_out = torch.Generator().manual_seed(0)
    with torch.no_grad():
        losses = [float(model(*batch(tokens[cut:], BATCH, held_out))) for _ in range(HELD_OUT)]
    tensors = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    size = sum(tensor.nbytes for tensor in tensors) / sum(parameter.numel() for parameter in model.parameters())
    return Result(statistics.mean(losses), size, 1e3 * statistics.median(times))


def main() -> None:
    """Print every run, and the differences from the master copies by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    tokens, losses = corpus(), {name: [] for name in VARIANTS}
    for seed in options.seeds:
        for name in VARIANTS:
            result = train(tokens, name, seed, options.steps)
            losses[name].append(result.loss)
            numbers = f"loss {result.loss:.4f}, state {result.state:.2f} bytes, step {result.step:.2f} ms"
            print(f"seed {seed}, {name}: {numbers}", flush=True)
    for name in list(VARIANTS)[1:]:
        differences = [b - a for a, b in zip(losses["masters"], losses[name], strict=True)]
        each = ", ".join(f"{difference:+.4f}" for difference in differences)
        print(f"{name} - masters: {statistics.mean(differences):+.4f} ({each})")


if __name__ == "__main__":
    main()
