"""The page of a comparison: one HTML file that contains its charts."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2

from symexplin.config import SELConfig
from symexplin.lab.compare.grid import COMPARISON
from symexplin.lab.files import read_json, replace_file
from symexplin.lab.report.charts import comparison_figures

__all__ = ["PAGE", "reading", "report_comparison", "write_page"]

PAGE = "report.html"
_HOMES = {"optimizer": "in the optimizer", "module": "in the modules"}


def report_comparison(folder: str | Path) -> Path:
    """Write `report.html` into the folder of a finished comparison, and return its path."""
    path = Path(folder)
    if not (path / COMPARISON).exists():
        raise FileNotFoundError(f"{str(folder)!r} has no {COMPARISON}: finish the comparison with --resume")
    with reading(path / COMPARISON):
        # What a demo alone has, and what a command does not tell.
        found = {"sample": None, "unit": "", "corpus": {}, "parameters": None, **read_json(path / COMPARISON)}
        facts = {f"map of {variant}": _map(curve) for variant, curve in found["maps"].items()}
        totals = {name: found[name] for name in ("parameters", "seconds") if found[name]}
        for part in (found["corpus"], found["config"], found["provenance"], totals):
            facts |= _facts(part)
        return write_page(
            path,
            "comparison.html.jinja",
            title=f"Comparison of {', '.join(row['variant'] for row in found['comparison']['shared'])}",
            found=found,
            figures=comparison_figures(found),
            facts=facts,
        )


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn the error of a missing key into a ValueError that names the file or folder."""
    try:
        yield
    except (KeyError, jinja2.UndefinedError) as error:
        raise ValueError(f"{str(path)!r} is damaged, or of another version of symexplin: it lacks {error}") from None


def write_page(folder: Path, template: str, package: str = __package__, **values: Any) -> Path:
    """Render a template of `package` into the report.html of a folder; it may extend the templates of this package."""
    loaders = [jinja2.PackageLoader(name, ".") for name in dict.fromkeys((package, __package__))]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    page = folder / PAGE
    replace_file(page, environment.get_template(template).render(values))
    return page


def _facts(part: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a table as text, those of inner tables with dotted names."""
    facts: dict[str, str] = {}
    for name, value in part.items():
        if isinstance(value, Mapping):
            facts |= {f"{name}.{inner}": text for inner, text in _facts(value).items()}
        else:
            facts[name] = _text(value)
    return facts


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "unknown" if value is None else str(value)


def _map(found: Mapping[str, Any] | None) -> str:
    """Return the home and the map of a variant in words; `found` has the keys "home" and "start" as well."""
    if found is None:
        return "ordinary weights"
    config = SELConfig.from_dict({key: value for key, value in found.items() if key not in ("home", "start")})
    return f"curved {_HOMES[found['home']]}; {config.describe(rates=True, start=found['start'])}"
