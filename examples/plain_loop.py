"""Train with your own loop: accumulation, any scheduler, an average of the weights, checkpoints.

    python examples/plain_loop.py --out runs/plain

The same command resumes a run that stopped. With more `--steps` it continues; the schedule ends at `--total-steps`.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import symexplin as sel

MICROBATCHES, BATCH, EVERY = 2, 16, 20


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a step, the same in every process."""
    inputs = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.roll(1, dims=1)[:, :4].tanh()


def main() -> None:
    """Train, print the loss and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--total-steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).to(arguments.device)
    print(sel.routing(model))  # the curved parameters, with reasons
    optimizer = sel.SELAdamW(model, lr=1e-3, weight_decay=0.01, max_grad_norm=1.0)
    print(optimizer)  # the map and the rates
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=arguments.total_steps)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average}

    start, last = 0, arguments.out / "last.pt"
    if last.exists():
        saved = torch.load(last, map_location=arguments.device, weights_only=True)
        start = saved["step"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    for step in range(start, arguments.steps):
        losses = []
        for inputs, targets in zip(
            *(part.to(arguments.device).chunk(MICROBATCHES) for part in batch(step)), strict=True
        ):
            loss = nn.functional.mse_loss(model(inputs), targets) / MICROBATCHES
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()  # clips the raw gradients
        scheduler.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        if (step + 1) % EVERY and step + 1 < arguments.steps:
            continue
        figures = {"loss": float(sum(losses)), "norm": float(optimizer.grad_norm), **sel.stats(model, optimizer)}
        print(step + 1, {name: round(value, 4) for name, value in figures.items()})
        arguments.out.mkdir(parents=True, exist_ok=True)
        state = {"step": step + 1} | {name: part.state_dict() for name, part in parts.items()}
        torch.save(state, last.with_suffix(".new"))
        last.with_suffix(".new").replace(last)  # atomic
    torch.save(model.state_dict(), arguments.out / "model.pt")  # ordinary weights, usable without SEL


if __name__ == "__main__":
    main()
