"""What each table trains at each scale, from configs/*.toml, and what the folder of a table has of it.

The settings of a panel are layers: protocol, table, scale, panel, command. A later layer overrides an earlier one.
"""

import csv
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symexplin.experiments.comparison import Evidence
from symexplin.lab.bench.config import BenchConfig
from symexplin.lab.bench.run import RESULTS
from symexplin.lab.compare.grid import COMPARISON, CompareConfig
from symexplin.lab.config import RunConfig
from symexplin.lab.files import read_json
from symexplin.lab.settings import build, load_toml, merge
from symexplin.validation import check_choice, naming

__all__ = [
    "BASE",
    "BENCH",
    "DATA",
    "PANELS",
    "PASSES",
    "SCALES",
    "TABLE",
    "Outcome",
    "Panel",
    "PanelOutcome",
    "Table",
    "load_table",
    "names",
    "read_table",
]

Settings = dict[str, Any]

SCALES = ("mini", "paper", "h200")
TABLE, PANELS = "table.json", "panels"
BASE, DATA, BENCH = "base", "data", "bench"
_CONFIGS = Path(__file__).parent / "configs"
_PROTOCOLS = "protocols"
# Tables of settings; `map` is that of every curved arm, `base` changes [train] for the run that the others start from.
_SETTINGS = (DATA, "model", "train", "sel", "compute", "log", "compare", "cluster", "map", "arm", BASE, BENCH)
_OF_A_RUN = ("model", "train", "compute", "log")
_OF_A_SCALE = (*_SETTINGS, "panel", "assumptions")
_OF_A_PANEL = (*_SETTINGS, "name", "stands_for")
_TEXTS = ("title", "place", "about", "kind", "protocol", "figures", "baseline")
_OF_A_TABLE = (*_TEXTS, "arm", BASE, BENCH, "panel", "assumptions", *SCALES)
# Training a batch costs a forward and a backward pass, evaluating it the forward pass alone, about a third.
PASSES = 3


@dataclass(frozen=True)
class About:
    """A table at a scale; its data are keys of :class:`PrepareConfig`, none where they are prepared.

    `place` is where in the paper, "" beyond it, `kind` "compare" or "bench". A bench has no baseline and no labels.
    `assumptions` are sentences on the keys that the paper leaves open.
    """

    name: str
    scale: str
    title: str
    place: str
    about: str
    kind: str
    figures: tuple[str, ...]
    baseline: str
    labels: dict[str, str]
    assumptions: dict[str, str]
    data: Settings


@dataclass(frozen=True)
class Panel:
    """One comparison of a table, or one bench; `stands_for` is the paper's panel that it is compared with."""

    name: str
    stands_for: str | None
    config: CompareConfig | BenchConfig


@dataclass(frozen=True)
class Table(About):
    """A table with all configurations; `base` is the run whose weights all others start from, if any."""

    base: RunConfig | None
    panels: tuple[Panel, ...]

    def to_json(self) -> Settings:
        """Return the content of table.json: all but the configurations, which the folders of the panels have."""
        about = {field.name: getattr(self, field.name) for field in dataclasses.fields(About)}
        return {**about, "panels": [{"name": panel.name, "stands_for": panel.stands_for} for panel in self.panels]}


@dataclass(frozen=True)
class PanelOutcome:
    """The result of a panel: `found` is its comparison.json, or {"rows": those of a bench}, or None."""

    name: str
    stands_for: str | None
    folder: Path
    found: Settings | None


@dataclass(frozen=True)
class Outcome(About):
    """The results in a table's folder."""

    panels: tuple[PanelOutcome, ...]

    @property
    def finished(self) -> tuple[Evidence, ...]:
        """The finished comparisons, in the order of the panels; none of a bench."""
        if self.kind == BENCH:
            return ()
        found = ((panel, panel.found) for panel in self.panels if panel.found is not None)
        return tuple(Evidence(p.name, p.folder, content, p.stands_for or "", self.labels) for p, content in found)

    @property
    def unfinished(self) -> dict[str, str]:
        """{name: the paper's panel that it stands for, or ""} of the panels without a result."""
        return {panel.name: panel.stands_for or "" for panel in self.panels if panel.found is None}


def names() -> dict[str, str]:
    """Return {name: title} of all tables of the package."""
    return {name: load_toml(path)["title"] for name, path in _files().items()}


def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_CONFIGS.glob("*.toml")) if path.stem != _PROTOCOLS}


def load_table(
    name: str, scale: str, *, out: str | Path = "", data: str | Path | None = None, changes: Settings | None = None
) -> Table:
    """Return a table of :func:`names`, or of a TOML file of the same form, at a scale, to run in the folder `out`.

    `data` is a prepared folder, `out`/data if None. `changes` override all other settings, by the tables of
    configs/protocols.toml; `map` is for every curved arm.
    """
    check_choice("scale", scale, SCALES)
    changes = {key: value for key, value in (changes or {}).items() if value != {}}
    with naming(f"table {name}"):
        file = _read(name)
        unused = {BENCH, *(() if BASE in file else (BASE,)), *(() if data is None else (DATA,))}
        _check_keys(changes, (BENCH,) if _is_bench(file) else tuple(key for key in _SETTINGS if key not in unused))
        baseline: str = file.get("baseline", "")
        layers = _Layers(_settings(file, scale), changes, baseline, str(out), str(data or Path(out, DATA)))
        settings = merge(layers.settings, changes)
        labels = {arm: table.get("label", arm) for arm, table in settings.get("arm", {}).items()}
        return Table(
            name=Path(name).stem,
            scale=scale,
            **{key: file.get(key, "") for key in ("title", "place", "about", "baseline")},
            kind=file.get("kind", "compare"),
            figures=tuple(file.get("figures", ())),
            labels={baseline: labels.get(baseline, baseline), **labels} if baseline else {},
            assumptions=_assumptions(layers.settings, changes, of_data=data is None),
            data=settings.get(DATA, {}) if data is None else {},
            base=layers.base(),
            panels=tuple(_panels(file, scale, layers)),
        )


def _is_bench(file: Settings) -> bool:
    return file.get("kind") == BENCH


def _read(name: str) -> Settings:
    """Return the table in a TOML file, its keys checked."""
    known = _files()
    if name not in known and not name.endswith(".toml"):
        check_choice("name", name, known)
    file = load_toml(known.get(name, name))
    _check_keys(file, _OF_A_TABLE)
    scales = [file.get(scale, {}) for scale in SCALES]
    for table in scales:
        _check_keys(table, _OF_A_SCALE)
    for panel in (panel for table in (file, *scales) for panel in table.get("panel", [])):
        _check_keys(panel, _OF_A_PANEL)
    for key in () if _is_bench(file) else ("protocol", "baseline"):
        if key not in file:
            raise ValueError(f"{key} must be given")
    return file


def _check_keys(table: Settings, known: tuple[str, ...]) -> None:
    for key, value in table.items():
        check_choice("key", key, known)
        if key in (*_SETTINGS, *SCALES) and not isinstance(value, Mapping):
            raise ValueError(f"[{key}] must be a table, got {value!r}")
        if key == "panel" and not (isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)):
            raise ValueError(f"panel must be tables, each under [[panel]], got {value!r}")
    for name, arm in table.get("arm", {}).items():
        if not isinstance(arm, Mapping):
            raise ValueError(f"[arm.{name}] must be a table, got {arm!r}")


def _protocol(name: str) -> Settings:
    protocols = load_toml(_CONFIGS / f"{_PROTOCOLS}.toml")
    check_choice("protocol", name, protocols)
    found: Settings = dict(protocols[name])
    extended = found.pop("extends", None)
    return merge(_protocol(extended), found) if extended else found


def _settings(file: Settings, scale: str) -> Settings:
    """Return the settings of protocol, table and scale."""
    protocol = {} if _is_bench(file) else _protocol(file["protocol"] if scale == "paper" else scale)
    of_table = {key: file[key] for key in ("arm", BASE, BENCH, "assumptions") if key in file}
    of_scale = {key: value for key, value in file.get(scale, {}).items() if key != "panel"}
    return merge(merge(protocol, of_table), of_scale)


def _assumptions(settings: Settings, changes: Settings, *, of_data: bool) -> dict[str, str]:
    """Return the assumptions, each with the value that the command gives instead."""
    found = {}
    for key, text in settings.get("assumptions", {}).items():
        value: Any = changes
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if of_data or not key.startswith(f"{DATA}."):
            found[key] = text if value is None else f"{text} (Here: {value}.)"
    return found


@dataclass(frozen=True)
class _Layers:
    """Settings of protocol, table and scale, changes of the command, and the places of the table."""

    settings: Settings
    changes: Settings
    baseline: str
    out: str
    data: str

    def comparison(self, panel: Mapping[str, Any]) -> CompareConfig:
        """Return the comparison of a panel."""
        found = self.of(panel)
        arms = found.get("arm", {})
        known = list(dict.fromkeys([self.baseline, *arms]))
        compare = {"baseline": self.baseline, "arms": known, **_confirm_each_once(found["compare"], self.changes)}
        for name in compare["arms"]:
            check_choice("arms", name, known)
        chosen = {name: _curved(arm, found.get("map", {})) for name, arm in arms.items() if name in compare["arms"]}
        run = {key: found[key] for key in (*_OF_A_RUN, "sel", "cluster") if key in found}
        if BASE in self.settings:
            run["train"] = {**run["train"], "weights": str(Path(self.out, BASE))}
        return build(CompareConfig, {"data": self.data, **run, "compare": compare, "arm": chosen})

    def base(self) -> RunConfig | None:
        """Return the AdamW run whose weights all runs start from, if there is one."""
        if BASE not in self.settings:
            return None
        found = self.of({})
        run = {key: found[key] for key in _OF_A_RUN if key in found}
        train = merge(found["train"], found[BASE])
        return build(RunConfig, {"data": self.data, **run, "train": train, "sel": {"home": "none"}})

    def of(self, panel: Mapping[str, Any]) -> Settings:
        """Return all settings of a panel."""
        before = merge(self.settings, {key: panel[key] for key in _SETTINGS if key in panel})
        return _in_proportion(merge(before, self.changes), before, self.changes)


def _in_proportion(settings: Settings, before: Settings, changes: Settings) -> Settings:
    """Adapt warm-up, evaluations and the base's steps where the command changes the steps alone."""
    steps = changes.get("train", {}).get("steps")
    if not isinstance(steps, int) or steps < 1:
        return settings  # the schema checks it
    share = steps / before["train"]["steps"]
    least = {"warmup_steps": 0, "eval_every": -(-2 * settings["train"].get("eval_batches", 0) // PASSES)}
    for table, keys in (("train", ("warmup_steps", "eval_every")), (BASE, ("steps", "warmup_steps"))):
        for key in keys:
            if key in before.get(table, {}) and key not in changes.get(table, {}):
                value = max(round(before[table][key] * share), min(least.get(key, 1), before[table][key]))
                settings = merge(settings, {table: {key: value}})
    return settings


def _confirm_each_once(compare: Settings, changes: Settings) -> Settings:
    """Leave out of the second stage the seeds that the command gives to the first one."""
    own, confirm = changes.get("compare", {}), compare.get("confirm_seeds")
    if "confirm_seeds" in own or not isinstance(own.get("seeds"), list) or not confirm:
        return compare
    return {**compare, "confirm_seeds": [seed for seed in confirm if seed not in own["seeds"]]}


def _curved(arm: Settings, curve: Settings) -> Settings:
    """Return an arm with the panel's changes of its map."""
    arm = {key: value for key, value in arm.items() if key != "label"}
    return arm if arm.get("home") == "none" or not curve else merge(arm, {"map": curve})


def _panels(file: Settings, scale: str, layers: _Layers) -> list[Panel]:
    """Return the panels at a scale, each with the paper's panel that it stands for."""
    size = BENCH if _is_bench(file) else "{width}x{depth}".format(**_protocol(file["protocol"])["model"])
    of_paper = [panel.get("name") for panel in file.get("panel", [])] or [size]
    found: list[Panel] = []
    for entry in (file if scale == "paper" else file.get(scale, {})).get("panel", [{}]):
        config = build(BenchConfig, layers.of(entry).get(BENCH, {})) if _is_bench(file) else layers.comparison(entry)
        own = BENCH if isinstance(config, BenchConfig) else f"{config.model.width}x{config.model.depth}"
        name = entry.get("name", own)
        if not re.fullmatch(r"[\w+-]+", name) or name in [panel.name for panel in found]:
            raise ValueError(f"panel must have a unique name of letters, digits, '+', '-' and '_', got {name!r}")
        likely = of_paper[0] if len(of_paper) == 1 else name
        found.append(Panel(name, entry.get("stands_for", likely if likely in of_paper else None), config))
    return found


def read_table(out: str | Path) -> Outcome:
    """Return the results in a folder of `symexplin reproduce`, finished or not.

    Args:
        out: the folder.

    Raises:
        ValueError: a folder of another kind, a damaged file.
    """
    out = Path(out)
    if not (out / TABLE).exists():
        raise ValueError(f"out must be the folder of a table, which has {TABLE}, got {str(out)!r}")
    about = read_json(out / TABLE)
    try:
        folders = [(panel, out / PANELS / panel["name"]) for panel in about.pop("panels")]
        panels = tuple(PanelOutcome(**panel, folder=folder, found=_found(folder)) for panel, folder in folders)
        return Outcome(**{**about, "figures": tuple(about["figures"])}, panels=panels)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{str(out / TABLE)!r} is damaged: {error}") from None


def _found(folder: Path) -> Settings | None:
    if (folder / COMPARISON).exists():
        return read_json(folder / COMPARISON)
    if (folder / RESULTS).exists():
        with (folder / RESULTS).open(newline="", encoding="utf-8") as file:
            return {"rows": list(csv.DictReader(file))}
    return None
