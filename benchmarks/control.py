"""A control for the default map: AdamW whose steps are longer by S = 1 + beta |w|, without a map.

    symexplin prepare stdlib --tokenizer byte --valid-fraction 0.05 --out data
    python benchmarks/control.py data --results results/mini.csv

To first order in the learning rate the default is AdamW on gradients g S whose step is multiplied by S. The first
variant does just that, a check. The second permutes S within each tensor, once per run: steps are as long, but other
weights take the longer ones. Width 128, depth 4, 600 steps; seed 0 at every rate, then all seeds at each variant's
best.

Expected before the runs: "scaled" ends within 0.005 of the default in every seed, and no difference between "permuted",
"default" and AdamW is detected, since at their best rates only the length of the steps would differ.
"""

import argparse
import csv
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import symexplin as sel
from symexplin.lab.config import ComputeConfig, ModelConfig, RunConfig, TrainConfig, resolve
from symexplin.lab.data.batches import Corpus
from symexplin.lab.maps import CurveConfig
from symexplin.lab.provenance import provenance
from symexplin.lab.train import Trainer

RATES = (1.4e-3, 2e-3, 2.8e-3, 4e-3)
VARIANTS = ("AdamW", "default", "scaled", "permuted")


class Scaled(torch.optim.AdamW):
    """AdamW on g S, whose step is multiplied by S, after clipping to a global norm of 1."""

    def __init__(self, model: nn.Module, lr: float, seed: int, permuted: bool) -> None:
        super().__init__(model.parameters(), lr=lr, weight_decay=0.01, fused=True)
        generator = torch.Generator().manual_seed(seed)
        self._curved: list[tuple[Tensor, float, Tensor | None]] = []
        for group in sel.param_groups(model, lr=lr):
            for _, p in group["params"] if group["role"] == "curved" else ():
                order = torch.randperm(p.numel(), generator=generator) if permuted else None
                beta = sel.SELConfig.from_json(group["config"]).beta
                self._curved.append((p, float(beta), order))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step."""
        assert closure is None
        scales = [1.0 + beta * p.abs() for p, beta, _ in self._curved]
        for i, (p, _, order) in enumerate(self._curved):
            scales[i] = scales[i] if order is None else scales[i].view(-1)[order].view_as(p)
            assert p.grad is not None
            p.grad *= scales[i]
        self.grad_norm = nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        before = [p.clone() for p, *_ in self._curved]
        super().step()
        for (p, *_), old, scale in zip(self._curved, before, scales, strict=True):
            p.copy_(old + scale * (p - old))


def run(variant: str, lr: float, seed: int, corpus: Corpus, folder: str) -> tuple[RunConfig, float]:
    """Train one model; return its configuration and its last held-out loss."""
    curve = CurveConfig(home="optimizer", preset="default") if variant == "default" else CurveConfig(home="none")
    train = TrainConfig(steps=600, batch_size=8, lr=lr, warmup_steps=60, eval_batches=32, seed=seed)
    model = ModelConfig(width=128, depth=4, heads=4, context=128)
    config = RunConfig(folder, model, train, curve, ComputeConfig(device="cpu", threads=1))
    trainer = Trainer(resolve(config, corpus.vocab_size), corpus)
    if variant in ("scaled", "permuted"):
        trainer.optimizer = Scaled(trainer.model, lr, seed, variant == "permuted")
        trainer._peaks, trainer._clip = [lr], False
    for _ in range(train.steps):
        trainer.update()
    return config, trainer.evaluate()


def main() -> None:
    """Train all variants, and append a row per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a folder that symexplin prepare made")
    parser.add_argument("--results", type=Path, required=True, help="a CSV file with a row per run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus, origin = Corpus.load(options.data), provenance()
    with options.results.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = list(rows[0])
    known = {
        (r["variant"], float(r["lr"]), int(r["seed"])): float(r["final_loss"]) for r in rows if r["table"] == "control"
    }

    def loss_of(variant: str, lr: float, seed: int, stage: str) -> float:
        if (variant, lr, seed) not in known:
            began = time.perf_counter()
            config, loss = run(variant, lr, seed, corpus, options.data)
            tokens = config.train.steps * config.train.batch_size * config.model.context
            row = {
                **{"table": "control", "scale": "mini", "panel": "128x4", "variant": variant, "lr": lr, "seed": seed},
                **{"stage": stage, "steps": config.train.steps, "tokens": tokens, "final_loss": loss},
                **{
                    "seconds": round(time.perf_counter() - began, 3),
                    "data": corpus.fingerprint,
                    "commit": origin["commit"],
                },
                **{"machine": origin["processor"], "threads": 1, "torch": origin["torch"]},
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
            with options.results.open("a", newline="") as file:
                csv.DictWriter(file, columns, lineterminator="\n").writerow(row)
            known[variant, lr, seed] = loss
            print(f"{variant} lr {lr:g} seed {seed}: {loss:.4f}", flush=True)
        return known[variant, lr, seed]

    best = {variant: min(RATES, key=lambda lr: loss_of(variant, lr, 0, "sweep")) for variant in VARIANTS}
    for seed in options.seeds:
        for variant in VARIANTS:
            loss_of(variant, best[variant], seed, "confirm")


if __name__ == "__main__":
    main()
