"""Folders of comparisons and tables whose losses are plain numbers, for the tests of what reads them."""

import json
import statistics
from pathlib import Path

import symexplin as sel
from symexplin.experiments.tables import PANELS, TABLE, load_table
from symexplin.lab.compare.comparison import Comparison, Run
from symexplin.lab.compare.interval import ENOUGH_SEEDS
from symexplin.lab.files import write_json

__all__ = ["comparison", "panel_folder", "table_folder"]

STEPS = (0, 25, 50, 75, 100)
CHOSE = 99  # the seed that chooses between learning rates


def panel_folder(
    folder, variants, loss, lrs=(0.001, 0.01), seeds=(0, 1, 2), curve=None, stats=None, judged=False, **facts
):
    """Write the comparison.json of runs and return the comparison.

    Args:
        loss: (variant, lr, seed) -> final loss, None for a run that diverged.
        curve: (variant, lr, seed) -> [(step, loss)], instead of one that falls to the final loss.
        stats: (variant, lr, seed) -> figures of the last evaluation, written where a run has them.
        judged: with several rates all seeds judge: another one chooses, whose losses are the means over them.
        facts: those of the comparison to add or to replace, or its `unit`, `labels` and `maps` of curved variants.
    """
    runs, seeds = [], tuple(seeds)
    enough = len(seeds) >= ENOUGH_SEEDS
    if judged and len(lrs) > 1 and enough and "confirm_seeds" not in facts:
        judges, seeds, facts = seeds, (*seeds, CHOSE), {**facts, "confirm_seeds": seeds}

        def each(variant, lr, seed, loss=loss):
            if seed != CHOSE:
                return loss(variant, lr, seed)
            ends = [loss(variant, lr, judge) for judge in judges]
            return None if None in ends else statistics.fmean(ends)

        loss = each
    for cell in ((variant, lr, seed) for variant in variants for lr in lrs for seed in seeds):
        end = loss(*cell)
        if end is None:
            runs.append(Run(*cell, ((0, 5.0),), 0.0, 0.0, "step 3: loss is nan"))
            continue
        if enough and cell[0] != variants[0]:  # equal differences have no verdict
            end += 1e-8 * (cell[2] % 3)
        points = curve(*cell) if curve else [(step, end + 3.0 * (1 - step / STEPS[-1])) for step in STEPS]
        runs.append(Run(*cell, tuple(points), 12.0, 2000.0))
    own = {key: facts.pop(key) for key in ("unit", "labels", "confirm_seeds") if key in facts}
    maps = dict.fromkeys(variants) | facts.pop("maps", {})
    facts = {
        "corpus": {"train_tokens": 1_234_567, "tokenizer": "byte"},
        "model": {"parameters": 4321},
        "config": {},
        "provenance": {"commit": None, "processor": "A <fast> one"},
        **facts,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(tuple(runs), variants[0], folder=folder, maps=maps, facts=facts, **own)
    comparison.save(folder)
    for run in runs if stats else ():
        place = comparison.folder_of(run)
        place.mkdir(parents=True)
        line = json.dumps({"step": STEPS[-1], "eval_loss": 2.0, "stats": stats(run.variant, run.lr, run.seed)})
        (place / "metrics.jsonl").write_text(line + "\n")
    return comparison


def comparison(folder, seeds=(0,), final=1.5, broken=None, more=None, **facts):
    """Write a comparison.json as :func:`panel_folder` does, and return the folder.

    At seed 0 AdamW ends at 2.2 and 2.0, SEL at 2.3 and `final`; each further seed adds 0.1 to all. `broken` is the
    (variant, lr, seed) of a run that diverged. `more`: {a further variant: by how much it ends above SEL,
    None if it diverged}.
    """
    above = {"AdamW": None, "SEL": 0.0, **(more or {})}

    def loss(variant, lr, seed):
        if variant == "AdamW":
            end = 2.2 if lr == 0.001 else 2.0
        elif (variant, lr, seed) == broken or above[variant] is None:
            return None
        else:
            end = (2.3 if lr == 0.001 else final) + above[variant]
        return end + 0.1 * seed

    curve = {"home": "optimizer", "start": "matched", **sel.SELConfig().resolve(128).to_dict()}
    panel_folder(folder, list(above), loss, seeds=seeds, **{**facts, "maps": {"SEL": curve} | facts.get("maps", {})})
    return Path(folder)


def table_folder(out, name, loss, scale="mini", missing=(), **changes):
    """Write the folder of a table of the package, `loss` as in :func:`panel_folder`, and return it."""
    out = Path(out)
    table = load_table(name, scale, out=out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / TABLE, table.to_json())
    for panel in table.panels:
        if panel.name not in missing:
            folder = out / PANELS / panel.name
            panel_folder(
                folder,
                list(table.labels),
                loss,
                config=panel.config.table(),
                labels=table.labels,
                judged=True,
                **changes,
            )
            (folder / "report.html").write_text("")
    return out
