"""Convolutions: which of them should be curved in ResNet and ConvNeXt, on classes of synthetic images.

    python benchmarks/images.py --out results/images

Ten classes of small images: a smooth pattern each, shifted, scaled and in noise. 100 steps of 64 images by AdamW, also
with another rate of ConvNeXt's linear layers, and by SELAdamW, which curves all convolutions, or leaves the first one,
the depthwise ones or all of them plain. Three seeds choose each arm's best of six learning rates, sixteen others
measure its loss. Twenty minutes on one core.
"""

import argparse
import fnmatch
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
RATES = (1.1e-2, 1.6e-2, 2.3e-2, 3.2e-2, 4.5e-2, 6.4e-2)
CHOOSE, MEASURE = range(3), range(10, 26)  # seeds
SIZES = {
    "ResNet": {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1], "layer_type": "basic"},
    "ConvNext": {"hidden_sizes": [16, 32, 64], "depths": [1, 1, 2], "num_stages": 3, "patch_size": 2},
}


class Arm(NamedTuple):
    """AdamW, or the default map."""

    excluded: tuple[str, ...] | None = None  # patterns of what stays plain; None: AdamW
    factor: float = 1.0  # the rate of linear layers beside that of all others


_LINEAR = "*pwconv*.weight"
_CONVOLUTIONS = ("*patch_embeddings*", "*dwconv*", "*downsampling*")
ARMS = {
    "ResNet": {"AdamW": Arm(), "all": Arm(()), "all but the first": Arm(("*embedder.embedder*",))},
    "ConvNext": {
        "AdamW": Arm(),
        **{f"AdamW, linear layers x {factor:g}": Arm(factor=factor) for factor in (1.6, 3.0, 4.2, 6.0)},
        "all": Arm(()),
        "all but the first": Arm(("*patch_embeddings*",)),
        "all but depthwise": Arm(("*dwconv*",)),
        "linear layers": Arm(_CONVOLUTIONS),
        **{f"linear layers, x {factor:g}": Arm(_CONVOLUTIONS, factor) for factor in (2.2, 3.0, 4.2)},
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


def optimizer_of(model: nn.Module, arm: Arm, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of an arm."""
    rates = {"*": lr} if arm.factor == 1 else {_LINEAR: arm.factor * lr, "*": lr}
    if arm.excluded is not None:
        return sel.SELAdamW(model, lr=rates, weight_decay=0.01, config=sel.SELConfig(exclude=arm.excluded))
    groups = [
        {"params": [parameter], "lr": next(rates[pattern] for pattern in rates if fnmatch.fnmatch(name, pattern))}
        for name, parameter in model.named_parameters()
    ]
    return torch.optim.AdamW(groups, weight_decay=0.01)


def loss_of(kind: str, arm: Arm, lr: float, seed: int) -> float:
    """Train, and return the loss on held-out images."""
    model = network(kind, seed).train()
    optimizer = optimizer_of(model, arm, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1.0) * (1 - step / STEPS))
    pixels, labels = images(BATCH * STEPS, seed=1 + seed)
    for x, y in zip(torch.split(pixels, BATCH), torch.split(labels, BATCH), strict=True):
        optimizer.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(model(pixel_values=x).logits, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    pixels, labels = images(HELD_OUT, seed=1000 + seed)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.eval()(pixel_values=pixels).logits, labels))


def rows() -> Iterator[dict[str, Any]]:
    """Yield the row of each network and arm: its best rate, its loss, and the difference from the rival's.

    The rival is the AdamW with the best rate of the linear layers, by the seeds that choose.
    """
    for kind, arms in ARMS.items():
        tried = {
            (name, lr): statistics.fmean(loss_of(kind, arm, lr, seed) for seed in CHOOSE)
            for name, arm in arms.items()
            for lr in tqdm(RATES, desc=f"{kind}, {name}")
        }
        best = {name: min((tried[name, lr], lr) for lr in RATES)[1] for name in arms}
        losses = {
            name: [loss_of(kind, arm, best[name], seed) for seed in MEASURE]
            for name, arm in tqdm(arms.items(), desc=kind)
        }
        rival = min((name for name in arms if arms[name].excluded is None), key=lambda name: tried[name, best[name]])
        for name, lr in best.items():
            differences = [a - b for a, b in zip(losses[name], losses[rival], strict=True)]
            low, high = interval_of(differences, CONFIDENCE)
            yield {
                **{"network": kind, "arm": name, "lr": lr, "seeds": len(MEASURE)},
                **{"loss": statistics.fmean(losses[name]), "rival": rival},
                **{"difference": statistics.fmean(differences), "low": low, "high": high},
                **{f"loss at {rate:g}": tried[name, rate] for rate in RATES},
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
            "{network:9} {arm:28} lr {lr:<6g} {loss:.4f}  {difference:+.4f} ({low:+.4f} to {high:+.4f})".format(**row)
        )


if __name__ == "__main__":
    main()
