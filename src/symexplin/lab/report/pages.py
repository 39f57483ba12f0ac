"""The page of a comparison: one HTML file that contains its charts."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2

from symexplin.config import SELConfig
from symexplin.lab.compare.comparison import Comparison
from symexplin.lab.files import replace_file
from symexplin.lab.maps import map_in_words
from symexplin.lab.report.charts import comparison_figures

__all__ = ["PAGE", "reading", "report_comparison", "write_page"]

PAGE = "report.html"
_HOMES = {"optimizer": "in the optimizer", "module": "in the modules"}


def report_comparison(folder: str | Path) -> Path:
    """Write `report.html` into the folder of a finished comparison, and return its path."""
    comparison = Comparison.load(folder)
    facts = {f"map of {comparison.label(variant)}": _map(curve) for variant, curve in comparison.maps.items()}
    for name, part in comparison.facts.items():
        facts |= _facts(part) if name != "sample" else {}
    with reading(folder):
        return write_page(
            Path(folder),
            "comparison.html.jinja",
            title=f"Comparison of {', '.join(map(comparison.label, comparison.variants))}",
            comparison=comparison,
            figures=comparison_figures(comparison),
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


def _map(table: Mapping[str, Any] | None) -> str:
    """Return the home and the map of a variant in words; the table has the keys "home" and "start" as well."""
    if table is None:
        return "ordinary weights"
    config = SELConfig.from_dict({key: value for key, value in table.items() if key not in ("home", "start")})
    return f"curved {_HOMES[table['home']]}; {map_in_words(config, table['start'])}"
