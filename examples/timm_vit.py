"""timm: train a tiny vision transformer in curved weight space, through timm's optimizer factory and scheduler.

    python examples/timm_vit.py --out runs/vit              # again: resumes from the last checkpoint

`param_group_fn` tells the optimizer the parameters' names, by which it chooses the curved ones. Weight decay is timm's:
none for biases, norms and what the model names. The optimizer clips, so leave timm's `--clip-grad` out. The images are
made here: stripes of four directions, under noise.
"""

import argparse
import functools
import math
from pathlib import Path

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor
from torch.nn import functional as F

import symexplin as sel

SIZE, CLASSES = 16, 4


def tiny_model() -> torch.nn.Module:
    """Return a vision transformer of two blocks."""
    shape = {"img_size": SIZE, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **shape)


def batch(step: int, number: int = 32) -> tuple[Tensor, Tensor]:
    """Return images of stripes with noise, and the numbers of their directions."""
    generator = torch.Generator().manual_seed(step)
    classes = torch.randint(CLASSES, (number,), generator=generator)
    phases, angles = 2 * math.pi * torch.rand(number, generator=generator), classes * math.pi / CLASSES
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = angles.cos()[:, None, None] * rows + angles.sin()[:, None, None] * columns
    stripes = torch.sin(along * math.pi / 3 + phases[:, None, None])
    return stripes[:, None] + 0.5 * torch.randn(number, 3, SIZE, SIZE, generator=generator), classes


def main() -> None:
    """Train, save and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layer-decay", type=float, help="factor of the learning rate per layer, for fine-tuning")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = tiny_model().to(options.device)
    # AdamW: create_optimizer_v2(model, "adamw", lr=2e-3, weight_decay=0.05, layer_decay=options.layer_decay)
    groups = functools.partial(sel.timm.param_groups, layer_decay=options.layer_decay)
    settings = {"lr": 2e-3, "weight_decay": 0.05, "max_grad_norm": 1.0}
    optimizer = create_optimizer_v2(model, "seladamw", param_group_fn=groups, **settings)
    schedule = CosineLRScheduler(optimizer, t_initial=options.steps, warmup_t=10, t_in_epochs=False)
    first, last = 0, options.out / "last.pt"
    if last.exists():
        saved = torch.load(last, map_location=options.device, weights_only=True)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])  # with the learning rate of the next step
    for step in range(first, options.steps):
        images, classes = (part.to(options.device) for part in batch(step))
        loss = F.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step_update(step + 1)
        if step % 20 == 0 or step + 1 == options.steps:
            print(f"step {step + 1} loss {loss.item():.4f} norm {optimizer.grad_norm:.4f}")
            options.out.mkdir(parents=True, exist_ok=True)
            state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, last.with_suffix(".new"))
            last.with_suffix(".new").replace(last)  # atomic

    torch.save(model.state_dict(), options.out / "model.pt")  # ordinary weights
    loaded = tiny_model().eval()
    loaded.load_state_dict(torch.load(options.out / "model.pt", map_location="cpu", weights_only=True))
    images, classes = batch(-1, 512)
    print(f"accuracy {(loaded(images).argmax(-1) == classes).float().mean():.3f}")


if __name__ == "__main__":
    main()
