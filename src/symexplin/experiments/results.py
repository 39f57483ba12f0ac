"""Results kept: one row per run in a CSV file that only grows."""

import csv
import datetime
from pathlib import Path
from typing import Any

import filelock

from symexplin.experiments.tables import PANELS, TABLE
from symexplin.lab.compare.grid import CONFIG as GRID
from symexplin.lab.compare.grid import RUNS
from symexplin.lab.files import read_json, write_csv
from symexplin.lab.folders import CONFIG, FACTS, RESULT
from symexplin.lab.identity import config_hash
from symexplin.lab.settings import load_toml

__all__ = ["COLUMNS", "append_results", "check_results"]

COLUMNS = (
    *("table", "scale", "panel", "variant", "lr", "seed", "stage", "steps", "tokens", "final_loss", "seconds"),
    *("tokens_per_second", "error", "config_hash", "data", "commit", "machine", "threads", "torch", "date", "curve"),
)
# Rows that agree in these columns are of the same run.
_KEY = ("table", "scale", "panel", "variant", "lr", "seed", "config_hash", "data", "commit", "machine")


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
    """Append a row for each run that has ended in a table's folder to a CSV file, and return how many were new.

    The file is replaced in one step; FILE.lock beside it keeps out other processes meanwhile.
    """
    about = read_json(Path(out) / TABLE)
    place = {"table": about["name"], "scale": about["scale"]}
    ended = sorted(Path(out).glob(f"{PANELS}/*/{RUNS}/*/{RESULT}"), key=lambda path: path.stat().st_mtime)
    read = [{**place, **_row(path.parent)} for path in ended]
    rows = [{name: "" if row[name] is None else str(row[name]) for name in COLUMNS} for row in read]
    file.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(file.with_name(file.name + ".lock")):  # another table may end at the same moment
        old = check_results(file)
        known = {tuple(row[name] for name in _KEY) for row in old}
        new = [row for row in rows if tuple(row[name] for name in _KEY) not in known]
        if new:
            write_csv(file, [*old, *new])
    return len(new)


def _row(folder: Path) -> dict[str, Any]:
    config, facts, result = load_toml(folder / CONFIG), read_json(folder / FACTS), read_json(folder / RESULT)
    train, place, panel = config["train"], facts["provenance"], folder.parent.parent
    ended = datetime.datetime.fromtimestamp((folder / RESULT).stat().st_mtime, datetime.UTC)
    return {
        **{key: result.get(key) for key in ("seconds", "tokens_per_second", "error")},
        "final_loss": result.get("loss"),
        "panel": panel.name,
        "variant": folder.name.removesuffix(f"-lr{train['lr']:g}-seed{train['seed']}"),
        "lr": train["lr"],
        "seed": train["seed"],
        "stage": "confirm" if train["seed"] in load_toml(panel / GRID)["compare"]["confirm_seeds"] else "sweep",
        "steps": train["steps"],
        "tokens": train["steps"] * train["batch_size"] * config["model"]["context"],
        "config_hash": config_hash(config),
        "data": facts["data"],
        "commit": place["commit"],
        "machine": place["processor"],
        "threads": config["compute"]["threads"],
        "torch": place["torch"],
        "date": ended.isoformat(timespec="seconds"),
        "curve": " ".join(f"{step}:{loss:.6g}" for step, loss, *_ in result.get("curve", ())),
    }
