"""The figures of the paper that show data or functions, and one beyond it, from runs, comparisons and weights."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from symexplin.checks import check_choice
from symexplin.experiments.figures import curves, maps, weights
from symexplin.lab.files import replacing
from symexplin.lab.report.charts import STYLE, UNDATED

__all__ = ["FIGURES", "FigureSpec", "draw", "format_figures", "save_figure"]


@dataclass(frozen=True)
class FigureSpec:
    """What a figure needs: sources, and at most how many of them (None: any number).

    The docstring of `draw` says what it shows. `place` is the figure and its label in the paper, "" for one beyond it.
    """

    draw: Callable[[Sequence[Path]], Figure]
    place: str
    sources: str = "none"
    most: int | None = 0

    @property
    def shows(self) -> str:
        """What the figure shows, in a few words."""
        words = (inspect.getdoc(self.draw) or "").partition("\n")[0]
        return words.removeprefix("Draw ").removesuffix(".")


_COMPARISONS = "folders of comparisons, or of a table of symexplin reproduce"
_COMPARISON = "a comparison, or a table"
_HOMES = f"{_COMPARISON}, with a variant of each home"
_ANNEALED = f"{_COMPARISON}, with a variant whose scales are annealed"
_WEIGHTS = "a safetensors file or folder, a run, a comparison or a table (the baseline's run)"
_CURVED = "a run of a curved model, a comparison or a table (the best curved variant's run)"
_PAIR = f"a baseline's run and a curved one, or {_COMPARISON}"

FIGURES: dict[str, FigureSpec] = {
    spec.draw.__name__: spec
    for spec in (
        FigureSpec(weights.weight_distribution, "figure 2, fig:weight_dist", _WEIGHTS, 1),
        FigureSpec(maps.symexp_controls, "figure 3, fig:symexp_controls"),
        FigureSpec(maps.congruent_mismatch, "figure 4, fig:congruent_vs_mismatch"),
        FigureSpec(curves.loss_curves, "figure 5, fig:main_results", _COMPARISONS, None),
        FigureSpec(curves.mechanism_ablations, "figure 6, fig:mechanism_ablations", _COMPARISONS, None),
        FigureSpec(curves.optimizer_equivalence, "figure 7, fig:optimizer_equivalence", _HOMES, 1),
        FigureSpec(curves.lr_annealing, "figure 8, fig:lr_annealing_ablation", _ANNEALED, 1),
        FigureSpec(weights.raw_effective, "figure 9, fig:raw_effective_hist", _PAIR, 2),
        FigureSpec(maps.transform_roles, "figure 10, fig:transform_family", _CURVED, 1),
        FigureSpec(maps.transform_outliers, "figure 11, fig:transform_outlier_bands", _CURVED, 1),
        FigureSpec(maps.beta_offset, "figure 12, fig:beta_offset_grid"),
        FigureSpec(maps.symexp_sel, "figure 13, fig:symexp_vs_sel"),
        FigureSpec(maps.mismatched_start, "figure 14, fig:mismatched_init_detail"),
        FigureSpec(weights.optimization_distance, "figure 15, fig:opt_distance", _WEIGHTS, 1),
        FigureSpec(weights.heavy_tail, "figure 16, fig:heavy_tail", _WEIGHTS, 1),
        FigureSpec(weights.idea, "", _PAIR, 2),
    )
}


def draw(name: str, sources: Sequence[str | Path] = ()) -> Figure:
    """Return a figure of :data:`FIGURES` from as many files and folders as it takes, to give to :func:`save_figure`.

    Raises:
        ValueError: an unknown name, too many or too few sources, or one of another kind.
        FileNotFoundError: a source that does not exist.

    >>> len(draw("congruent_mismatch").axes)
    2
    """
    spec = FIGURES[check_choice("name", name, FIGURES)]
    if not (sources if spec.most is None else min(1, spec.most) <= len(sources) <= spec.most):
        given = ", ".join(repr(str(source)) for source in sources) or "none"
        raise ValueError(f"sources must be {spec.sources} for {name}, got {len(sources)}: {given}")
    with mpl.rc_context(STYLE):
        return spec.draw([Path(source) for source in sources])


def format_figures() -> str:
    """Return a list of the figures in plain text: name, place, what each shows and needs."""
    return "\n".join(
        f"{name}\n    {spec.place or 'beyond the paper'}: {spec.shows}\n    from: {spec.sources}"
        for name, spec in FIGURES.items()
    )


def save_figure(figure: Figure, folder: str | Path, name: str) -> tuple[Path, Path]:
    """Write NAME.svg and NAME.png into a folder, which is created if missing, and return both paths.

    The same figure gives the same bytes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.svg", folder / f"{name}.png"
    for path, metadata in zip(paths, (UNDATED, {"Software": None}), strict=True):
        with mpl.rc_context(STYLE), replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:], metadata=metadata)
    return paths
