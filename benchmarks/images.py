"""Convolutions: which of them should be curved in ResNet and ConvNeXt, on classes of synthetic images.

    python benchmarks/images.py --out results/images

Ten classes of small images: a smooth pattern each, shifted, scaled and in noise. 100 steps of 64 images by AdamW and by
SELAdamW, which curves all convolutions, or leaves the first layer or the depthwise ones plain. Three seeds choose each
arm's best of five learning rates, eight others measure its loss. About a quarter of an hour on two cores.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm

import symexplin as sel
from symexplin.experiments.comparison import interval_of
from symexplin.experiments.measures import CONFIDENCE
from symexplin.lab.files import write_csv
from symexplin.lab.provenance import provenance

CLASSES, SIDE, BATCH, STEPS, HELD_OUT = 10, 16, 64, 100, 1024
NOISE = 1.5  # of which the patterns have a deviation of one: few errors remain after the steps
RATES = (8e-3, 1.6e-2, 3.2e-2, 6.4e-2, 0.128)
CHOOSE, MEASURE = range(3), range(10, 18)  # seeds
SIZES = {
    "ResNet": {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1], "layer_type": "basic"},
    "ConvNext": {"hidden_sizes": [16, 32, 64], "depths": [1, 1, 2], "num_stages": 3, "patch_size": 2},
}
# By network and arm the patterns of what stays plain; None: AdamW.
ARMS: dict[str, dict[str, tuple[str, ...] | None]] = {
    "ResNet": {"AdamW": None, "all": (), "all but the first": ("*embedder.embedder*",)},
    "ConvNext": {
        **{"AdamW": None, "all": (), "all but the first": ("*patch_embeddings*",), "all but depthwise": ("*dwconv*",)},
        "linear layers": ("*patch_embeddings*", "*dwconv*", "*downsampling*"),
    },
}


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images and their classes.

    >>> pixels, labels = images(4, seed=0)
    >>> pixels.shape, labels.shape
    (torch.Size([4, 3, 16, 16]), torch.Size([4]))
    """
    coarse = torch.randn(CLASSES, 3, SIDE // 4, SIDE // 4, generator=torch.Generator().manual_seed(99))
    patterns = nn.functional.interpolate(coarse, SIDE, mode="bicubic")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    shifts = torch.randint(SIDE, (count, 2), generator=generator).tolist()
    moved = [torch.roll(patterns[label], shift, (1, 2)) for label, shift in zip(labels, shifts, strict=True)]
    contrast = 0.5 + torch.rand(count, 1, 1, 1, generator=generator)
    return torch.stack(moved) * contrast + NOISE * torch.randn(count, 3, SIDE, SIDE, generator=generator), labels


def network(kind: str, seed: int) -> nn.Module:
    """Return a small network of transformers."""
    config = getattr(transformers, f"{kind}Config")(num_labels=CLASSES, num_channels=3, **SIZES[kind])
    torch.manual_seed(seed)
    return getattr(transformers, f"{kind}ForImageClassification")(config)  # type: ignore[no-any-return]


def optimizer_of(model: nn.Module, kind: str, arm: str, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of an arm."""
    excluded = ARMS[kind][arm]
    if excluded is None:
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    return sel.SELAdamW(model, lr=lr, weight_decay=0.01, config=sel.SELConfig(exclude=excluded))


def loss_of(kind: str, arm: str, lr: float, seed: int, steps: int = STEPS) -> float:
    """Train, and return the loss on held-out images."""
    model = network(kind, seed).train()
    optimizer = optimizer_of(model, kind, arm, lr)
    pixels, labels = images(BATCH * steps, seed=1 + seed)
    for step, (x, y) in enumerate(zip(pixels.split(BATCH), labels.split(BATCH), strict=True)):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 20, 1.0) * (1 - step / steps)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixel_values=x).logits, y).backward()
        optimizer.step()
    pixels, labels = images(HELD_OUT, seed=1000 + seed)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.eval()(pixel_values=pixels).logits, labels))


def rows() -> Iterator[dict[str, Any]]:
    """Yield the row of each network and arm: its best rate, its loss, and the difference from AdamW's."""
    for kind, arms in ARMS.items():
        reference: list[float] = []
        for arm in arms:
            tried = {
                lr: statistics.fmean(loss_of(kind, arm, lr, seed) for seed in CHOOSE)
                for lr in tqdm(RATES, desc=f"{kind}, {arm}")
            }
            lr = min(tried, key=tried.__getitem__)
            losses = [loss_of(kind, arm, lr, seed) for seed in MEASURE]
            reference = reference or losses
            low, high = interval_of([a - b for a, b in zip(losses, reference, strict=True)], CONFIDENCE)
            yield {
                **{"network": kind, "curved": arm, "lr": lr, "seeds": len(losses), "loss": statistics.fmean(losses)},
                **{"difference": statistics.fmean(losses) - statistics.fmean(reference), "low": low, "high": high},
                **{f"loss at {rate:g}": loss for rate, loss in tried.items()},
            }


def main() -> None:
    """Write OUT/table.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)  # before minutes of training
    place = provenance()
    facts = {key: place[key] for key in ("commit", "processor", "torch")}
    found = [row | facts for row in rows()]
    write_csv(out / "table.csv", found)
    for row in found:
        print(
            "{network:9} {curved:18} lr {lr:<6g} {loss:.4f}  {difference:+.4f} ({low:+.4f} to {high:+.4f})".format(
                **row
            )
        )


if __name__ == "__main__":
    main()
