"""What README and the documentation say in numbers, computed from the rows of results/mini.csv."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from differences import Difference, Key, difference, losses

from symexplin.lab.compare.comparison import Comparison

Rows = Mapping[Key, Comparison]

WIDTH_1024 = Key("width-1024", "1024x1", "44ad1b2", 1500)
WIDTH_1024_GPU = Key("width-1024-gpu", "1024x1", "fa670e7", 1500)
ONE_LAYER_NORM = Key("width-1024-cores", "1024x1-layer", "50a7ce3", 1500)
SEVERE = Key("width-1024-cores", "256x8", "50a7ce3", 250)
SEVERE_LAYER = Key("width-1024-cores", "256x8-layer", "50a7ce3", 250)
NO_BIAS = Key("width-1024-cores", "1024x1-no-bias", "50a7ce3", 1500)
TWELVE = Key("width-1024-gpu", "1024x12", "648d882", 1000)
TWELVE_INIT = Key("width-1024-gpu", "1024x12", "354dea9", 1000)
TWELVE_LAYER = Key("width-1024-start", "1024x12-layer", "ee10189", 1000)
TWELVE_STD_32 = Key("width-1024-start", "1024x12-std32", "ee10189", 1000)


def of(rows: Rows, key: Key, against: Key | None = None) -> Callable[..., Difference]:
    """Return what computes the differences of an experiment, from its own AdamW or that of `against`."""
    return partial(difference, rows[key], rows[against or key])


def by_seed(ours: Callable[..., Difference], variants: Mapping[str, str]) -> Iterator[str]:
    """Yield the rows of a table of differences with seeds 0, 1, ...; `variants` are {first cell: variant}."""
    for name, variant in variants.items():
        yield f"| {name} | {ours(variant).listed} |"


def readme(rows: Rows) -> Iterator[str]:
    """Yield the cells of README's table."""
    one, twelve = of(rows, WIDTH_1024), of(rows, TWELVE)
    layer, single, bare = (of(rows, key) for key in (TWELVE_LAYER, ONE_LAYER_NORM, NO_BIAS))
    init, norms = of(rows, TWELVE_INIT, TWELVE), of(rows, TWELVE_LAYER, TWELVE)
    yield f"| the default | {one('exp'):2} (not resolved) | {twelve('default'):2} |"
    yield f"from the model's own initial weights | {one('matched'):2} (one seed) | {twelve('matched'):2} |"
    yield f"| the paper's method with its initialization | {one('paper'):2} | [**{init('paper'):1}**]"
    both = f"{single('paper'):2} | {layer('paper'):2} (LayerNorm cost AdamW {abs(norms('AdamW').interval.mean):.2f})"
    yield f"| the same, both models with LayerNorm | {both} |"
    yield f"no curve | **{one('number'):2}** | {twelve('number'):2} |"
    yield f"one learned number per matrix {abs(bare('number').interval.mean):.2f} (three seeds), both with one layer."
    yield f"biases train faster | **{one('qk_all'):2}** | {twelve('qk_all'):2} (one seed) |"


def one_layer(rows: Rows) -> Iterator[str]:
    """Yield what was trained with one layer of width 1024."""
    one, bare, gpu, twelve = (of(rows, key) for key in (WIDTH_1024, NO_BIAS, WIDTH_1024_GPU, TWELVE))
    low, adamw = one("paper@3e-4", "AdamW@3e-4").all, one("AdamW", "AdamW@3e-4").all
    yield f"with its initialization differs by {low} ({low.ends}, three seeds). But AdamW ends {adamw.size} lower"
    yield f"there the same method differs by {one('paper')} (five seeds)."
    yield f"one learned number per matrix gained {one('number').size}, [QK-bias"
    yield f"(../reference/glossary.md#methods) {one('qk_all').size}, both without a curve"
    yield f"the paper's method with its initialization {one('paper').size}; with twelve"
    number, bias, matched = (twelve(variant).size for variant in ("number", "qk_all", "matched"))
    yield f"{number}, {bias} and, without the initialization, {matched} (one or"
    more = bare("matched", "number")
    yield f"than the paper's method by {more.size} ({more.interval.low:.3f} to {more.interval.high:.3f})"
    with_biases = {
        "the default (at 7e-4)": "exp",
        "the paper's method with its initialization": "paper",
        "the paper's method, from the model's own initial weights": "matched",
        "the paper's map with fixed scales and the paper's initialization (at 1.4e-3)": "frozen",
        'learned row x column scales without a curve, `preset("structured_linear")`': "linear",
        "[one learned number per matrix](../how-to/start-with.md#one-learned-number-per-matrix), no curve": "number",
        "AdamW, all matrices at half the rate": "half",
        "AdamW, queries and keys initialized at 0.1 of the scale": "qk",
        "AdamW, queries and keys initialized at 0.1 of the scale, biases at 5 times the rate": "qk_bias",
        "AdamW, queries and keys initialized at 0.05 of the scale and trained at 0.05 of the rate": "qk_both",
        "QK-bias AdamW": "qk_all",
        "AdamW with all learned numbers of seed 0 hard-coded, queries and keys at 0.05 of the scale": "hand",
        "the default with the changes of QK-bias AdamW": "exp_all",
        "the paper's method, from the model's own initial weights, with the changes of QK-bias AdamW": "matched_all",
    }
    without_biases = {
        "the paper's method, from the model's own initial weights": "matched",
        "one learned number per matrix, without a curve": "number",
        "learned scales without a curve": "linear",
        "AdamW, queries and keys at 0.05 of the scale and rate": "qk_both",
        "the default": "default",
    }
    yield from by_seed(one, with_biases)
    yield from by_seed(bare, without_biases)
    warmup, betas = gpu("warmup@7e-4", "AdamW@7e-4"), gpu("betas@7e-4", "AdamW@7e-4")
    more, less = one("matched_all", "qk_all"), one("exp_all", "qk_all")
    yield f"the paper's method gained {more.size}, and the default lost {less.size} (one"
    yield f"weight decay 0.1 ({one('decay')}) and, at 7e-4,"
    yield f"a longer warm-up ({warmup}) and betas of 0.9 and 0.95 ({betas})"


def twelve_layers(rows: Rows) -> Iterator[str]:
    """Yield what was trained with twelve layers of width 1024."""
    twelve, layer = of(rows, TWELVE), of(rows, TWELVE_LAYER)
    yield f"in the paper, {twelve('matched').size} here, without its initialization"
    init, norms = (of(rows, key, TWELVE) for key in (TWELVE_INIT, TWELVE_LAYER))
    variants = {
        "the paper's method, from the model's own initial weights": "matched",
        "one learned number per matrix, without a curve": "number",
        "the default": "default",
        "QK-bias AdamW": "qk_all",
    }
    yield from by_seed(twelve, variants)
    above = init("paper").by_seed.values()
    yield f"ended {min(above):.2f} to {max(above):.2f} above AdamW (three seeds"
    paper, matched, adamw = (
        "{:.3f}, {:.3f} and {:.3f}".format(*map(abs, ours.by_seed.values()))
        for ours in (layer("paper"), layer("matched"), norms("AdamW"))
    )
    yield f"ended {paper} below AdamW with its initialization, and {matched} below"
    yield f"AdamW itself ended {adamw} above"
    one, single = (of(rows, key) for key in (WIDTH_1024, ONE_LAYER_NORM))
    start = single("paper", "matched")
    yield f"with one layer {start.whole}; with twelve"
    yield f"one layer (seed 0; LayerNorm 0 to 3) | {one('paper', 'matched')[0]} | {start.listed} |"
    yield f"the same, fixed scales | | {single('frozen', 'frozen_matched').listed} |"
    yield f"one learned number per matrix gains {single('number').size}, small and slow"
    yield f"queries and keys {single('qk_both').size} (one seed), the paper's method {single('matched').size}. With"
    start = layer("paper", "matched").all
    yield f"our three seeds could detect nothing below {start.interval.half_width:.3f}."
    harm = init("paper@7e-4", "matched@7e-4")[0]
    yield f"twelve layers (seed 0 at 7e-4; LayerNorm 0 to 2) | {harm} | {start.listed} |"
    severe = (of(rows, key)("paper", "matched").listed for key in (SEVERE, SEVERE_LAYER))
    yield f"at one rate (seeds 0, 1, 2) | {' | '.join(severe)} |"
    large = partial(losses, rows[TWELVE_STD_32])
    yield f"with its initialization ended at {large('paper')[0]:.4f}, below"
    above = of(rows, TWELVE_STD_32, TWELVE)("AdamW", "AdamW@1e-3").size
    yield f"and AdamW at {large('AdamW')[0]:.4f}, {above} above its loss with 0.02 (one seed"


def miniature(rows: Rows) -> Iterator[str]:
    """Yield the paper's claims, each with the paper's own number."""

    def table(name: str) -> Callable[..., Difference]:
        return of(rows, Key(name, "128x4", "d3fc95d", 600))

    frozen = table("frozen")
    for claim, paper, ours in (
        ("width 1024, depth 12)", "-0.031", table("main_grid")("mismatch")),
        ("with offset and LoRA", "-0.038", table("main_grid")("mismatch+offset")),
        ("congruent ends below AdamW (table 3)", "-0.011", table("start_1024")("congruent")),
        ("the default ends below AdamW (table 5)", "-0.005", table("exp_only")("exp_only-ff")),
        ("with its scale learned", "-0.009", table("exp_only")("exp_only-lf")),
        ("the paper's initialization (table 6)", "-0.018", frozen("frozen")),
        ("the congruent map, from the model's own initial weights", "-0.008", frozen("frozen-congruent")),
        ("learning the scales helps further (table 6)", "-0.016", frozen("fixed_curvature", "frozen")),
        ("is worse than AdamW (table 7)", "+0.019", table("structured_linear")("linear-global")),
        ("beat fixed ones (table 9)", "-0.005", table("lr_annealing")("annealed", "fixed")),
        ("in log space is better (table 10)", "-0.006", table("curvature")("absorbed", "fixed")),
    ):
        yield f"{claim} | {paper} | {ours.half} |"


def regime(*ours: Difference) -> str:
    """Return the last cells of a row: differences, numbers of seeds and verdicts, these once where all are the same."""
    seeds = [f"{len(one.interval.values)}{'' if one.fresh else ' (chose)'}" for one in ours]
    cells = (cell[:1] if len({*cell}) == 1 else cell for cell in (seeds, [one.interval.words for one in ours]))
    return " | ".join("; ".join(cell) for cell in ([one.whole for one in ours], *cells))


def regimes(rows: Rows) -> Iterator[str]:
    """Yield the table of all regimes."""
    both = "paper's with its initialization"
    for width, steps in ((64, 200), (128, 700), (256, 2600)):
        default = of(rows, Key("widths", f"{width}x2", "ff759b9", steps))("default")
        papers = of(rows, Key("widths", f"{width}x2", "7a0cb4d", steps))("mismatch")
        methods = f"default; {both}" if width == 64 else "the same"
        yield f"| width {width}, depth 2, {steps:,} steps | {methods} | {regime(default, papers)} |"
    small = of(rows, Key("exp_only", "128x4", "d3fc95d", 600))
    yield f"depth 4, 600 steps | the same | {regime(small('exp_only-ff'), small('full'))} |"
    code = of(rows, Key("control", "128x4", "b3eebc4", 600))("default")
    english, long = (of(rows, Key("default", "128x4", "ff759b9", steps))("default") for steps in (600, 1800))
    yield f"technical English | default | {regime(code, english)} |"
    yield f"1,800 steps | default | {regime(long)} |"
    longer = of(rows, Key("lengths", "128x2-10000", "28e925c", 10000))
    yield f"10,000 steps | fixed mismatch | {regime(longer('default'))} |"
    all_five = f"default; paper's; {both}; one number per matrix; QK-bias AdamW"
    one, bare, single = (of(rows, key) for key in (WIDTH_1024, NO_BIAS, ONE_LAYER_NORM))
    gains = regime(*map(one, ("exp", "matched", "paper", "number", "qk_all")))
    yield f"width 1024, depth 1, 1,500 steps | {all_five} | {gains} |"
    gains = regime(*map(bare, ("default", "matched", "number")))
    yield f"no biases | default; paper's; one number per matrix | {gains} |"
    gains = regime(*map(single, ("paper", "matched", "frozen_matched", "number")))
    yield f"LayerNorm | {both}; paper's; its map with fixed scales; one number per matrix | {gains} |"
    twelve, init, layer = of(rows, TWELVE), of(rows, TWELVE_INIT, TWELVE), of(rows, TWELVE_LAYER)
    gains = regime(twelve("default"), twelve("matched"), init("paper"), twelve("number"), twelve("qk_all"))
    yield f"width 1024, depth 12, 1,000 steps | {all_five} | {gains} |"
    yield f"LayerNorm | {both}; paper's | {regime(layer('paper'), layer('matched'))} |"
    for key, cells in ((SEVERE, f"one rate | {both}; paper's"), (SEVERE_LAYER, "LayerNorm | the same")):
        ours = of(rows, key)
        yield f"{cells} | {regime(ours('paper'), ours('matched'))} |"
    schedules = of(rows, Key("attempts", "64x3", "0697dbd", 600))
    yield f"decays as 1 - (t/T)^8 | {regime(schedules('exp-grows', 'adamw-power-8'))} |"
    half = of(rows, Key("attempts", "64x3", "c9f8bae", 600, True))
    yield f"with the same and small queries and keys | {regime(half('best-exp-2-0_5', 'best-0_5'))} |"
    unbiased = of(rows, Key("attempts", "64x3-no-bias", "fafe4b8", 600, True))
    yield f"at 0.1 of their scale | {regime(unbiased('qk-0_1'))} |"
    sparse = of(rows, Key("sparsity", "64x3", "8648390", 1000))
    yield f"against Powerpropagation | {regime(sparse('exp-16-gradual-80', 'power-2-gradual-80'))} |"
    muon = of(rows, Key("muon", "64x3", "c9f8bae", 600))
    yield f"against Muon | {regime(muon('default', 'Muon'))} |"


def evidence(rows: Rows) -> Iterator[str]:
    """Yield the sentences and cells of the page of evidence."""
    for part in (one_layer, twelve_layers, miniature, regimes):
        yield from part(rows)


def start_with(rows: Rows) -> Iterator[str]:
    """Yield the sentences of the page that says what to start with."""
    power = of(rows, Key("attempts", "64x3", "0697dbd", 600))("AdamW", "adamw-power-8")
    yield f"gained {power.half[1:]} nats per byte over linear decay"
    small = of(rows, Key("attempts", "64x3-no-bias", "fafe4b8", 600, True))("AdamW", "qk-0_1")
    yield f"{small.half[1:]} lower at width 64 (eight seeds)"
    bare = of(rows, NO_BIAS)
    yield f"{bare('number').size} lower at width 1024 with one layer (three seeds); untested with more."
    yield f"did not help ({bare('qk_both')}, one seed)"
    one, twelve = of(rows, WIDTH_1024), of(rows, TWELVE)
    harm = of(rows, TWELVE_INIT, TWELVE)("paper@7e-4", "matched@7e-4")
    yield f"it cost {one('paper', 'matched')[0][1:]} nats per token with one layer, and [{harm[0][1:]} with"
    yield f"With biases and one layer, they gained {one('number').size}, with twelve {twelve('number').size};"


def learning_rate(rows: Rows) -> Iterator[str]:
    """Yield the sentences on longer steps without a map."""
    control = of(rows, Key("control", "128x4", "b3eebc4", 600))
    permuted, scaled, default = (control(variant) for variant in ("permuted", "scaled", "default"))
    low = min(ours.interval.low for ours in (permuted, scaled, default))
    high = max(ours.interval.high for ours in (permuted, scaled, default))
    yield (
        f"permuted S ends {permuted.size} below AdamW, AdamW with S {scaled.size} and the default {default.size} "
        f"(99% intervals within {low:+.3f} to {high:+.3f})"
    )
    near, far = (
        math.ceil(1000 * max(map(abs, control(variant, "default").by_seed.values()))) / 1000
        for variant in ("scaled", "permuted")
    )
    yield f"within {near:.3f} of the default, and AdamW with permuted S within {far:.3f}."


PAGES = {
    "README.md": readme,
    "docs/explanation/evidence.md": evidence,
    "docs/how-to/start-with.md": start_with,
    "docs/explanation/learning-rate.md": learning_rate,
}
ELSEWHERE = {  # numbers that are not in the rows
    "docs/explanation/evidence.md": (
        "changes its loss by up to 0.010.",  # results/log.md, 2026-11-26
        "alike: 0.031 (0.038 with offset and LoRA)",  # the paper's table 2
        "betas of 0.9 and 0.999",
        "after 100,000 steps, one number ends 0.019 above AdamW",  # the paper's table 7
        "reaches 0.97 after three layers and 0.998 after twelve",  # python benchmarks/start.py
        "it ended at 3.2409,",  # results/log.md: stopped after its last evaluation
        # The tables, verdicts and rows of commit 960ab5b (results/README.md).
        "their evaluations (section 5.3.5) | 0.0009 | 0.0016 ± 0.004 |",
        "excess kurtosis (measured at commit 960ab5b) | yes | +2.89 ± 0.13 |",
        "L2-SP, averaged with the first weights | -0.000 (-0.002 to +0.002) | 3 |",
        "AdamW with a log-sum penalty | +0.034 (-0.019 to +0.086) | 8 |",
        "with L1 | +0.070 (+0.043 to +0.097); +0.047 (+0.016 to +0.079); +0.123 (+0.025 to +0.221) | 3 (one chose) |",
        "AdamW tuned the same way | +0.010 (-0.014 to +0.034); -0.006 (-0.024 to +0.011) | 16 |",
    ),
    "docs/how-to/start-with.md": (  # benchmarks/qk_norm.py of commit 053727f
        "smaller queries and keys alone were 0.024 lower (three seeds, not resolved)",
        "QK-bias AdamW was worse by 0.194 (0.175 to 0.214), smaller queries and keys alone 0.032 lower (three",
        "the cosine was 0.998 where it failed",  # python benchmarks/start.py
        "after 100,000 steps, such a number ended 0.019 above AdamW",  # the paper's table 7
    ),
}
NUMBER = re.compile(r"(?<![\w.])[+-]\d\.\d+|(?<![\w.])\d\.\d{3,}")  # a difference or a loss


def stale(root: Path, rows: Rows) -> Iterator[str]:
    """Yield the quotations that a page does not have, and the numbers of a page that no quotation has."""
    for name, quotations in PAGES.items():
        page = " ".join((root / name).read_text().split())
        for quotation in (*quotations(rows), *ELSEWHERE.get(name, ())):
            if quotation not in page:
                yield f"{name} does not say {quotation!r}"
            page = page.replace(quotation, "...")
        for number in NUMBER.finditer(page):
            yield f"{name} has a number without a source: {page[max(0, number.start() - 40) : number.end()]!r}"
