"""The page of a run or of a comparison: one HTML file that contains its charts."""

import contextlib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2

from symexplin.config import SELConfig
from symexplin.lab.compare.grid import COMPARISON
from symexplin.lab.compare.grid import CONFIG as COMPARE
from symexplin.lab.files import read_json, replace_file
from symexplin.lab.folders import CONFIG
from symexplin.lab.maps import in_words, map_of
from symexplin.lab.report.figures import comparison_figures, run_figures
from symexplin.lab.report.probe import RunRecord, probe, read_run
from symexplin.lab.settings import to_table

__all__ = ["PAGE", "reading", "report", "report_comparison", "report_run", "write_page"]

Echo = Callable[[str], None]

PAGE, _SAMPLE = "report.html", "sample.txt"
_ROWS = 40  # evaluations in the table of a page
_NATS = "nats per token"
_HOMES = {"optimizer": "in the optimizer", "module": "in the modules"}


def report(folder: str | Path, echo: Echo = lambda _: None) -> Path:
    """Write `report.html` into the folder of a run or of a comparison, and return its path.

    Args:
        folder: of a run, also while it trains, or of a finished comparison.
        echo: receives a warning for each damaged file of a run that the page does without.

    Raises:
        FileNotFoundError, ValueError: another kind of folder, a comparison without result, a file that cannot be read.
    """
    path = Path(folder)
    if (path / COMPARISON).exists() or (path / COMPARE).exists():
        return report_comparison(path)
    if (path / CONFIG).exists():
        return report_run(path, echo)
    raise ValueError(
        f"folder must be that of a run or of a comparison, got {str(folder)!r}, "
        f"which has neither {CONFIG} nor {COMPARISON}"
    )


def report_run(folder: str | Path, echo: Echo = lambda _: None) -> Path:
    """Write `report.html` into the folder of a run, also while it trains; what cannot be read becomes a warning."""
    sample = Path(folder) / _SAMPLE
    with reading(folder):
        warnings: list[str] = []
        run, weights = read_run(folder, lambda text: warnings.append(f"warning: {text}")), None
        try:
            weights = probe(run, warnings.append) if run.config.sel.home != "none" else None
        except FileNotFoundError as error:  # the weights that the run started from
            warnings.append(f"warning: no figure of the map: {error}")
        for line in warnings:
            echo(line)
        return write_page(
            run.folder,
            "run.html.jinja",
            title=f"Run {run.folder.resolve().name}",
            headline=_headline(run),
            warnings=warnings,
            facts=_run_facts(run),
            figures=run_figures(run, weights),
            evaluations=_evaluation_rows(run),
            evaluations_done=len(run.evaluations),
            sample=sample.read_text(encoding="utf-8", errors="replace") if sample.exists() else None,
            settings=_facts(to_table(run.config)),
            provenance=_facts(run.facts["provenance"]),
        )


def report_comparison(folder: str | Path) -> Path:
    """Write `report.html` into the folder of a finished comparison, and return its path."""
    path = Path(folder)
    if not (path / COMPARISON).exists():
        raise FileNotFoundError(
            f"{str(folder)!r} has no {COMPARISON}: finish the comparison with --resume, or report one of its runs"
        )
    found = read_json(path / COMPARISON)
    with reading(path / COMPARISON):
        facts = {f"map of {arm}": _map(curve) for arm, curve in found["maps"].items()}
        extra = {"parameters": found["parameters"], "seconds in all": found["seconds"]}
        for part in (found["corpus"], found["config"], found["provenance"], extra):
            facts |= _facts(part)
        return write_page(
            path,
            "comparison.html.jinja",
            title=f"Comparison of {', '.join(row['arm'] for row in found['comparison']['shared'])}",
            found={"sample": None, **found},
            figures=comparison_figures(found),
            runs=[(run, _link(path, run["folder"])) for run in found["runs"]],
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


def _headline(run: RunRecord) -> list[str]:
    steps = run.config.train.steps
    sentences = [f"Unfinished: step {run.step:,} of {steps:,}. It is still running, or was stopped."]
    if run.summary is not None:
        error = run.summary.get("error")
        sentences = [f"Ended by an error: {error}." if error else f"Finished: {steps:,} steps."]
    if run.evaluations:
        last, best = run.evaluations[-1], min(run.evaluations, key=lambda record: record["eval_loss"])
        sentences.append(f"Held-out loss {last['eval_loss']:.4f} {_NATS} after step {last['step']:,}.")
        if best["eval_loss"] < last["eval_loss"]:
            sentences.append(f"It was lowest after step {best['step']:,}: {best['eval_loss']:.4f}.")
    return sentences


def _run_facts(run: RunRecord) -> dict[str, str]:
    own = run.config.sel
    curve = map_of(own, run.config.model.width)
    told = None if curve is None else {"home": own.home, "start": own.starts_as, **curve.to_dict()}
    known: dict[str, float] = {}
    for records in (run.updates, run.timing, [run.summary or {}]):
        known |= records[-1] if records else {}
    forms = {"parameters": ",", "tokens": ",", "tokens_per_second": ",.0f", "seconds": ",.1f"}
    return {"map": _map(told)} | {name: format(known[name], form) for name, form in forms.items() if name in known}


def _evaluation_rows(run: RunRecord) -> list[dict[str, Any]]:
    """Return the last evaluation and evenly spread ones before it, with their timing."""
    timing = {record["step"]: record for record in run.timing}
    newest_first = run.evaluations[::-1][:: 1 + len(run.evaluations) // _ROWS]
    return [{**timing.get(record["step"], {}), **record} for record in newest_first[::-1]]


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
    """Return the home and the map of an arm in words; `found` has the keys "home" and "start" as well."""
    if found is None:
        return "ordinary weights"
    config = SELConfig.from_dict({key: value for key, value in found.items() if key not in ("home", "start")})
    return f"curved {_HOMES[found['home']]}; {in_words(config, found['start'], rates=True)}"


def _link(folder: Path, run: str) -> str | None:
    """Return the address of the page of a run, if there is one."""
    page = Path(run, PAGE)
    return urllib.parse.quote(page.as_posix()) if (folder / page).exists() else None
