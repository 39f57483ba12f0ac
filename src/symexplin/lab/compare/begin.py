"""How a comparison begins in its folder: as a new one, or as that which is there and may go on."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from symexplin.lab.build import build as build_run
from symexplin.lab.compare.folder import CONFIG, RUNS, arm_of, of_a_run
from symexplin.lab.compare.grid import CompareConfig
from symexplin.lab.config import ComputeConfig, absolute, resolve
from symexplin.lab.data.batches import Corpus
from symexplin.lab.files import read_json, replace_file
from symexplin.lab.folders import FACTS
from symexplin.lab.load import digest_of
from symexplin.lab.parallel import Ranks
from symexplin.lab.provenance import cores
from symexplin.lab.run import check_weights
from symexplin.lab.settings import build, differences, dump_toml, load_toml
from symexplin.validation import naming

__all__ = ["open_comparison"]

Echo = Callable[[str], None]

# Keys that a comparison may resume with other values of, as no run's bits depend on them (data and weights have
# digests, which must be the same); keys that may only grow, or hand on a seed to the first stage.
ROUNDING = "compute."
_FREE = ("data", "log.", "compare.jobs")
_FREE_ENDS = ("train.weights",)
_CONFIRM = "compare.confirm_seeds"
_GROWING = ("compare.arms", "compare.lrs", "compare.seeds", _CONFIRM)


def open_comparison(
    folder: Path, config: CompareConfig, corpus: Corpus, resume: bool, echo: Echo, ranks: Ranks
) -> CompareConfig:
    """Return the resolved configuration, saved, after all checks that need no training.

    Raises:
        ValueError: a comparison that may not go on, or not as `config`; an arm that cannot be trained.
    """
    saved = None
    if (folder / CONFIG).exists():
        if not resume:
            raise ValueError(
                f"out must be a new folder, got {str(folder)!r}, which has a comparison: add --resume to go on with it"
            )
        saved = build(CompareConfig, load_toml(folder / CONFIG))
    config = _resolve(config, corpus.vocab_size, saved, ranks)
    if saved is not None:
        _check_same(folder, saved, config, corpus, echo)
    for arm in config.compare.arms:
        if saved is None or arm not in saved.compare.arms:
            _check_arm(config, arm, corpus.vocab_size)
    replace_file(folder / CONFIG, dump_toml(config.table()))
    return config


def _resolve(config: CompareConfig, vocab_size: int, saved: CompareConfig | None, ranks: Ranks) -> CompareConfig:
    """Say what was left to the machine: as the saved configuration does, so that bits repeat, else by this machine."""
    compute, jobs = config.compute, config.compare.jobs
    if saved is not None:
        unsaid = [f.name for f in dataclasses.fields(ComputeConfig) if getattr(compute, f.name) in (None, "auto")]
        compute = dataclasses.replace(compute, **{name: getattr(saved.compute, name) for name in unsaid})
    if compute.threads is None and jobs > 1:
        compute = dataclasses.replace(compute, threads=max(1, cores() // jobs))
    config = dataclasses.replace(config, compute=compute)
    resolved = resolve(config.run(config.compare.cells()[0]), vocab_size, ranks.size)
    return dataclasses.replace(
        config,
        data=resolved.data,
        # The first arm's own changes stay its own.
        model=dataclasses.replace(config.model, vocab_size=vocab_size),
        train=dataclasses.replace(config.train, weights=absolute(config.train.weights)),
        compute=resolved.compute,
        arm={name: _placed(table) for name, table in config.arm.items()},
    )


def _placed(arm: dict[str, Any]) -> dict[str, Any]:
    """Return the table of an arm with the place of its weights, if it has some, from the root on."""
    weights = arm.get("train", {}).get("weights")
    return arm if weights is None else {**arm, "train": {**arm["train"], "weights": absolute(weights)}}


def _check_same(folder: Path, saved: CompareConfig, config: CompareConfig, corpus: Corpus, echo: Echo) -> None:
    """Raise ValueError if the runs that are there would not be those of `config`."""
    changed: list[str] = []
    rounding: list[str] = []
    for key, (old, new) in differences(saved.table(), config.table()).items():
        grown = key in _GROWING and set(old) <= {*new, *(config.compare.seeds if key == _CONFIRM else ())}
        unused = key.startswith("arm.") and key.split(".")[1] not in saved.compare.arms
        if not (key.startswith(_FREE) or key.endswith(_FREE_ENDS) or grown or unused):
            kind = rounding if key.startswith(ROUNDING) else changed
            kind.append(f"{key} is {old!r} there, {new!r} now")
    if changed:
        raise ValueError(f"{folder} has a comparison of another configuration: {'; '.join(changed)}")
    digest = functools.cache(digest_of)
    for path in folder.glob(f"{RUNS}/*/{FACTS}"):
        with of_a_run():
            facts = read_json(path)
        if facts.get("data") != corpus.fingerprint:
            raise ValueError(f"data must be those of the runs in {folder}, got {config.data!r} with other tokens")
        if (arm := arm_of(path.parent)) in config.compare.arms:
            check_weights(path.parent, facts, config.example(arm).train.weights, digest)
    if rounding:
        echo(f"{'; '.join(rounding)}: the numbers of runs that have not ended go on with other rounding")


def _check_arm(config: CompareConfig, arm: str, vocab_size: int) -> None:
    """Raise ValueError unless an arm can take a step: a map without inverse shows in the first one."""
    with naming(f"arm {arm}"):
        model, optimizer, _ = build_run(resolve(config.example(arm), vocab_size))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
