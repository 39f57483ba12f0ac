"""What each table trains at each scale, from configs/*.toml, and what the folder of a table has of it.

The settings of a panel are layers: protocol, table, scale, panel, command. A later layer overrides an earlier one.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

from symexplin.checks import check_choice, naming
from symexplin.experiments.claims import Claim, PanelResult
from symexplin.lab.compare.comparison import Comparison
from symexplin.lab.compare.grid import COMPARISON, CompareConfig, GridConfig
from symexplin.lab.files import read_json
from symexplin.lab.settings import differences, from_table, load_toml, merge, to_table

__all__ = ["DATA", "PANELS", "SCALES", "TABLE", "Panel", "ScaleName", "Table", "load_table", "names", "read_table"]

Settings = dict[str, Any]
P = TypeVar("P")

ScaleName = Literal["mini", "paper", "h200"]
SCALES = get_args(ScaleName)
TABLE, PANELS = "table.json", "panels"
DATA = "data"
_CONFIGS = Path(__file__).parent / "configs"
_PROTOCOLS = "protocols"
_OF_PAPER = ("main_grid", "controlled")  # the protocols that a table may name
# What is read here; the schema of a comparison checks all else.
_LISTS = ("panel", "claim")
_TABLES = ("assumptions", "compare", "data", "map", "reported", "train", "variant")


@dataclass(frozen=True)
class Panel:
    """One comparison of a table; `stands_for` is the paper's panel that it is compared with, or ""."""

    name: str
    stands_for: str
    config: CompareConfig


@dataclass(frozen=True)
class Table(Generic[P]):
    """A table at a scale, with panels to run (:class:`Panel`), or with what a folder has (:class:`PanelResult`).

    `place` is where in the paper, "" beyond it. `labels` are those of the variants, the baseline first. `assumptions`
    are sentences on the keys that the paper leaves open. `data` has keys of :class:`PrepareConfig`. `reported` are the
    paper's numbers, {"loss" or "speedup": {panel: {variant: number}}}.
    """

    name: str
    scale: str
    title: str
    place: str
    about: str
    figures: Sequence[str]
    baseline: str
    labels: dict[str, str]
    assumptions: dict[str, str]
    data: Settings
    reported: dict[str, dict[str, dict[str, float]]]
    claims: tuple[Claim, ...]
    panels: tuple[P, ...]

    def to_json(self: "Table[Panel]") -> Settings:
        """Return the content of table.json: all but the configurations, which the folders of the panels have."""
        panels = [{"name": panel.name, "stands_for": panel.stands_for} for panel in self.panels]
        return {**vars(self), "claims": [to_table(claim) for claim in self.claims], "panels": panels}


def names() -> dict[str, str]:
    """Return {name: title} of all tables of the package."""
    return {name: load_toml(path)["title"] for name, path in _files().items()}


def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_CONFIGS.glob("*.toml")) if path.stem != _PROTOCOLS}


def load_table(
    name: str,
    scale: str,
    *,
    out: str | Path = "",
    data: str | Path | None = None,
    changes: Settings | None = None,
) -> Table[Panel]:
    """Return a table of :func:`names`, or of a TOML file of the same form, at a scale, to run in the folder `out`.

    `data` is a prepared folder, `out`/data if None. `changes` override all other settings, by the tables of
    configs/protocols.toml; `map` is for every curved variant.
    """
    check_choice("scale", scale, SCALES)
    known = _files()
    if not name.endswith(".toml"):
        check_choice("name", name, known)
    with naming(f"table {name}"):
        file = load_toml(known.get(name, name), "name")
        about = {key: file.pop(key, "") for key in ("title", "place", "about", "baseline")}
        figures = file.pop("figures", ())
        settings = _settings(file, scale)
        of_paper = _settings({"protocol": "controlled", **file}, "paper")
        changes = {key: value for key, value in (changes or {}).items() if value != {}}
        _check(settings, changes, about["baseline"])
        if data is not None and DATA in changes:
            raise ValueError(f"[{DATA}] must be left to prepared data, got {changes[DATA]!r}")
        to_prepare = merge(settings.pop(DATA, {}), changes.pop(DATA, {}))
        reported, assumptions = settings.pop("reported", {}), settings.pop("assumptions", {})
        if data is not None:
            to_prepare = {}
            assumptions = {key: text for key, text in assumptions.items() if not key.startswith(f"{DATA}.")}
        given = {key: f" (Here: {value}.)" for key, (_, value) in differences({}, changes).items()}
        entries, claims = settings.pop("panel", [{}]), settings.pop("claim", [])
        variants = merge({about["baseline"]: {}, **settings.get("variant", {})}, changes.get("variant", {}))
        settings |= {DATA: str(data or Path(out, DATA)), "baseline": about["baseline"]}
        size = "{width}x{depth}".format(**of_paper["model"])
        papers: list[str] = [entry.get("name", size) for entry in of_paper.get("panel", [{}])]
        panels = tuple(_panels(settings, entries, changes, papers))  # these check the variants
        judged = tuple(from_table(Claim, claim) for claim in claims)
        _check_claims(judged, papers, {**variants, **of_paper.get("variant", {})})
        return Table(
            **about,
            name=Path(name).stem,
            scale=scale,
            figures=figures,
            reported=reported,
            claims=judged,
            labels={variant: table.get("label", variant) for variant, table in variants.items()},
            assumptions={key: text + given.get(key, "") for key, text in assumptions.items()},
            data=to_prepare,
            panels=panels,
        )


def _settings(file: Settings, scale: str) -> Settings:
    """Return the settings of protocol, table and scale; a scale's own panels replace the table's."""
    of_table = {key: value for key, value in file.items() if key not in ("protocol", *SCALES)}
    protocol = scale if scale != "paper" else check_choice("protocol", file.get("protocol"), _OF_PAPER)
    return merge(_protocol(protocol), merge(of_table, file.get(scale, {})))


def _protocol(name: str) -> Settings:
    settings: Settings = load_toml(_CONFIGS / f"{_PROTOCOLS}.toml")[name]
    extended = settings.pop("extends", None)
    return merge(_protocol(extended), settings) if extended else settings


def _check(settings: Settings, changes: Settings, baseline: str) -> None:
    """Check what the layers need."""
    for key, value in (*settings.items(), *changes.items()):
        if key in _LISTS and not isinstance(value, list):
            raise ValueError(f"{key} must be tables, each under [[{key}]], got {value!r}")
        if key in _TABLES and not isinstance(value, Mapping):
            raise ValueError(f"[{key}] must be a table, got {value!r}")
    if not baseline:
        raise ValueError("baseline must be given")
    for variant in changes.get("variant", ()):
        check_choice("variant", variant, [baseline, *settings.get("variant", ())])


def _check_claims(claims: Sequence[Claim], panels: Collection[str], variants: Collection[str]) -> None:
    """Check that claims are about panels and variants that the table has at the paper's scale."""
    for claim in claims:
        for panel in {*claim.panels, claim.since} - {""}:
            check_choice("panels and since of a claim", panel, panels)
        for variant in claim.variants:
            check_choice("variant and against of a claim", variant, variants)


def _panels(
    settings: Settings, entries: Sequence[Settings], changes: Settings, papers: Sequence[str]
) -> Iterator[Panel]:
    """Yield the panels, each with the one of the `papers` that it stands for."""
    seen = set()
    for entry in entries:
        of_panel = {key: value for key, value in entry.items() if key not in ("name", "stands_for")}
        config = _config(_in_proportion(merge(settings, of_panel), changes), changes.get("map", {}))
        name: str = entry.get("name", f"{config.model.width}x{config.model.depth}")
        if not re.fullmatch(r"[\w+-]+", name) or name in seen:
            raise ValueError(f"panel must have a unique name of letters, digits, '+', '-' and '_', got {name!r}")
        seen.add(name)
        likely = papers[0] if len(papers) == 1 else name
        yield Panel(name, entry.get("stands_for", likely if likely in papers else ""), config)


def _in_proportion(before: Settings, changes: Settings) -> Settings:
    """Merge changes; where they change the steps alone, schedule, warm-up and evaluations keep their share."""
    settings = merge(before, changes)
    steps = changes.get("train", {}).get("steps")
    if not isinstance(steps, int) or steps < 1:
        return settings  # the schema checks it
    for key, least in (("lr_decay_steps", 1), ("warmup_steps", 0), ("eval_every", 1)):
        if key in before["train"] and key not in changes["train"]:
            settings["train"][key] = max(round(before["train"][key] * steps / before["train"]["steps"]), least)
    return settings


def _config(settings: Settings, forced: Settings) -> CompareConfig:
    """Return the configuration of a panel; every curved variant has the map `forced`."""
    variants, curve, baseline = settings.pop("variant", {}), settings.pop("map", {}), settings.pop("baseline")
    known = list(dict.fromkeys([baseline, *variants]))
    compare = {"baseline": baseline, "variants": known, **settings["compare"]}
    wanted = from_table(GridConfig, compare).variants
    for name in wanted:
        check_choice("variants", name, known)
    chosen = {name: _curved(variant, curve, forced) for name, variant in variants.items() if name in wanted}
    return from_table(CompareConfig, {**settings, "compare": compare, "variant": chosen})


def _curved(variant: Any, curve: Settings, forced: Settings) -> Any:
    """Return a variant whose map has the keys of the panel that it leaves open, and those that the command forces."""
    if not isinstance(variant, Mapping):
        return variant  # the schema refuses it
    variant = {key: value for key, value in variant.items() if key != "label"}
    if variant.get("home") == "none" or not (curve or forced):
        return variant
    return {**variant, "map": merge(curve, merge(variant.get("map", {}), forced))}


def read_table(out: str | Path) -> Table[PanelResult]:
    """Return the results in a folder of `symexplin reproduce`, finished or not.

    Raises:
        ValueError: a folder of another kind.
    """
    out = Path(out)
    if not (out / TABLE).exists():
        raise ValueError(f"out must be the folder of a table, got {str(out)!r} without {TABLE}")
    about = read_json(out / TABLE)
    claims = tuple(from_table(Claim, claim) for claim in about.pop("claims"))
    panels = []
    for panel in about.pop("panels"):
        folder = out / PANELS / panel["name"]
        comparison = Comparison.load(folder) if (folder / COMPARISON).exists() else None
        panels.append(PanelResult(panel["name"], panel["stands_for"], comparison))
    return Table(**about, claims=claims, panels=tuple(panels))
