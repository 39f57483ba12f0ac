"""The tables of README and the documentation: what each cell shows, and their text from the rows of results."""

import csv
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rows import Key, Place, Rows, difference, mean_after

ROOT = Path(__file__).parents[1]
ELSEWHERE = ROOT / "results/elsewhere.csv"  # figures whose runs have no rows
EVIDENCE = "docs/explanation/evidence.md"
PAGES = ("README.md", EVIDENCE, "docs/explanation/idea.md", "docs/how-to/start-with.md")

ONE = Key("width-1024", "1024x1", "44ad1b2", 1500)
ONE_GPU = Key("width-1024-gpu", "1024x1", "fa670e7", 1500)
ONE_LAYER_NORM = Key("width-1024-cores", "1024x1-layer", "50a7ce3", 1500)
ONE_NO_BIAS = Key("width-1024-cores", "1024x1-no-bias", "50a7ce3", 1500)
TWELVE = Key("width-1024-gpu", "1024x12", "648d882", 1000)
TWELVE_INIT = Key("width-1024-gpu", "1024x12", "354dea9", 1000)
TWELVE_FIRST = Key("width-1024-gpu", "1024x12", "1e5a7df", 1000)
TWELVE_LAYER_NORM = Key("width-1024-start", "1024x12-layer", "ee10189", 1000)
TWELVE_STD_32 = Key("width-1024-start", "1024x12-std32", "ee10189", 1000)
EIGHT = Key("width-1024-cores", "256x8", "50a7ce3", 250)
EIGHT_LAYER_NORM = Key("width-1024-cores", "256x8-layer", "50a7ce3", 250)
AUTHOR = Key("author-256", "256x8-author", "8cffc2e", 300)
AUTHOR_OURS = Key("author-256", "256x8", "8cffc2e", 300)
AUTHOR_512 = Key("author-512", "512x8-author", "472eee1", 300)
AUTHOR_WIDE = Key("width-1024-author", "1024x1-author", "850ec03", 600)
CONTROL = Key("control", "128x4", "b3eebc4", 600)
SPARSITY = Key("sparsity", "64x3", "8648390", 1000)


class Seeds(NamedTuple):
    """A place, with the differences by seed."""

    place: Place


class After(NamedTuple):
    """A place after some of the steps."""

    place: Place
    steps: int


class Elsewhere(NamedTuple):
    """A figure of results/elsewhere.csv."""

    setting: str
    method: str
    against: str = "AdamW"


Cell = str | Place | Seeds | After | Elsewhere
Table = Sequence[Sequence[Cell]]  # the first row is the heading


def mini(table: str, variant: str, other: str = "AdamW") -> Seeds:
    """Return the cell of one of the paper's tables in miniature."""
    return Seeds(Place(Key(table, "128x4", "d3fc95d", 600), variant, other))


def both(variant: str, other: str = "AdamW") -> tuple[Place, Place]:
    """Return the cells of the model of the author's harness, and of the laboratory's of the same size."""
    return Place(AUTHOR, variant, other), Place(AUTHOR_OURS, variant, other)


def sizes(variant: str) -> tuple[Place, Place, Place]:
    """Return the cells of the laboratory's model with one, twelve and eight layers."""
    return Place(ONE, variant), Place(TWELVE, variant), Place(AUTHOR_OURS, variant)


def course(setting: str, method: str, key: Key, variant: str) -> tuple[Cell, ...]:
    """Return a row of differences from AdamW after each sixth of the steps, from the second on."""
    return f"{setting}: {method}", *(After(Place(key, variant), key.steps * sixths // 6) for sixths in range(2, 7))


def final_scales(setting: str) -> tuple[Elsewhere, ...]:
    """Return the cells of the means of e and l in the author's model at the end of training; both start at 1."""
    return tuple(Elsewhere(f"the author's model, {setting}: mean {scale}", OWN, "1") for scale in ("e", "l"))


def alone(setting: str, method: str, against: str = "AdamW") -> tuple[str, str, str, Elsewhere]:
    """Return a row of results/elsewhere.csv."""
    return setting, method, against, Elsewhere(setting, method, against)


NUMBER = "[one learned scale per matrix](../how-to/start-with.md#one-learned-scale-per-matrix), no curve"
QK_BIAS = "[QK-bias AdamW](../reference/glossary.md#methods)"
OWN = "the paper's method"
INIT = "the paper's method with its initialization"
LLAMA = "a Llama of width 64, 300 steps"
GPT = "a GPT-2 of width 64, 300 steps"
QK_START = "queries and keys start at 0.1 of their size"
FORMS = ("the default in the optimizer", "the default in the module form")
AVERAGED = ("fixed mismatch, averaged with the first weights", "L2-SP, averaged with the first weights")
L1 = ("the exponential map with L1", "AdamW with L1")
LINEAR_LAYERS = ("fixed mismatch, linear layers at 4.2 times the rate", "AdamW, linear layers at 6 times the rate")

TABLES: Mapping[str, Table] = {
    "yours": (
        ("your model", "what to try, in this order", "1 layer", "12 layers", "8 layers, width 256"),
        ("QK-norm and biases, RMSNorm", "QK-bias AdamW", *sizes("qk_all")),
        ("", "one learned scale per matrix", *sizes("number")),
        ("", OWN, *sizes("matched")),
        (
            "QK-norm and biases, LayerNorm",
            "one learned scale per matrix",
            Place(ONE_LAYER_NORM, "number"),
            "not tested",
            "not tested",
        ),
        ("", OWN, Place(ONE_LAYER_NORM, "matched"), Place(TWELVE_LAYER_NORM, "matched"), "not tested"),
        (
            "QK-norm, no biases (Qwen3)",
            "one learned scale per matrix",
            Place(ONE_NO_BIAS, "number"),
            "not tested",
            "not tested",
        ),
        ("", OWN, Place(ONE_NO_BIAS, "matched"), "not tested", "not tested"),
        (
            "a model that the paper's author published: no biases on queries, keys, values",
            "one learned scale per matrix",
            Place(AUTHOR_WIDE, "number"),
            "not tested",
            Place(AUTHOR, "number"),
        ),
        ("", OWN, Place(AUTHOR_WIDE, "matched"), "not tested", Place(AUTHOR, "matched")),
        (
            "no QK-norm (Llama, GPT-2), fine-tuning, LoRA, **or** image models",
            "stay with AdamW",
            "no gain in [small models](docs/how-to/start-with.md) and "
            "[other tasks](docs/explanation/evidence.md#fine-tuning-pruning-images)",
            "not tested",
            "not tested",
        ),
    ),
    "one-layer": (
        ("minus AdamW, one layer", "RMSNorm, biases", "RMSNorm, no biases", "LayerNorm, biases"),
        ("the default", Place(ONE, "exp"), Place(ONE_NO_BIAS, "default"), ""),
        (INIT, Place(ONE, "paper"), "", Place(ONE_LAYER_NORM, "paper")),
        (OWN, Place(ONE, "matched"), Place(ONE_NO_BIAS, "matched"), Place(ONE_LAYER_NORM, "matched")),
        ("its map with fixed scales", "", "", Place(ONE_LAYER_NORM, "frozen_matched")),
        ("its map with fixed scales and its initialization", Place(ONE, "frozen"), "", Place(ONE_LAYER_NORM, "frozen")),
        ("learned row x column scales, no curve", Place(ONE, "linear"), Place(ONE_NO_BIAS, "linear"), ""),
        (NUMBER, Place(ONE, "number"), Place(ONE_NO_BIAS, "number"), Place(ONE_LAYER_NORM, "number")),
        ("AdamW, all matrices at half the rate", Place(ONE, "half"), "", ""),
        (
            "AdamW, queries and keys at 0.05 of the scale and rate",
            Place(ONE, "qk_both"),
            Place(ONE_NO_BIAS, "qk_both"),
            Place(ONE_LAYER_NORM, "qk_both"),
        ),
        (QK_BIAS, Place(ONE, "qk_all"), "", ""),
        ("AdamW with the learned scales of seed 0 hard-coded", Place(ONE, "hand"), "", ""),
        ("AdamW, weight decay 0.1", Place(ONE, "decay"), "", ""),
        ("AdamW, a longer warm-up, both at 7e-4", Place(ONE_GPU, "warmup@7e-4", "AdamW@7e-4"), "", ""),
        ("AdamW, betas of 0.9 and 0.95, both at 7e-4", Place(ONE_GPU, "betas@7e-4", "AdamW@7e-4"), "", ""),
    ),
    "one-layer-pairs": (
        ("one layer", "minus", "difference"),
        ("AdamW at its best rate", "AdamW at 3e-4", Place(ONE, "AdamW", "AdamW@3e-4")),
        (f"{INIT}, at 3e-4", "AdamW at 3e-4", Place(ONE, "paper@3e-4", "AdamW@3e-4")),
        ("the default at 3e-4", "AdamW at 3e-4", Place(ONE, "exp@3e-4", "AdamW@3e-4")),
        ("one learned scale per matrix", INIT, Place(ONE, "number", "paper")),
        ("the same, no biases", OWN, Place(ONE_NO_BIAS, "number", "matched")),
        ("the same, LayerNorm", OWN, Place(ONE_LAYER_NORM, "number", "matched")),
        ("QK-bias AdamW", INIT, Place(ONE, "qk_all", "paper")),
        (f"{OWN}, with the changes of QK-bias AdamW", "QK-bias AdamW", Place(ONE, "matched_all", "qk_all")),
        ("the default with the changes of QK-bias AdamW", "QK-bias AdamW", Place(ONE, "exp_all", "qk_all")),
    ),
    "twelve-layers": (
        ("minus AdamW, 12 layers", "the paper, 100,000 steps or more", "RMSNorm", "LayerNorm", "large embeddings"),
        ("the default", "-0.005 (table 5)", Seeds(Place(TWELVE, "default")), "", ""),
        (
            INIT,
            "-0.031 (table 2)",
            Seeds(Place(TWELVE_INIT, "paper", against=TWELVE)),
            Seeds(Place(TWELVE_LAYER_NORM, "paper")),
            Place(TWELVE_STD_32, "paper"),
        ),
        (
            OWN,
            "",
            Seeds(Place(TWELVE, "matched")),
            Seeds(Place(TWELVE_LAYER_NORM, "matched")),
            Elsewhere("width 1024, 12 layers, embeddings of standard deviation 32", OWN),
        ),
        (NUMBER, "+0.019 (table 7)", Seeds(Place(TWELVE, "number")), "", ""),
        (QK_BIAS, "", Seeds(Place(TWELVE, "qk_all")), "", ""),
        (
            "AdamW, minus AdamW with RMSNorm and small embeddings",
            "",
            "",
            Seeds(Place(TWELVE_LAYER_NORM, "AdamW", against=TWELVE)),
            Place(TWELVE_STD_32, "AdamW", "AdamW@1e-3", TWELVE),
        ),
        (
            "AdamW at 7e-4, the same run at another commit minus the first",
            "",
            Place(TWELVE_FIRST, "AdamW@7e-4", "AdamW@7e-4", TWELVE),
            "",
            "",
        ),
    ),
    "initialization": (
        ("loss with it minus loss without it", "RMSNorm", "LayerNorm"),
        (
            "width 1024, one layer",
            Place(ONE, "paper", "matched"),
            Seeds(Place(ONE_LAYER_NORM, "paper", "matched")),
        ),
        ("the same, fixed scales", "", Seeds(Place(ONE_LAYER_NORM, "frozen", "frozen_matched"))),
        (
            "width 1024, 12 layers (RMSNorm: both at 7e-4)",
            Place(TWELVE_INIT, "paper@7e-4", "matched@7e-4", TWELVE),
            Seeds(Place(TWELVE_LAYER_NORM, "paper", "matched")),
        ),
        (
            "width 256, 8 layers, 250 steps, all at 1e-3",
            Seeds(Place(EIGHT, "paper", "matched")),
            Seeds(Place(EIGHT_LAYER_NORM, "paper", "matched")),
        ),
    ),
    "author": (
        ("final loss, width 256, 8 layers", "minus", "the author's model", "our model"),
        (OWN, "AdamW", *both("matched")),
        (INIT, "AdamW", *both("paper")),
        (INIT, OWN, *both("paper", "matched")),
        ("the same, but not of the output and down projections", OWN, *both("inside", "matched")),
        ("AdamW, biases at 0", "AdamW", *both("AdamW-zero-bias")),
        (f"{OWN}, biases at 0", "AdamW, biases at 0", *both("matched-zero-bias", "AdamW-zero-bias")),
        ("one learned scale per matrix, no curve", "AdamW", *both("number")),
        ("QK-bias AdamW", "AdamW", *both("qk_all")),
    ),
    "author-sizes": (
        (
            "minus AdamW, the author's model at other sizes",
            OWN,
            "one learned scale per matrix, no curve",
            f"{INIT}, but not of the output and down projections, minus {OWN}",
        ),
        (
            "width 512, 8 layers",
            Place(AUTHOR_512, "matched"),
            Place(AUTHOR_512, "number"),
            Place(AUTHOR_512, "inside", "matched"),
        ),
        ("width 1024, one layer", Place(AUTHOR_WIDE, "matched"), Place(AUTHOR_WIDE, "number"), "not tested"),
    ),
    "course": (
        ("minus AdamW, the author's model", "after 1/3", "1/2", "2/3", "5/6", "at the end"),
        course("width 1024, one layer", OWN, AUTHOR_WIDE, "matched"),
        course("the same", "one learned scale per matrix", AUTHOR_WIDE, "number"),
        course("width 512, eight layers", OWN, AUTHOR_512, "matched"),
        course("the same", "one learned scale per matrix", AUTHOR_512, "number"),
    ),
    "scales": (
        ("the paper's method, mean of all learned scales at the end (1 at the start)", "e", "l"),
        ("the paper, width 1024, 12 layers, 100,000 steps at 3e-4, one seed (section 5.4.2)", "1.38", "0.54"),
        ("here, width 1024, one layer, 600 steps at 2e-3", *final_scales("width 1024, one layer, 600 steps")),
        ("here, width 512, 8 layers, 300 steps at 1e-3", *final_scales("width 512, 8 layers, 300 steps")),
    ),
    "claims": (
        ("claim", "the paper, per token", "here, per byte: mean (seeds 0, 1, 2)"),
        (
            "the paper's method with its initialization ends below AdamW (table 2)",
            "-0.031",
            mini("main_grid", "mismatch"),
        ),
        ("... with offset and LoRA", "-0.038", mini("main_grid", "mismatch+offset")),
        ("congruent ends below AdamW (table 3)", "-0.011", mini("start_1024", "congruent")),
        ("the default ends below AdamW (table 5)", "-0.005", mini("exp_only", "exp_only-ff")),
        ("... with its scale learned", "-0.009", mini("exp_only", "exp_only-lf")),
        ("curves help with all scales fixed, the paper's initialization (table 6)", "-0.018", mini("frozen", "frozen")),
        (
            "... the congruent map, from the model's own initial weights",
            "-0.008",
            mini("frozen", "frozen-congruent"),
        ),
        ("learning the scales helps further (table 6)", "-0.016", mini("frozen", "fixed_curvature", "frozen")),
        (
            "one learned scale per matrix without a curve is worse than AdamW (table 7)",
            "+0.019",
            mini("structured_linear", "linear-global"),
        ),
        (
            "annealed learning rates of the scales beat fixed ones (table 9)",
            "-0.005",
            mini("lr_annealing", "annealed", "fixed"),
        ),
        ("a curvature learned in log space is better (table 10)", "-0.006", mini("curvature", "absorbed", "fixed")),
        (
            "the two forms of the default agree: mean absolute difference of their evaluations (section 5.3.5)",
            "0.0009",
            Elsewhere("width 128, 4 layers, 600 steps: mean absolute difference", *FORMS),
        ),
        (
            "trained weights have heavier tails: excess kurtosis (section 5.4.1)",
            "yes",
            Elsewhere("width 128, 4 layers, 600 steps: excess kurtosis of the trained weights", INIT),
        ),
    ),
    "tasks": (
        ("task", "method", "against", "difference (99% interval; seeds)"),
        alone("fine-tuning: loss on the old text at equal loss on the new", *AVERAGED),
        (
            "pruning during training, 80% zeros",
            "the exponential map, gradual pruning",
            "Powerpropagation, gradual pruning",
            Place(SPARSITY, "exp-16-gradual-80", "power-2-gradual-80"),
        ),
        alone("pruning at once, 70% zeros", *L1),
        alone("pruning at once, two of four", *L1),
        alone("rounding to int4", *L1),
        alone("images: ResNet", "fixed mismatch, all convolutions"),
        alone("images: ConvNeXt", *LINEAR_LAYERS),
        alone("linear model, 10 of 1,000 inputs matter: squared error", L1[0], "AdamW with a log-sum penalty"),
    ),
    "no-gain": (
        ("model", "tried", "minus AdamW"),
        (
            "QK-norm without biases, width 1024, one layer",
            "queries and keys at 0.05 of their size and rate",
            Place(ONE_NO_BIAS, "qk_both"),
        ),
        ("the author's model, width 1024, one layer", "one learned scale per matrix", Place(AUTHOR_WIDE, "number")),
        ("", OWN, Place(AUTHOR_WIDE, "matched")),
        ("the author's model, width 256, eight layers", OWN, Place(AUTHOR, "matched")),
        ("", "QK-bias AdamW", Place(AUTHOR, "qk_all")),
        (GPT, QK_START, Elsewhere(GPT, QK_START)),
        (LLAMA, QK_START, Elsewhere(LLAMA, QK_START)),
        ("", "QK-bias AdamW", Elsewhere(LLAMA, "QK-bias AdamW")),
    ),
    "control": (
        ("method", "minus AdamW", "minus the default (seeds 0, 1, ...)"),
        ("AdamW with S", Place(CONTROL, "scaled"), Seeds(Place(CONTROL, "scaled", "default"))),
        ("AdamW with permuted S", Place(CONTROL, "permuted"), Seeds(Place(CONTROL, "permuted", "default"))),
        ("the default", Place(CONTROL, "default"), ""),
    ),
}


@functools.cache
def elsewhere() -> dict[Elsewhere, dict[str, str]]:
    """Return the rows of results/elsewhere.csv."""
    with ELSEWHERE.open(newline="") as lines:
        return {Elsewhere(row["setting"], row["method"], row["against"]): row for row in csv.DictReader(lines)}


def shown(rows: Rows, cell: Cell) -> str:
    """Return the text of a cell."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Elsewhere):
        row = elsewhere()[cell]
        ends = f"{row['low']} to {row['high']}; " if row["low"] else ""
        return f"{row['difference']} ({ends}{row['seeds']})"
    if isinstance(cell, After):
        return f"{mean_after(rows, *cell):+z.3f}"
    found = difference(rows, cell.place if isinstance(cell, Seeds) else cell)
    if found is None:
        return "no result"
    return found.listed if isinstance(cell, Seeds) else str(found)


def written(rows: Rows, text: str) -> str:
    """Return a page whose tables, each below a comment with its name, are what the rows say."""

    def table(place: re.Match[str]) -> str:
        heading, *body = [[shown(rows, cell) for cell in row] for row in TABLES[place[1]]]
        lines = [heading, ["---"] * len(heading), *body]
        return f"<!-- table: {place[1]} -->\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"

    return re.sub(r"(?m)^<!-- table: (\S+) -->\n+(?:\|.*\n)*\n*", table, text)
