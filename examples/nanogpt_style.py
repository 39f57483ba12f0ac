"""Train a small GPT-2 on characters with a loop in nanoGPT's manner. The same command resumes a run that stopped.

    python examples/nanogpt_style.py --out runs/nanogpt --text your.txt
    torchrun --nproc-per-node 2 examples/nanogpt_style.py --out runs/ddp --compile

It also shows what `symexplin compare --command` needs of a script: a choice of optimizer, and the loss in result.json.
"""

import argparse
import json
import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import symexplin as sel

WARMUP, CONTEXT, BATCH, ACCUMULATION, EVERY = 10, 32, 8, 2, 20
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun


def batches(data: Tensor, seed: int, number: int) -> list[Tensor]:
    """Return windows of the data, the same for the same seed: a resumed run continues with the right ones."""
    starts = torch.randint(len(data) - CONTEXT, (number, BATCH), generator=torch.Generator().manual_seed(seed))
    return [torch.stack([data[i : i + CONTEXT] for i in row]) for row in starts.tolist()]


def rate(lr: float, step: int, steps: int) -> float:
    """Return the learning rate: linear warm-up, then a cosine to a tenth."""
    if step < WARMUP:
        return lr * (step + 1) / WARMUP
    return lr * (0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / max(steps - WARMUP, 1)))


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a text file; default: this script")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--optimizer", choices=["adamw", "sel", "paper", "paper-init"], default="sel")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", default=f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if gpu else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16" if gpu else "float32")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def build_optimizer(model: torch.nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW, or SELAdamW with the default map or the paper's, with or without the paper's initialization."""
    if options.optimizer == "adamw":
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}
        return torch.optim.AdamW([{"params": matrices}, vectors], options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    config = sel.preset("default" if options.optimizer == "sel" else "paper")
    if options.optimizer == "paper-init":
        sel.init_(model, config)
    decay = {"weight_decay": 0.1, "no_decay": "vectors"}
    run = {"max_grad_norm": 1.0, "total_steps": options.steps}  # the step clips raw gradients
    return sel.SELAdamW(model, options.lr, betas=(0.9, 0.95), config=config, **decay, **run)


def main() -> None:
    """Train, evaluate and save."""
    options = arguments()
    kind = torch.device(options.device).type
    if WORLD > 1:
        assert ACCUMULATION % WORLD == 0, "every process needs the same number of microbatches"
        if kind == "cuda":
            torch.cuda.set_device(options.device)
        torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    text = options.text.read_text(encoding="utf-8")
    index = {letter: i for i, letter in enumerate(sorted(set(text)))}
    data = torch.tensor([index[letter] for letter in text], device=options.device)
    training, held_out = data[: -(len(data) // 10)], data[-(len(data) // 10) :]

    torch.manual_seed(options.seed)
    sizes = {"n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    off = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    plain = GPT2LMHeadModel(GPT2Config(vocab_size=len(index), **sizes, **off)).to(options.device)
    optimizer = build_optimizer(plain, options)  # on the plain model, before compile and DDP change its names
    scaler = torch.amp.GradScaler(kind, enabled=options.dtype == "float16")
    autocast = torch.autocast(kind, getattr(torch, options.dtype), enabled=options.dtype != "float32")
    curve: list[tuple[int, float]] = []
    first, checkpoint = 0, options.out / "ckpt.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=options.device, weights_only=True)
        first, curve = saved["step"], saved["curve"]
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
    model = torch.compile(plain) if options.compile else plain
    model = DistributedDataParallel(model) if WORLD > 1 else model

    for step in range(first, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(options.lr, step, options.steps)
        mine = batches(training, seed=options.seed * options.steps + step, number=ACCUMULATION)[RANK::WORLD]
        for i, ids in enumerate(mine, 1):
            with nullcontext() if WORLD == 1 or i == len(mine) else model.no_sync(), autocast:
                loss = model(input_ids=ids, labels=ids).loss / len(mine)
            scaler.scale(loss).backward()
        if options.optimizer == "adamw":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % EVERY and step + 1 < options.steps:
            continue
        with torch.no_grad(), autocast:
            losses = [plain(input_ids=ids, labels=ids).loss for ids in batches(held_out, seed=-1, number=4)]
        curve.append((step + 1, float(sum(losses)) / 4))
        if RANK == 0:
            print(f"step {step + 1} val loss {curve[-1][1]:.4f}", flush=True)
            options.out.mkdir(parents=True, exist_ok=True)
            parts = {"model": plain, "optimizer": optimizer, "scaler": scaler}
            state = {"step": step + 1, "curve": curve} | {name: part.state_dict() for name, part in parts.items()}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)  # a checkpoint is whole or not there
    if RANK == 0:
        plain.save_pretrained(options.out)  # ordinary weights
        result = options.out / "result.new"
        result.write_text(json.dumps({"loss": curve[-1][1], "curve": curve}))
        result.replace(options.out / "result.json")
    if WORLD > 1:
        torch.distributed.barrier()  # gloo may abort if a process exits before the others
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
