"""How a run begins in its folder: as a new one, or as that which is there and may go on."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from symexplin.lab.config import RunConfig
from symexplin.lab.files import read_json, replace_file, write_json
from symexplin.lab.folders import CONFIG, FACTS, SUMMARY, TOKENIZER
from symexplin.lab.load import digest_of
from symexplin.lab.parallel import Ranks
from symexplin.lab.provenance import provenance
from symexplin.lab.settings import build, differences, dump_toml, load_toml, to_table
from symexplin.lab.text.corpus import Corpus
from symexplin.validation import naming

__all__ = [
    "CONFIG",
    "FACTS",
    "ROUNDING",
    "SUMMARY",
    "TOKENIZER",
    "check_begun",
    "check_weights",
    "mark",
    "saved_settings",
]

Echo = Callable[[str], None]

# Keys that a run may resume with other values of: where its data and its first weights lie (their digests must be the
# same), what it logs.
_FREE = ("data", "train.weights", "log.")
# Keys that change the rounding but not the run: a resumed run may move to another machine.
ROUNDING = "compute."
# Of those, what a machine chooses by how the processes share it.
_OPEN = ("threads", "loss_chunk")


def check_begun(
    folder: Path, config: RunConfig, corpus: Corpus, resume: bool, echo: Echo, ranks: Ranks
) -> dict[str, Any] | None:
    """Check that the run in the folder, if there is one, may go on; return its summary if it has finished."""
    if (folder / FACTS).exists():
        _check_same(folder, config, corpus, resume, echo, ranks)
    finished = _summary(folder)
    return None if finished is None or "error" in finished else finished


def saved_settings(folder: Path, processes: int) -> dict[str, Any]:
    """Return the configuration of the run in a folder as a table, empty if there is none.

    In another number of processes than its last ones it leaves to the machine again what was left to it, and depends
    on them: the threads and the loss's chunk.
    """
    table = load_toml(folder / CONFIG) if (folder / CONFIG).exists() else {}
    last = read_json(folder / FACTS).get("last", {}) if (folder / FACTS).exists() else {}
    if last.get("processes", processes) != processes:
        kept = {key: value for key, value in table.get("compute", {}).items() if key not in last["left_open"]}
        table = {**table, "compute": kept}
    return table


def mark(folder: Path, given: RunConfig, config: RunConfig, corpus: Corpus, ranks: Ranks) -> None:
    """Write the files that a run begins with: `given` is what was asked for, `config` what that came to."""
    found = (folder / FACTS).exists()
    facts = read_json(folder / FACTS) if found else _facts(config, corpus, ranks)
    before, compute = facts.get("last", {}), to_table(config.compute)
    # A value that was chosen and then read from config.toml is still a chosen one.
    again = {key for key in before.get("left_open", ()) if before["compute"][key] == compute[key]}
    left_open = sorted(again | {key for key in _OPEN if getattr(given.compute, key) is None})
    facts["last"] = {"processes": ranks.size, "compute": compute, "left_open": left_open}
    write_json(folder / FACTS, facts)  # the first file: it marks the folder
    corpus.tokenizer.save(folder / TOKENIZER)
    replace_file(folder / CONFIG, dump_toml(to_table(config)))


def _facts(config: RunConfig, corpus: Corpus, ranks: Ranks) -> dict[str, Any]:
    """Return what a run is, and where it began."""
    weights = config.train.weights
    return {
        "data": corpus.fingerprint,
        **({} if weights is None else {"weights": digest_of(weights)}),
        "model": dataclasses.asdict(config.model),
        "tokenizer": {"name": corpus.tokenizer.name, "end_token": corpus.tokenizer.end_token},
        "config": to_table(config),
        "provenance": {**provenance(), **ranks.facts()},
    }


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
    last = facts.get("last") or {**facts["provenance"], "compute": facts["config"]["compute"]}
    # Keys that the version which began the run did not know have their defaults.
    with naming(str(folder / FACTS)):
        saved = {**to_table(build(RunConfig, facts["config"])), "compute": last["compute"]}
    changed = {
        key: f"{key} is {old!r} there, {new!r} now"
        for key, (old, new) in differences(saved, to_table(config)).items()
        if not key.startswith(_FREE)
    }
    refused = [text for key, text in changed.items() if not key.startswith(ROUNDING)]
    if refused:
        raise ValueError(
            f"{folder} has {state} of another configuration: {'; '.join(refused)} (give another folder for a new run)"
        )
    if facts["data"] != corpus.fingerprint:
        raise ValueError(f"data must be those of the run in {folder}, got {config.data!r} with other tokens")
    check_weights(folder, facts, config.train.weights)
    if (processes := last.get("processes", 1)) != ranks.size:
        changed["processes"] = f"processes is {processes} there, {ranks.size} now"
    if changed:
        echo(f"{'; '.join(changed.values())}: the numbers go on with other rounding")


def check_weights(
    folder: Path, facts: dict[str, Any], weights: str | None, digest: Callable[[str], str] = digest_of
) -> None:
    """Raise ValueError unless the run with these facts began with those very weights, wherever they lay then.

    Raises:
        FileNotFoundError: they are not there any more.
    """
    if facts.get("weights") != (None if weights is None else digest(weights)):
        raise ValueError(f"weights must be those that the run in {folder} began with, got {weights!r} with others")


def _summary(folder: Path) -> dict[str, Any] | None:
    path = folder / SUMMARY
    return read_json(path) if path.exists() else None
