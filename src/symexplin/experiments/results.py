"""Results kept: one row a run in a CSV file that only grows."""

import csv
import datetime
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock

from symexplin.experiments.tables import Outcome, PanelOutcome, read_table
from symexplin.lab.files import read_json
from symexplin.lab.folders import CONFIG, FACTS, SUMMARY
from symexplin.lab.settings import load_toml
from symexplin.lab.tables import write_csv

__all__ = ["COLUMNS", "append_results", "check_results", "config_hash"]

Row = dict[str, str]

COLUMNS = (
    *("table", "scale", "panel", "arm", "lr", "seed", "stage", "best_at", "steps", "tokens", "final_loss", "seconds"),
    *("tokens_per_second", "error", "config_hash", "data", "commit", "machine", "threads", "torch", "date"),
)
# What a run is: rows that agree in these are of one and the same.
_KEY = ("table", "scale", "panel", "arm", "lr", "seed", "config_hash", "data", "commit", "machine")
_OF_A_TABLE = ("table", "scale", "panel")


def config_hash(config: Mapping[str, Any], weights: str | None = None) -> str:
    """Return 16 digits of the SHA-256 of a run's configuration as canonical JSON, without paths and what it logs.

    Args:
        config: of the run, as its config.toml has it.
        weights: digest of the weights that it starts from, which stands for their path.

    >>> config_hash({"data": "here", "train": {"steps": 3}}) == config_hash({"data": "there", "train": {"steps": 3}})
    True
    """
    kept = {key: value for key, value in config.items() if key not in ("data", "log")}
    kept["train"] = {**config.get("train", {}), "weights": weights}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def check_results(file: str | Path, columns: Sequence[str] = COLUMNS) -> list[list[str]]:
    """Return the rows of a CSV file of results, its columns' names first, which are all that a new one has.

    Raises:
        ValueError: other columns, a line that has not as many.
    """
    file = Path(file)
    found = list(csv.reader(io.StringIO(file.read_text(encoding="utf-8")))) if file.exists() else [list(columns)]
    if not found or found[0] != list(columns):
        raise ValueError(f"{str(file)!r} must have the columns {', '.join(columns)}, or be a new file")
    for number, row in enumerate(found, start=1):
        if len(row) != len(columns):
            raise ValueError(f"{str(file)!r} is damaged: row {number} has {len(row)} columns, not {len(columns)}")
    return found


def append_results(out: str | Path, file: str | Path) -> int:
    """Append a row for each run of a table's folder to a CSV file, but for those that it has, and return how many.

    The file is created if missing, and replaced in one step by itself with the new rows at its end; FILE.lock beside it
    keeps out other processes meanwhile. A table of
    measurements ("bench") has the columns of its own results.csv, and so a file of its own.

    Args:
        out: a folder of `symexplin reproduce`; panels without a result are left out.
        file: the CSV file.

    Raises:
        ValueError: a folder of another kind, a file with other columns or a damaged one.
    """
    outcome, file = read_table(out), Path(file)
    rows = [row for panel in outcome.panels if panel.found is not None for row in _rows(outcome, panel)]
    if not rows:
        return 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(file.with_name(file.name + ".lock")):  # another table may end at this very moment
        return _append(rows, file, _KEY if outcome.kind == "compare" else tuple(rows[0]))


def _append(rows: Sequence[Row], file: Path, key: Sequence[str]) -> int:
    columns = tuple(rows[0])
    there = [dict(zip(columns, row, strict=True)) for row in check_results(file, columns)[1:]]
    known = {tuple(row[name] for name in key) for row in there}
    new = [row for row in rows if tuple(row[name] for name in key) not in known]
    if new:
        write_csv(file, [*there, *new])
    return len(new)


def _rows(outcome: Outcome, panel: PanelOutcome) -> list[Row]:
    found: dict[str, Any] = panel.found or {}
    place = dict(zip(_OF_A_TABLE, (outcome.name, outcome.scale, panel.name), strict=True))
    if outcome.kind == "bench":
        return [{**place, **row} for row in found["rows"]]
    best = {row["arm"]: row["lr"] for row in found["comparison"]["best"]}
    shared = found["comparison"]["shared_lr"]
    confirm = found["comparison"].get("confirm_seeds", ())
    rows = []
    for run in found["runs"]:
        at = [name for name, lr in (("own", best.get(run["arm"])), ("shared", shared)) if lr == run["lr"]]
        said: dict[str, Any] = {
            **place,
            **{key: run[key] for key in ("arm", "lr", "seed", "final_loss", "seconds", "tokens_per_second", "error")},
            "stage": "confirm" if run["seed"] in confirm else "sweep",
            "best_at": "+".join(at),
            **_facts(panel.folder / run["folder"]),
        }
        rows.append({name: "" if said[name] is None else str(said[name]) for name in COLUMNS})
    return rows


def _facts(folder: Path) -> dict[str, Any]:
    """Return what a run's own folder says of it."""
    config, facts = load_toml(folder / CONFIG), read_json(folder / FACTS)
    train, known = config["train"], facts["provenance"]
    ended = datetime.datetime.fromtimestamp((folder / SUMMARY).stat().st_mtime, datetime.UTC)
    return {
        "steps": train["steps"],
        "tokens": train["steps"] * train["batch_size"] * config["model"]["context"],
        "config_hash": config_hash(config, facts.get("weights")),
        "data": facts["data"],
        "commit": known["commit"],
        "machine": known["processor"],
        "threads": config["compute"]["threads"],
        "torch": known["torch"],
        "date": ended.isoformat(timespec="seconds"),
    }
