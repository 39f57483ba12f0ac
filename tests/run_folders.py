"""Folders of small runs and comparisons, for the tests of what reads them."""

import dataclasses
import json
from pathlib import Path

import pytest

import corpora
import symexplin as sel
from symexplin.lab.compare.table import Run, compare, headline
from symexplin.lab.config import ComputeConfig, LogConfig, RunConfig, TrainConfig
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig
from symexplin.lab.run import train
from symexplin.lab.train import Trainer

__all__ = ["CURVES", "EVIL", "MODEL", "break_off", "comparison", "prepared", "trained"]

EVIL = "</pre><script>alert('x')</script>"
MODEL = ModelConfig(width=16, depth=2, heads=2, context=16)
# A run in each home of the map, and without one.
CURVES = {
    "none": CurveConfig(home="none"),
    "optimizer": CurveConfig(preset="paper"),
    "module": CurveConfig(home="module", preset="paper"),
}


def prepared(folder):
    """Prepare a few documents and return the folder."""
    texts = [f"document {i} says that {i} times {i} is {i * i}" for i in range(60)]
    return Path(corpora.prepared(Path(folder), texts))


def trained(data, out, curve=None, model=MODEL, **changes):
    """Train a small run and return its folder."""
    schedule = {"steps": 6, "batch_size": 4, "warmup_steps": 2, "lr": 1e-2, "eval_every": 2, "eval_batches": 2}
    config = RunConfig(
        str(data),
        model,
        TrainConfig(**schedule | changes),
        curve or CurveConfig(),
        ComputeConfig(device="cpu", threads=1),
        LogConfig(checkpoint_every=4, tensorboard=False),
    )
    train(config, out, progress=False)
    return out


def break_off(config, folder, monkeypatch, step):
    """Train until the update of that number, which fails."""
    update = Trainer.update

    def fail(self):
        if self.step + 1 == step:
            raise RuntimeError("killed")
        return update(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", fail)
        with pytest.raises(RuntimeError, match="killed"):
            train(config, folder)


def comparison(folder, seeds=(0,), final=1.5, broken=None, **changes):
    """Write the comparison.json of runs whose losses are plain numbers and return the folder.

    At seed 0 AdamW ends at 2.2 and 2.0, SEL at 2.3 and `final`; each further seed adds 0.1 to all. `broken` is the
    (variant, lr, seed) of a run that did not stay finite.
    """
    ends = {("AdamW", 0.001): 2.2, ("SEL", 0.001): 2.3, ("AdamW", 0.01): 2.0, ("SEL", 0.01): final}
    runs = []
    for seed in seeds:
        for (variant, lr), end in ends.items():
            evals = tuple((step, end + more + 0.1 * seed) for step, more in ((0, 3.0), (50, 1.0), (100, 0.0)))
            if (variant, lr, seed) == broken:
                runs.append(Run(variant, lr, seed, evals[:1], 0.0, 0.0, "step 3: loss is nan"))
            else:
                runs.append(Run(variant, lr, seed, evals, 12.0, 2000.0))
    found = compare(runs, "AdamW")
    content = {
        "headline": headline(found),
        "comparison": dataclasses.asdict(found),
        "runs": [
            {**dataclasses.asdict(r), "final_loss": r.final_loss, "folder": f"runs/{r.variant}-lr{r.lr:g}-seed{r.seed}"}
            for r in runs
        ],
        "maps": {
            "AdamW": None,
            "SEL": {"home": "optimizer", "start": "matched", **sel.SELConfig().resolve(128).to_dict()},
        },
        "corpus": {"train_tokens": 1234567, "tokenizer": "byte"},
        "parameters": 4321,
        "config": {"data": "stdlib", "compare": {"lrs": [0.001, 0.01], "seeds": list(seeds)}},
        "provenance": {"commit": None, "processor": "A <fast> one"},
        "seconds": 99.5,
        "sample": {"variant": "SEL", "lr": 0.01, "seed": 0, "text": EVIL},
        **changes,
    }
    Path(folder, "comparison.json").write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
    return Path(folder)
