"""Train a small GPT-2 on characters with a loop in nanoGPT's manner. The same command continues a run that stopped.

    python examples/nanogpt_style.py --out runs/nanogpt --text your.txt

It also shows what `symexplin compare --command` needs of a script: a choice of optimizer, and the loss in result.json.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import symexplin as sel

WARMUP, CONTEXT, BATCH, ACCUMULATION, EVERY = 10, 32, 8, 2, 20


def batches(data: Tensor, seed: int, number: int) -> list[Tensor]:
    """Return windows of the data, the same for the same seed: a resumed run continues with the right ones."""
    starts = torch.randint(len(data) - CONTEXT, (number, BATCH), generator=torch.Generator().manual_seed(seed))
    return [torch.stack([data[i : i + CONTEXT] for i in row]) for row in starts.tolist()]


def rate(lr: float, step: int, steps: int) -> float:
    """Return the learning rate: linear warm-up, then a cosine to a tenth."""
    if step < WARMUP:
        return lr * (step + 1) / WARMUP
    return lr * (0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / max(steps - WARMUP, 1)))


def main() -> None:
    """Train, evaluate and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a text file; default: this script")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--optimizer", choices=["adamw", "sel", "paper"], default="sel")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    index = {letter: i for i, letter in enumerate(sorted(set(text)))}
    data = torch.tensor([index[letter] for letter in text])
    training, held_out = data[: -(len(data) // 10)], data[-(len(data) // 10) :]

    torch.manual_seed(options.seed)
    sizes = {"n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    off = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(index), **sizes, **off))
    optimizer: torch.optim.Optimizer
    if options.optimizer == "adamw":
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([{"params": matrices}, vectors], options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    else:
        config = sel.preset("paper") if options.optimizer == "paper" else sel.SELConfig()
        decay = {"weight_decay": 0.1, "no_decay": ["*bias", "*ln_*"]}
        settings = {"max_grad_norm": 1.0, "total_steps": options.steps, **decay}  # it clips raw gradients in its step
        optimizer = sel.SELAdamW(model, options.lr, betas=(0.9, 0.95), config=config, **settings)
    curve: list[tuple[int, float]] = []
    first, checkpoint = 0, options.out / "ckpt.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        first, curve = saved["step"], saved["curve"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    for step in range(first, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(options.lr, step, options.steps)
        for ids in batches(training, seed=options.seed * options.steps + step, number=ACCUMULATION):
            (model(input_ids=ids, labels=ids).loss / ACCUMULATION).backward()
        if options.optimizer == "adamw":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % EVERY == 0 or step + 1 == options.steps:
            with torch.no_grad():
                losses = [model(input_ids=ids, labels=ids).loss for ids in batches(held_out, seed=-1, number=4)]
            curve.append((step + 1, float(sum(losses)) / 4))
            print(f"step {step + 1} val loss {curve[-1][1]:.4f}", flush=True)
            options.out.mkdir(parents=True, exist_ok=True)
            state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "curve": curve}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)  # a checkpoint is whole or not there
    model.save_pretrained(options.out)  # ordinary weights
    result = options.out / "result.new"
    result.write_text(json.dumps({"loss": curve[-1][1], "curve": curve}))
    result.replace(options.out / "result.json")


if __name__ == "__main__":
    main()
