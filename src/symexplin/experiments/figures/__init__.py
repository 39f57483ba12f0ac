"""The figures of the paper that show data or functions, and one beyond it, drawn from runs, comparisons and weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from symexplin.experiments.figures import curves, distance, functions, maps, rates, weights
from symexplin.experiments.figures.sheet import save_figure
from symexplin.lab.report.charts import STYLE
from symexplin.validation import check_choice

__all__ = ["FIGURES", "FigureSpec", "draw", "format_figures", "save_figure"]


@dataclass(frozen=True)
class FigureSpec:
    """What a figure shows and what it needs.

    Args:
        shows: in a few words.
        place: figure and label in the paper, "" for one beyond it.
        sources: what it is drawn from.
        most: how many sources it takes; 0: it takes none, None: as many as there are. One that takes any needs one.
        draw: from the sources to the figure.
    """

    shows: str
    place: str
    sources: str
    most: int | None
    draw: Callable[[Sequence[Path]], Figure]

    @property
    def origin(self) -> str:
        """The paper's figure, or that it is beyond the paper."""
        return f"the paper's {self.place.partition(',')[0]}" if self.place else "beyond the paper"


_NONE = "nothing"
_COMPARISONS = "folders of comparisons, or of a table of symexplin reproduce"
_COMPARISON = "a comparison, or a table"
_WEIGHTS = "a safetensors file or folder, a run, a comparison or a table (the baseline's run)"
_CURVED = "a run of a curved model, a comparison or a table (the best curved arm's run)"

FIGURES: dict[str, FigureSpec] = {
    "weight_distribution": FigureSpec(
        "trained weights against their initialisation",
        "figure 2, fig:weight_dist",
        _WEIGHTS,
        1,
        weights.weight_distribution,
    ),
    "symexp_controls": FigureSpec(
        "symexp, and what offset and curvature do",
        "figure 3, fig:symexp_controls",
        _NONE,
        0,
        functions.symexp_controls,
    ),
    "congruent_mismatch": FigureSpec(
        "both ways to combine the pathways",
        "figure 4, fig:congruent_vs_mismatch",
        _NONE,
        0,
        functions.congruent_mismatch,
    ),
    "loss_curves": FigureSpec(
        "baseline and best arm by width and depth, with the final gap",
        "figure 5, fig:main_results",
        _COMPARISONS,
        None,
        curves.loss_curves,
    ),
    "mechanism_ablations": FigureSpec(
        "curves of the arms, and final differences to the baseline",
        "figure 6, fig:mechanism_ablations",
        f"{_COMPARISONS}, all of one size",
        None,
        curves.mechanism_ablations,
    ),
    "optimizer_equivalence": FigureSpec(
        "map in the module against map in the optimizer, the difference magnified",
        "figure 7, fig:optimizer_equivalence",
        f"{_COMPARISON}, with an arm of each home",
        1,
        curves.optimizer_equivalence,
    ),
    "lr_annealing": FigureSpec(
        "late losses, and the mean scales during training",
        "figure 8, fig:lr_annealing_ablation",
        f"{_COMPARISON}, with an arm whose scales are annealed",
        1,
        curves.lr_annealing,
    ),
    "raw_effective": FigureSpec(
        "weights of the baseline against raw and effective ones, at start and end",
        "figure 9, fig:raw_effective_hist",
        f"a baseline's run and a curved one, or {_COMPARISON}",
        2,
        weights.raw_effective,
    ),
    "transform_roles": FigureSpec(
        "learned maps by role of the matrices",
        "figure 10, fig:transform_family",
        _CURVED,
        1,
        maps.transform_roles,
    ),
    "transform_outliers": FigureSpec(
        "the same with rare positions and the largest weights",
        "figure 11, fig:transform_outlier_bands",
        _CURVED,
        1,
        maps.transform_outliers,
    ),
    "beta_offset": FigureSpec(
        "curvature and offset together", "figure 12, fig:beta_offset_grid", _NONE, 0, functions.beta_offset
    ),
    "symexp_sel": FigureSpec(
        "symexp beside the exponential pathway",
        "figure 13, fig:symexp_vs_sel",
        _NONE,
        0,
        functions.symexp_sel,
    ),
    "mismatched_start": FigureSpec(
        "what the mismatched start does to Xavier's weights",
        "figure 14, fig:mismatched_init_detail",
        _NONE,
        0,
        functions.mismatched_start,
    ),
    "optimization_distance": FigureSpec(
        "distances from the start, and the steps they take",
        "figure 15, fig:opt_distance",
        _WEIGHTS,
        1,
        distance.optimization_distance,
    ),
    "heavy_tail": FigureSpec(
        "growth, largest weights, deviations and percentiles by matrix",
        "figure 16, fig:heavy_tail",
        _WEIGHTS,
        1,
        weights.heavy_tail,
    ),
    "learning_rates": FigureSpec(
        "final losses by learning rate, and by the step that it makes of effective weights",
        "",
        _COMPARISONS,
        None,
        rates.learning_rates,
    ),
}


def draw(name: str, sources: Sequence[str | Path] = ()) -> Figure:
    """Return a figure, to be written by :func:`save_figure`.

    Args:
        name: of :data:`FIGURES`.
        sources: files and folders, as many as the figure takes.

    Raises:
        ValueError: an unknown name, too many or too few sources, one of another kind or damaged.
        FileNotFoundError: a source that does not exist.

    >>> len(draw("congruent_mismatch").axes)
    2
    """
    spec = FIGURES[check_choice("name", name, FIGURES)]
    fewest = 0 if spec.most == 0 else 1
    if not fewest <= len(sources) <= (len(sources) if spec.most is None else spec.most):
        raise ValueError(f"sources must be {spec.sources} for {name}, got {len(sources)}: {_listed(sources)}")
    try:
        with mpl.rc_context(STYLE):
            return spec.draw([Path(source) for source in sources])
    except KeyError as error:
        raise ValueError(f"{_listed(sources)}: damaged, or of another version of symexplin: it lacks {error}") from None


def _listed(sources: Sequence[str | Path]) -> str:
    return ", ".join(repr(str(source)) for source in sources) or "none"


def format_figures() -> str:
    """Return a list of the figures in plain text: name, place, what each shows and needs."""
    return "\n".join(
        f"{name}\n    {spec.place or spec.origin}: {spec.shows}\n    from {spec.sources}"
        for name, spec in FIGURES.items()
    )
