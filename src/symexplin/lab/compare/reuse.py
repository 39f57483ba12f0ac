"""Finished runs of other comparisons, taken over instead of being trained again.

On one machine, with one version of the software, equal configurations and data give equal bits.
"""

import functools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from symexplin.lab.config import RunConfig, resolve
from symexplin.lab.data.batches import Corpus
from symexplin.lab.files import read_json
from symexplin.lab.folders import FACTS, SUMMARY
from symexplin.lab.load import digest_of
from symexplin.lab.provenance import provenance
from symexplin.lab.settings import config_hash, to_table

__all__ = ["finished_runs", "take_over"]

_ORIGIN = ("commit", "processor", "instructions", "torch")


def _identity(config: Mapping[str, Any], weights: str | None, data: str, origin: Mapping[str, Any]) -> tuple[str, ...]:
    return (config_hash(config, weights), data, *(str(origin.get(name)) for name in _ORIGIN))


def finished_runs(folders: Sequence[str | Path]) -> dict[tuple[str, ...], Path]:
    """Return {identity: folder} of the finished runs below `folders`, without those of uncommitted code.

    Raises:
        ValueError: a folder without finished runs.
    """
    found = {}
    for folder in folders:
        runs = [path.parent for path in sorted(Path(folder).glob(f"**/{SUMMARY}")) if (path.parent / FACTS).exists()]
        if not runs:
            raise ValueError(f"reuse must be folders with finished runs, got {str(folder)!r}")
        for run in runs:
            facts = read_json(run / FACTS)
            origin = facts["provenance"]
            if "error" not in read_json(run / SUMMARY) and not str(origin.get("commit") or "+").endswith("+"):
                found[_identity(facts["config"], facts.get("weights"), facts["data"], origin)] = run
    return found


def take_over(known: Mapping[tuple[str, ...], Path], config: RunConfig, corpus: Corpus, target: Path) -> Path | None:
    """Copy the known run of this configuration and data to the new folder `target`; return its folder, or None."""
    if target.exists():
        return None
    weights = None if config.train.weights is None else digest_of(config.train.weights)
    key = _identity(to_table(resolve(config, corpus.vocab_size)), weights, corpus.fingerprint, _here())
    run = known.get(key)
    if run is not None:
        copy = target.with_name(f"{target.name}.new")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy)
        copy.rename(target)
    return run


@functools.cache
def _here() -> Mapping[str, Any]:
    return provenance()
