"""What a switch between AdamW and SELAdamW costs, whose moments are then new: the loss against the run that goes on.

    python benchmarks/switch.py --seeds 0 1 2      # four minutes a seed on one thread

A transformer of width 128 with four blocks trains for 300 of 600 steps on the Python sources of the interpreter, then
for 200 with each optimizer, on the same batches.
"""

import argparse
import copy
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import symexplin as sel
from symexplin.lab.config import ModelConfig
from symexplin.lab.model import Transformer

LR, CONTEXT, BATCH, STEPS, AT, OVER, WARMUP = 2e-3, 128, 8, 600, 300, 200, 60


def loss_of(model: nn.Module, text: Tensor, seed: int, size: int = BATCH) -> Tensor:
    """Return the loss of one batch."""
    starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def build(kind: str, model: nn.Module, begin: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Return an optimizer with a schedule that continues at step `begin`: warm-up, then linear decay."""
    optimizer: torch.optim.Optimizer
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    else:
        optimizer = sel.SELAdamW(model, lr=LR, weight_decay=0.01, max_grad_norm=1.0)

    def factor(step: int) -> float:
        return min((begin + step + 1) / WARMUP, (STEPS - begin - step) / (STEPS - WARMUP))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def losses(model: nn.Module, kind: str, built: tuple, text: Tensor, seed: int, steps: range) -> Iterator[float]:
    """Train; yield the losses."""
    optimizer, schedule = built
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, text, 100_000 * seed + step)
        loss.backward()
        if kind == "adamw":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield float(loss.detach())


def main() -> None:
    """Print the differences by seed and switch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    text, held = data[: -len(data) // 20], data[-len(data) // 20 :]
    for seed in seeds:
        for kind, other in (("adamw", "sel"), ("sel", "adamw")):
            torch.manual_seed(seed)
            model = Transformer(ModelConfig(width=128, depth=4, heads=4, context=CONTEXT, vocab_size=256))
            built = build(kind, model, 0)
            list(losses(model, kind, built, text, seed, range(AT)))
            weights, found = copy.deepcopy(model.state_dict()), {}
            for name, branch in (("same", kind), (f"{kind} to {other}", other), (f"{kind}, new moments", kind)):
                model.load_state_dict(weights)
                after = built if name == "same" else build(branch, model, AT)
                train = torch.tensor(list(losses(model, branch, after, text, seed, range(AT, AT + OVER))))
                with torch.no_grad():
                    end = sum(float(loss_of(model, held, -i - 1, 32)) for i in range(4)) / 4
                found[name] = train, end
                ours, same = found[name], found["same"]
                first = float((ours[0] - same[0])[:10].mean())
                print(f"seed {seed} {name}: first 10 steps {first:+.4f}, held-out at the end {ours[1] - same[1]:+.4f}")


if __name__ == "__main__":
    main()
