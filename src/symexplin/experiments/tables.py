"""What a table of the paper trains, at each scale, as configs/*.toml say it; and what its folder has of it."""

import csv
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symexplin.experiments.panels import BASE, DATA, SETTINGS, Panels
from symexplin.lab.bench.config import BenchConfig
from symexplin.lab.bench.run import RESULTS
from symexplin.lab.compare.grid import COMPARISON, CompareConfig
from symexplin.lab.config import RunConfig
from symexplin.lab.files import read_json
from symexplin.lab.settings import load_toml, merge
from symexplin.validation import check_choice, naming

__all__ = [
    "PANELS",
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
_CONFIGS = Path(__file__).parent / "configs"
_PROTOCOLS = "protocols"
_BENCH = "bench"
_OF_A_SCALE = (*SETTINGS, "panel", "assumptions")
_OF_A_PANEL = (*SETTINGS, "name", "stands_for")
_TEXTS = ("title", "place", "about", "kind", "protocol", "figures", "baseline")
_OF_A_TABLE = (*_TEXTS, "arm", "base", "bench", "panel", "assumptions", *SCALES)


@dataclass(frozen=True)
class About:
    """What a table at a scale is.

    Args:
        name, scale, title, place, about: what it is, and where in the paper; `place` is "" beyond the paper.
        kind: "compare" or "bench".
        figures: names of the figures that show it.
        baseline: the arm that the others are held against, "" for a bench.
        labels: {arm: what to call it}, the baseline first.
        assumptions: {key: sentence} of what the paper leaves open.
        data: keys of :class:`symexplin.lab.text.prepare.PrepareConfig`, none for data that were prepared elsewhere.
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
    """One comparison of a table, or one measurement; `stands_for` is the paper's panel that it is held against."""

    name: str
    stands_for: str | None
    config: CompareConfig | BenchConfig


@dataclass(frozen=True)
class Table(About):
    """A table with all that is needed to run it; `base` is the run whose weights all others start from, if any."""

    base: RunConfig | None
    panels: tuple[Panel, ...]

    def to_json(self) -> Settings:
        """Return what table.json holds: all but the configurations, which the folders of panels and base have."""
        said = {field.name: getattr(self, field.name) for field in dataclasses.fields(About)}
        return {**said, "panels": [{"name": panel.name, "stands_for": panel.stands_for} for panel in self.panels]}


@dataclass(frozen=True)
class PanelOutcome:
    """What a panel has come to: `found` is what its comparison.json holds, or {"rows": those of a bench}, or None."""

    name: str
    stands_for: str | None
    folder: Path
    found: Settings | None


@dataclass(frozen=True)
class Outcome(About):
    """What a table's folder has."""

    panels: tuple[PanelOutcome, ...]


def names() -> dict[str, str]:
    """Return {name: title} of all tables that come with the package.

    >>> names()["frozen"]
    'Frozen and learned scales'
    """
    return {name: load_toml(path)["title"] for name, path in _files().items()}


def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_CONFIGS.glob("*.toml")) if path.stem != _PROTOCOLS}


def load_table(
    name: str, scale: str, *, out: str | Path = "", data: str | Path | None = None, changes: Settings | None = None
) -> Table:
    """Return a table at a scale.

    Args:
        name: one of :func:`names`, or the path of a TOML file of that form.
        scale: "mini", "paper" or "h200".
        out: the folder that it will run in.
        data: a prepared folder; None: `out`/data.
        changes: settings that go before all others, by the tables of configs/protocols.toml; `map` is for every
            curved arm. Where steps are changed alone, warm-up and evaluations keep their share of them.

    Raises:
        FileNotFoundError, ValueError: no such table or scale, an unknown key, a value out of range.

    >>> table = load_table("frozen", "paper")
    >>> [panel.name for panel in table.panels], table.panels[0].config.train.steps
    (['1024x12'], 100000)
    """
    check_choice("scale", scale, SCALES)
    changes = {key: value for key, value in (changes or {}).items() if value != {}}
    with naming(f"table {name}"):
        file = _read(name)
        without = {_BENCH, *(() if BASE in file else (BASE,)), *(() if data is None else (DATA,))}
        allowed = (_BENCH,) if file.get("kind") == _BENCH else tuple(key for key in SETTINGS if key not in without)
        _check_keys(changes, allowed, "table of settings")
        settings = _settings(file, scale)
        baseline: str = file.get("baseline", "")
        panels = Panels(settings, changes, baseline, Path(out), data)
        said = merge(settings, changes)
        labels = {arm: table.get("label", arm) for arm, table in said.get("arm", {}).items()}
        return Table(
            name=Path(name).stem,
            scale=scale,
            **{key: file.get(key, "") for key in ("title", "place", "about", "baseline")},
            kind=file.get("kind", "compare"),
            figures=tuple(file.get("figures", ())),
            labels={baseline: labels.get(baseline, baseline), **labels} if baseline else {},
            assumptions=_assumptions(settings, changes, data is None),
            data=said.get(DATA, {}) if data is None else {},
            base=panels.base(),
            panels=tuple(_panels(file, scale, panels)),
        )


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
    if file.get("kind") != _BENCH:
        for key in ("protocol", "baseline"):
            if key not in file:
                raise ValueError(f"{key} must be given")
    return file


def _check_keys(table: Settings, known: tuple[str, ...], what: str = "key") -> None:
    for key, value in table.items():
        check_choice(what, key, known)
        if key in (*SETTINGS, *SCALES) and not isinstance(value, Mapping):
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
    """Return what protocol, table and scale say."""
    is_bench = file.get("kind") == _BENCH
    protocol = {} if is_bench else _protocol(file["protocol"] if scale == "paper" else scale)
    said: Settings = {key: file[key] for key in ("arm", "base", "bench", "assumptions") if key in file}
    own = {key: value for key, value in file.get(scale, {}).items() if key != "panel"}
    return merge(merge(protocol, said), own)


def _assumptions(settings: Settings, changes: Settings, of_data: bool) -> dict[str, str]:
    """Return what is assumed, with what the command says instead."""
    found = {}
    for key, text in settings.get("assumptions", {}).items():
        value: Any = changes
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if of_data or not key.startswith(f"{DATA}."):
            found[key] = text if value is None else f"{text} (Here: {value}.)"
    return found


def _panels(file: Settings, scale: str, panels: Panels) -> list[Panel]:
    """Return the panels at a scale, each with the paper's panel that it stands for."""
    if file.get("kind") == _BENCH:
        make: Callable[[Settings], CompareConfig | BenchConfig] = panels.bench
        size = _BENCH
    else:
        make = panels.comparison
        size = _size(_protocol(file["protocol"])["model"])
    of_paper = [panel.get("name") for panel in file.get("panel", [])] or [size]
    found: list[Panel] = []
    for entry in (file if scale == "paper" else file.get(scale, {})).get("panel", [{}]):
        config = make(entry)
        own = _BENCH if isinstance(config, BenchConfig) else _size(dataclasses.asdict(config.model))
        name = entry.get("name", own)
        if not re.fullmatch(r"[\w+-]+", name) or name in [panel.name for panel in found]:
            raise ValueError(f"panel must have a name of its own, of letters, digits, '+', '-' and '_', got {name!r}")
        likely = of_paper[0] if len(of_paper) == 1 else name
        found.append(Panel(name, entry.get("stands_for", likely if likely in of_paper else None), config))
    return found


def _size(model: Settings) -> str:
    return f"{model['width']}x{model['depth']}"


def read_table(out: str | Path) -> Outcome:
    """Return what a folder of `symexplin reproduce` has, finished or not.

    Raises:
        ValueError: a folder of another kind, a damaged file.
    """
    out = Path(out)
    if not (out / TABLE).exists():
        raise ValueError(f"out must be the folder of a table, which has {TABLE}, got {str(out)!r}")
    said = read_json(out / TABLE)
    try:
        folders = [(panel, out / PANELS / panel["name"]) for panel in said.pop("panels")]
        panels = tuple(PanelOutcome(**panel, folder=folder, found=_found(folder)) for panel, folder in folders)
        return Outcome(**{**said, "figures": tuple(said["figures"])}, panels=panels)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{str(out / TABLE)!r} is damaged: {error}") from None


def _found(folder: Path) -> Settings | None:
    if (folder / COMPARISON).exists():
        return read_json(folder / COMPARISON)
    if (folder / RESULTS).exists():
        with (folder / RESULTS).open(newline="", encoding="utf-8") as file:
            return {"rows": list(csv.DictReader(file))}
    return None
