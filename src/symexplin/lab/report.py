"""One page that shows a comparison: self-contained HTML with its charts inside."""

import importlib.resources
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["render_report"]

# Okabe and Ito's palette, which the colour-blind can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P")
# Evaluations before this fraction of the steps may leave the chart: the first losses dwarf all differences.
_LATE = 0.2
# Text as text, and ids that depend on the content alone: the same data give the same page.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "symexplin",
    "font.family": "sans-serif",
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "legend.fontsize": 10.5,
}


def render_report(summary: Mapping[str, Any]) -> str:
    """Return the page for the summary of :func:`symexplin.lab.demo.run_demo` (or its JSON, read back).

    >>> from symexplin.lab.compare import Run, compare
    >>> import dataclasses
    >>> runs = [Run(arm, 0.1, ((0, 3.0), (10, 2.0)), 1.0, 1.0) for arm in ("AdamW", "SEL")]
    >>> page = render_report({
    ...     "headline": ["Equal."], "comparison": dataclasses.asdict(compare(runs, "AdamW")),
    ...     "runs": [{**dataclasses.asdict(run), "final_loss": run.final_loss} for run in runs],
    ...     "sample": {"arm": "SEL", "lr": 0.1, "text": "<b>"}, "config": {"seed": 0}, "seconds": 1.0,
    ...     "export": {"file": "model.safetensors", "bit_equal": True}, "provenance": {}, "corpus": {},
    ...     "parameters": 1, "maps": {},
    ... })
    >>> "&lt;b&gt;" in page, "https://" in page
    (True, False)
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    source = importlib.resources.files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    runs = summary["runs"]
    return environment.from_string(source).render(
        summary, curves=_svg(_draw_curves, runs), sweep=_svg(_draw_sweep, runs), facts=_facts(summary)
    )


def _svg(draw: Any, runs: Sequence[Mapping[str, Any]]) -> Markup:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.4, 4.2), layout="constrained")
        draw(figure.add_subplot(), runs)
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = buffer.getvalue()
    # What precedes <svg> is for files; numbered ids are not referred to and would repeat between charts.
    return Markup(re.sub(r' id="[\w.]+_\d+"', "", text[text.index("<svg") :]))


def _draw_curves(axes: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw evaluation loss against steps: a colour an arm, a dash pattern a learning rate."""
    arms, lrs = _order(runs, "arm"), sorted(_order(runs, "lr"))
    late = []
    for run in runs:
        if not run["evals"]:
            continue
        steps, losses = zip(*run["evals"], strict=True)
        axes.plot(
            steps,
            losses,
            color=_COLOURS[arms.index(run["arm"]) % len(_COLOURS)],
            linestyle=_DASHES[lrs.index(run["lr"]) % len(_DASHES)],
            linewidth=1.8,
            label=f"{run['arm']}, lr {run['lr']:g}",
        )
        late += [loss for step, loss in run["evals"] if step >= _LATE * steps[-1]]
    margin = 0.05 * (max(late) - min(late)) or 0.1
    axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set_xlim(left=0)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("evaluation loss (nats a token)")
    axes.legend()


def _draw_sweep(axes: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw the final evaluation loss against the learning rate, a line an arm."""
    for index, arm in enumerate(_order(runs, "arm")):
        points = sorted((run["lr"], run["final_loss"]) for run in runs if run["arm"] == arm and run["evals"])
        style: dict[str, Any] = {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index % len(_MARKERS)]}
        axes.plot(*zip(*points, strict=True), linewidth=1.8, markersize=7, label=arm, **style)
    lrs = sorted(_order(runs, "lr"))
    axes.set_xscale("log")
    axes.set_xticks(lrs, [f"{lr:g}" for lr in lrs])
    axes.minorticks_off()
    axes.set_xlabel("peak learning rate (log scale)")
    axes.set_ylabel("final evaluation loss (nats a token)")
    axes.legend()


def _order(runs: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(run[key] for run in runs))


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the runs depend on, as (name, text)."""
    facts = [(f"map of {arm}", _map(found)) for arm, found in summary["maps"].items()]
    whole = {"parameters": summary["parameters"], "seconds in all": summary["seconds"]}
    for part in (summary["corpus"], summary["config"], summary["provenance"], whole):
        facts += [(name.replace("_", " "), _text(value)) for name, value in part.items()]
    return facts


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, float):
        return f"{value:g}"
    return "unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _map(found: Mapping[str, Any]) -> str:
    """Return the form of a map, its start, and every scale that is learned or fixed away from its neutral value."""
    words = [f"mode {found['mode']}", f"beta {_text(found['beta'])}", f"curvature {found['curvature']}"]
    words.append(f"{found['start']} start")
    for role, scale in found.items():
        if not isinstance(scale, Mapping):
            continue
        if scale["pattern"] == "fixed" and scale["start"] not in (0.0, 1.0):
            words.append(f"{role} fixed at {scale['start']:.4g}")
        elif scale["pattern"] != "fixed":
            first, last = scale["peak_lr"] or (None, None)
            words.append(f"{role} {scale['pattern']} with peak learning rate {_text(first)} to {_text(last)}")
    return "; ".join(words)
