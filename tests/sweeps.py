"""A comparison of tiny runs, and what of it must repeat."""

from symexplin.lab.compare.grid import CompareConfig, GridConfig
from symexplin.lab.config import ComputeConfig, LogConfig, TrainConfig
from symexplin.lab.model import ModelConfig

__all__ = ["bits", "numbers", "tiny"]


def tiny(data, steps=6, **grid):
    return CompareConfig(
        data,
        ModelConfig(width=16, depth=1, heads=2, context=16),
        TrainConfig(steps=steps, batch_size=4, warmup_steps=1, eval_every=2, eval_batches=2),
        compute=ComputeConfig(device="cpu", threads=1, autocast="off"),
        log=LogConfig(checkpoint_every=3, tensorboard=False),
        compare=GridConfig(**{"lrs": (1e-3, 1e-2), "seeds": (0, 3), **grid}),
    )


def bits(folder):
    """Return what a sweep measured and trained, without times."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for name in ("metrics.jsonl", "model.safetensors")
        for path in folder.glob(f"runs/*/{name}")
    }


def numbers(content):
    return [(run["variant"], run["lr"], run["seed"], run["evals"], run["error"]) for run in content["runs"]]
