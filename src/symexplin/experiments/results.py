"""Results kept: one row per run in a CSV file that only grows."""

import csv
import datetime
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock

from symexplin.experiments.comparison import Evidence
from symexplin.experiments.tables import read_table
from symexplin.lab.files import read_json, write_csv
from symexplin.lab.folders import CONFIG, FACTS, SUMMARY
from symexplin.lab.settings import load_toml

__all__ = ["COLUMNS", "append_results", "check_results", "config_hash"]

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


def check_results(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file of results, none of a new file; refuse other columns."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{str(file)!r} must have the columns {', '.join(COLUMNS)}, or be a new file")
        return list(reader)


def append_results(out: str | Path, file: Path) -> int:
    """Append a row for each run of a table's folder to a CSV file, without the rows that it has, and return how many.

    The file is replaced in one step; FILE.lock beside it keeps out other processes meanwhile.
    """
    outcome = read_table(out)
    place = {"table": outcome.name, "scale": outcome.scale}
    found = [{**place, **_row(panel, run)} for panel in outcome.finished for run in panel.found["runs"]]
    rows = [{name: "" if row[name] is None else str(row[name]) for name in COLUMNS} for row in found]
    file.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(file.with_name(file.name + ".lock")):  # another table may end at the same moment
        old = check_results(file)
        known = {tuple(row[name] for name in _KEY) for row in old}
        new = [row for row in rows if tuple(row[name] for name in _KEY) not in known]
        if new:
            write_csv(file, [*old, *new])
    return len(new)


def _row(panel: Evidence, run: Mapping[str, Any]) -> dict[str, Any]:
    folder = panel.folder / run["folder"]
    config, facts = load_toml(folder / CONFIG), read_json(folder / FACTS)
    train, place = config["train"], facts["provenance"]
    rates = {"own": panel.best_lr(run["arm"]), "shared": panel.shared_lr}
    ended = datetime.datetime.fromtimestamp((folder / SUMMARY).stat().st_mtime, datetime.UTC)
    return {
        **{key: run[key] for key in _OF_A_RUN},
        "panel": panel.name,
        "stage": "confirm" if run["seed"] in panel.found["comparison"]["confirm_seeds"] else "sweep",
        "best_at": "+".join(name for name, lr in rates.items() if lr == run["lr"]),
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
