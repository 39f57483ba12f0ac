"""Results kept: one row per run in a CSV file that only grows."""

import csv
import datetime
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock

from symexplin.experiments.tables import BENCH, Outcome, PanelOutcome, read_table
from symexplin.lab.files import read_json, write_csv
from symexplin.lab.folders import CONFIG, FACTS, SUMMARY
from symexplin.lab.settings import load_toml

__all__ = ["COLUMNS", "append_results", "check_results", "config_hash"]

Row = dict[str, str]

COLUMNS = (
    *("table", "scale", "panel", "arm", "lr", "seed", "stage", "best_at", "steps", "tokens", "final_loss", "seconds"),
    *("tokens_per_second", "error", "config_hash", "data", "commit", "machine", "threads", "torch", "date"),
)
# Rows that agree in these columns are of the same run.
_KEY = ("table", "scale", "panel", "arm", "lr", "seed", "config_hash", "data", "commit", "machine")
_OF_A_RUN = ("arm", "lr", "seed", "final_loss", "seconds", "tokens_per_second", "error")


def config_hash(config: Mapping[str, Any], weights: str | None = None) -> str:
    """Return 16 digits of the SHA-256 of a run's configuration as canonical JSON, without paths and logging.

    `weights` is the digest of the weights that it starts from, in place of their path.
    """
    kept = {key: value for key, value in config.items() if key not in ("data", "log")}
    kept["train"] = {**config.get("train", {}), "weights": weights}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def check_results(file: Path, columns: Sequence[str] = COLUMNS) -> list[Row]:
    """Return the rows of a CSV file of results, none of a new file; refuse other columns and damaged rows."""
    if not file.exists():
        return []
    names, *rows = list(csv.reader(io.StringIO(file.read_text(encoding="utf-8")))) or [[]]
    if names != list(columns):
        raise ValueError(f"{str(file)!r} must have the columns {', '.join(columns)}, or be a new file")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(columns):
            raise ValueError(f"{str(file)!r} is damaged: row {number} has {len(row)} columns, not {len(columns)}")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def append_results(out: str | Path, file: Path) -> int:
    """Append a row for each run of a table's folder to a CSV file, without the rows that it has, and return how many.

    The file is replaced in one step; FILE.lock beside it keeps out other processes meanwhile. A bench has the columns
    of its own results.csv, and so a file of its own.
    """
    outcome = read_table(out)
    rows = [row for panel in outcome.panels if panel.found is not None for row in _rows(outcome, panel, panel.found)]
    if not rows:
        return 0
    columns = tuple(rows[0])
    key = columns if outcome.kind == BENCH else _KEY
    file.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(file.with_name(file.name + ".lock")):  # another table may end at the same moment
        old = check_results(file, columns)
        known = {tuple(row[name] for name in key) for row in old}
        new = [row for row in rows if tuple(row[name] for name in key) not in known]
        if new:
            write_csv(file, [*old, *new])
    return len(new)


def _rows(outcome: Outcome, panel: PanelOutcome, found: Mapping[str, Any]) -> list[Row]:
    place = {"table": outcome.name, "scale": outcome.scale, "panel": panel.name}
    if outcome.kind == BENCH:
        return [{**place, **row} for row in found["rows"]]
    best = {row["arm"]: row["lr"] for row in found["comparison"]["best"]}
    shared, confirm = found["comparison"]["shared_lr"], found["comparison"].get("confirm_seeds", ())
    rows = []
    for run in found["runs"]:
        rates = (("own", best.get(run["arm"])), ("shared", shared))
        content: dict[str, Any] = {
            **place,
            **{key: run[key] for key in _OF_A_RUN},
            "stage": "confirm" if run["seed"] in confirm else "sweep",
            "best_at": "+".join(name for name, lr in rates if lr == run["lr"]),
            **_facts(panel.folder / run["folder"]),
        }
        rows.append({name: "" if content[name] is None else str(content[name]) for name in COLUMNS})
    return rows


def _facts(folder: Path) -> dict[str, Any]:
    """Return the columns that come from a run's own folder."""
    config, facts = load_toml(folder / CONFIG), read_json(folder / FACTS)
    train, place = config["train"], facts["provenance"]
    ended = datetime.datetime.fromtimestamp((folder / SUMMARY).stat().st_mtime, datetime.UTC)
    return {
        "steps": train["steps"],
        "tokens": train["steps"] * train["batch_size"] * config["model"]["context"],
        "config_hash": config_hash(config, facts.get("weights")),
        "data": facts["data"],
        "commit": place["commit"],
        "machine": place["processor"],
        "threads": config["compute"]["threads"],
        "torch": place["torch"],
        "date": ended.isoformat(timespec="seconds"),
    }
