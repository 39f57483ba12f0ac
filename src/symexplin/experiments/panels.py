"""From layers of settings (protocol, table, scale, panel, command: the later goes first) to what a panel runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from symexplin.lab.bench.config import BenchConfig
from symexplin.lab.compare.grid import CompareConfig
from symexplin.lab.config import RunConfig
from symexplin.lab.settings import build, merge
from symexplin.validation import check_choice

__all__ = ["BASE", "DATA", "SETTINGS", "Panels"]

Settings = dict[str, Any]

BASE, DATA = "base", "data"
# Tables of settings; `map` is that of every curved arm, `base` changes [train] for the run that the others start from.
SETTINGS = ("data", "model", "train", "sel", "compute", "log", "compare", "map", "arm", "base", "bench")
_OF_A_RUN = ("model", "train", "compute", "log")


class Panels:
    """The panels of a table.

    Args:
        settings: what protocol, table and scale say.
        changes: what the command says.
        baseline: the arm that the others are held against.
        out: the table's folder, which has the base's run.
        data: the prepared folder; None: out/data.
    """

    def __init__(
        self, settings: Settings, changes: Settings, baseline: str, out: Path, data: str | Path | None
    ) -> None:
        self._settings, self._changes, self._baseline = settings, changes, baseline
        self._out, self._data = out, str(data or out / DATA)

    def bench(self, panel: Mapping[str, Any]) -> BenchConfig:
        """Return the measurement of a panel."""
        return build(BenchConfig, self._said(panel).get("bench", {}))

    def comparison(self, panel: Mapping[str, Any]) -> CompareConfig:
        """Return the comparison of a panel."""
        said = self._said(panel)
        curve, arms = said.get("map", {}), said.get("arm", {})
        known = list(dict.fromkeys([self._baseline, *arms]))
        compare = {"baseline": self._baseline, "arms": known, **_each_once(said["compare"], self._changes)}
        for name in compare["arms"]:
            check_choice("arms", name, known)
        chosen = {name: _curved(arm, curve) for name, arm in arms.items() if name in compare["arms"]}
        run = {key: said[key] for key in (*_OF_A_RUN, "sel") if key in said}
        if self.has_base:
            run["train"] = {**run["train"], "weights": str(self._out / BASE)}
        return build(CompareConfig, {"data": self._data, **run, "compare": compare, "arm": chosen})

    @property
    def has_base(self) -> bool:
        """Whether the runs of all panels start from the weights of another one."""
        return bool(self._settings.get("base"))

    def base(self) -> RunConfig | None:
        """Return the run, with AdamW, that those of all panels start from, if there is one."""
        if not self.has_base:
            return None
        said = self._said({})
        run = {key: said[key] for key in _OF_A_RUN if key in said}
        train = merge(said["train"], said["base"])
        return build(RunConfig, {"data": self._data, **run, "train": train, "sel": {"home": "none"}})

    def _said(self, panel: Mapping[str, Any]) -> Settings:
        before = merge(self._settings, {key: panel[key] for key in SETTINGS if key in panel})
        return _in_proportion(merge(before, self._changes), before, self._changes)


def _in_proportion(settings: Settings, before: Settings, changes: Settings) -> Settings:
    """Let what goes with the number of steps follow where the command changes that alone."""
    steps = changes.get("train", {}).get("steps")
    if not isinstance(steps, int) or steps < 1:
        return settings  # the schema has a word on it
    share = steps / before["train"]["steps"]
    for table, keys in (("train", ("warmup_steps", "eval_every")), ("base", ("steps", "warmup_steps"))):
        for key in keys:
            if key in before.get(table, {}) and key not in changes.get(table, {}):
                floor = 0 if key == "warmup_steps" else 1
                settings = merge(settings, {table: {key: max(floor, round(before[table][key] * share))}})
    return settings


def _each_once(compare: Settings, changes: Settings) -> Settings:
    """Let the seeds of the second stage leave out those that the command has in the first."""
    own, confirm = changes.get("compare", {}), compare.get("confirm_seeds")
    if "confirm_seeds" in own or not isinstance(own.get("seeds"), list) or not confirm:
        return compare
    return {**compare, "confirm_seeds": [seed for seed in confirm if seed not in own["seeds"]]}


def _curved(arm: Settings, curve: Settings) -> Settings:
    """Return an arm with what the panel changes in its map."""
    arm = {key: value for key, value in arm.items() if key != "label"}
    return arm if arm.get("home") == "none" or not curve else merge(arm, {"map": curve})
