"""How a run begins in its folder: as a new one, or as that which is there and may go on."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from symexplin.lab.config import RunConfig
from symexplin.lab.files import read_json, replace_file, write_json
from symexplin.lab.parallel import Ranks
from symexplin.lab.provenance import provenance
from symexplin.lab.settings import differences, dump_toml, to_table
from symexplin.lab.text.corpus import Corpus

__all__ = ["CONFIG", "FACTS", "SUMMARY", "TOKENIZER", "check_begun", "mark"]

Echo = Callable[[str], None]

CONFIG, SUMMARY, TOKENIZER, FACTS = "config.toml", "summary.json", "tokenizer.json", "run.json"
# Keys that a run may resume with other values of: where its data lie (their digest must be the same), what it logs.
_FREE = ("data", "log.")
# Keys that change the rounding but not the run: a resumed run may move to another machine.
_ROUNDING = "compute."


def check_begun(
    folder: Path, config: RunConfig, corpus: Corpus, resume: bool, echo: Echo, ranks: Ranks
) -> dict[str, Any] | None:
    """Check that the run in the folder, if there is one, may go on; return its summary if it has finished."""
    if (folder / FACTS).exists():
        _check_same(folder, config, corpus, resume, echo, ranks)
    finished = _summary(folder)
    return None if finished is None or "error" in finished else finished


def mark(folder: Path, config: RunConfig, corpus: Corpus, ranks: Ranks) -> None:
    """Write the files that a run begins with."""
    if not (folder / FACTS).exists():
        _write_facts(folder, config, corpus, ranks)  # the first file: it marks the folder
    corpus.tokenizer.save(folder / TOKENIZER)
    replace_file(folder / CONFIG, dump_toml(to_table(config)))


def _write_facts(folder: Path, config: RunConfig, corpus: Corpus, ranks: Ranks) -> None:
    """Write what a run is."""
    facts = {
        "data": corpus.fingerprint,
        "model": dataclasses.asdict(config.model),
        "tokenizer": {"name": corpus.tokenizer.name, "end_token": corpus.tokenizer.end_token},
        "config": to_table(config),
        "provenance": {**provenance(), **ranks.facts()},
    }
    write_json(folder / FACTS, facts)


def _check_same(folder: Path, config: RunConfig, corpus: Corpus, resume: bool, echo: Echo, ranks: Ranks) -> None:
    """Raise ValueError unless the run in the folder is the one to resume."""
    summary = _summary(folder) or {}
    state = f"a run that broke at step {summary['step']}" if "error" in summary else "a run"
    if not resume:
        raise ValueError(
            f"out must be a new folder, got {str(folder)!r}, which has {state}: add --resume to go on with it, or give "
            "another folder"
        )
    facts = read_json(folder / FACTS)
    changed = {
        key: f"{key} is {old!r} there, {new!r} now"
        for key, (old, new) in differences(facts["config"], to_table(config)).items()
        if not key.startswith(_FREE)
    }
    refused = [text for key, text in changed.items() if not key.startswith(_ROUNDING)]
    if refused:
        raise ValueError(
            f"{folder} has {state} of another configuration: {'; '.join(refused)} (give another folder for a new run)"
        )
    if facts["data"] != corpus.fingerprint:
        raise ValueError(f"data must be those of the run in {folder}, got {config.data!r} with other tokens")
    processes = facts["provenance"].get("processes", 1)
    if processes != ranks.size:
        changed["processes"] = f"processes is {processes} there, {ranks.size} now"
    if changed:
        echo(f"{'; '.join(changed.values())}: the numbers go on with other rounding")


def _summary(folder: Path) -> dict[str, Any] | None:
    path = folder / SUMMARY
    return read_json(path) if path.exists() else None
