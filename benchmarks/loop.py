"""The time of a step of `symexplin train` over that of a bare loop, for AdamW and the paper's method, in turns.

    python benchmarks/loop.py                    # width 256, depth 4, on a CPU
    python benchmarks/loop.py --device cuda

The bare loop takes the same batches, model and optimizer: forward, backward, clipping and step. A ratio is the median
over rounds of the ratios of neighboring steps.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import symexplin as sel
from symexplin.lab.config import ComputeConfig, RunConfig, TrainConfig, resolve
from symexplin.lab.data.batches import BatchLoader, Corpus
from symexplin.lab.data.prepare import PrepareConfig, prepare
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig
from symexplin.lab.train import Trainer, lr_factor

VARIANTS = {"AdamW": CurveConfig(home="none"), "paper": CurveConfig(preset="paper")}


def bare(config: RunConfig, corpus: Corpus) -> Callable[[], None]:
    """Return a function that takes a step as a script of a few lines does."""
    trainer = Trainer(config, corpus)  # for its model and optimizer alone
    model, optimizer, train = trainer.model, trainer.optimizer, config.train
    loader = BatchLoader(corpus.train, config.model.context, train.batch_size, train.seed)
    device = next(model.parameters()).device
    peaks, step = [group["lr"] for group in optimizer.param_groups], 0

    def update() -> None:
        nonlocal step
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * lr_factor(step, train)
        optimizer.zero_grad()
        inputs, targets = (tokens.to(device) for tokens in loader.batch(step))
        loss = model(inputs, targets)
        loss.backward()
        if not isinstance(optimizer, sel.RawSpaceOptimizer):
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        optimizer.step()
        loss.item()
        step += 1

    return update


def seconds(step: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 256), ("depth", 4), ("context", 128), ("batch-size", 16), ("rounds", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(PrepareConfig(("stdlib",), tokenizer="byte"), Path(folder, "data"), echo=lambda _: None)
        corpus = Corpus.load(str(Path(folder, "data")))
        for variant, curve in VARIANTS.items():
            config = RunConfig(
                str(Path(folder, "data")),
                model=ModelConfig(width=options.width, depth=options.depth, heads=4, context=options.context),
                train=TrainConfig(steps=10_000, batch_size=options.batch_size),
                sel=curve,
                compute=ComputeConfig(device=options.device, threads=torch.get_num_threads(), autocast="off"),
            )
            config = resolve(config, corpus.vocab_size)
            ours, theirs = Trainer(config, corpus).update, bare(config, corpus)
            for step in (ours, theirs, ours, theirs):
                step()
            times = [(seconds(ours), seconds(theirs)) for _ in range(options.rounds)]
            ratio = statistics.median(own / other for own, other in times)
            print(
                f"{variant:6} {ratio:.3f} x  bare loop {1e3 * statistics.median(t for _, t in times):.1f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
