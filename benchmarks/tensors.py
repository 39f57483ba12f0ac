"""Time the optimizer's step on lists of matrices: large ones, many small ones, and the first step on one of each size.

    python benchmarks/tensors.py --out benchmarks/results/MACHINE-tensors.csv

One process. In each round every optimizer has one turn, in an order that rotates. `ratio` is the median
over the rounds of the ratio to the round's baseline, fused AdamW for large matrices and foreach AdamW for small ones,
both after `clip_grad_norm_`. Rows named "first step" are SELAdamW's first step by its own later ones.
"""

import argparse
import csv
import datetime
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import symexplin as sel
from symexplin import kernels
from symexplin.lab.bench.measure import measure
from symexplin.lab.bench.work import Work
from symexplin.lab.provenance import cores, provenance

CLIP, STEPS = 1.0, 100_000
# How many matrices, their side, and torch's own optimizer that they are held against.
CASES = {"4 x 1024^2": (4, 1024, {"fused": True}), "400 x 16^2": (400, 16, {"foreach": True})}
FIRST = (64, 512, 1024, 2048, 4096)
FIELDS = ("case", "optimizer", "ms", "ms_p10", "ms_p90", "ratio", "ratio_p10", "ratio_p90")
FACTS = ("kernels", "processor", "instructions", "threads", "torch", "commit", "date")


def matrices(count: int, side: int) -> nn.ModuleList:
    """Return linear layers with random gradients, larger than the norm that they are clipped to."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(count))
    for parameter in layers.parameters():
        parameter.grad = torch.randn(side, side)
    return layers


def stock(layers: nn.ModuleList, **how: bool) -> Callable[[], None]:
    """Return a step of torch's AdamW after clipping."""
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-6, **how)

    def step() -> None:
        nn.utils.clip_grad_norm_(layers.parameters(), CLIP)
        optimizer.step()

    return step


def curved(layers: nn.ModuleList, kind: type[sel.SELAdamW], preset: str) -> Callable[[], object]:
    """Return a step of SEL, which clips by itself."""
    groups = sel.param_groups(layers, lr=1e-6, config=sel.preset(preset))
    return kind(groups, total_steps=STEPS, max_grad_norm=CLIP).step


def spread(values: list[float]) -> list[float]:
    """Return the median and the 10th and 90th percentile."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return [statistics.median(values), tenths[0], tenths[-1]]


def timed(case: str, rounds: int) -> list[list[object]]:
    """Return a row per optimizer."""
    count, side, how = CASES[case]
    arms: dict[str, Callable[[], Callable[[], object]]] = {
        f"AdamW, {next(iter(how))}": lambda: stock(matrices(count, side), **how),
        "SELAdamW, paper": lambda: curved(matrices(count, side), sel.SELAdamW, "paper"),
        "SELAdamW, paper+offset": lambda: curved(matrices(count, side), sel.SELAdamW, "paper+offset"),
        "SELMuon, paper": lambda: curved(matrices(count, side), sel.SELMuon, "paper"),
    }
    works = {name: (lambda make=make: Work(make())) for name, make in arms.items()}
    found = list(measure(works, torch.device("cpu"), rounds))
    baseline = next(iter(arms))
    return [
        [
            *(case, name, *spread([one[name].ms for one in found])),
            *spread([one[name].ms / one[baseline].ms for one in found]),
        ]
        for name in arms
    ]


def first_step(side: int) -> list[object]:
    """Return a row: the median first step of five optimizers, as a multiple of a later one."""
    firsts, later = [], []
    for _ in range(5):
        step = curved(matrices(1, side), sel.SELAdamW, "paper")
        times = []
        for _ in range(8):
            begin = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - begin))
        firsts.append(times[0])
        later.append(statistics.median(times[2:]))
    return [
        "first step",
        f"SELAdamW, paper, {side}^2",
        *spread(firsts),
        *spread([a / b for a, b in zip(firsts, later, strict=True)]),
    ]


def main() -> None:
    """Run all cases, print them, and write them with where they come from."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a CSV file; none: print alone")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=cores())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    known = provenance() | {"kernels": kernels.describe("cpu")}
    known["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    rows = []
    for case in [lambda name=name: timed(name, arguments.rounds) for name in CASES] + [
        lambda side=side: [first_step(side)] for side in FIRST
    ]:
        for row in case():
            print(f"{row[0]:12} {row[1]:28} {row[2]:9.2f} ms  {row[5]:6.2f} x ({row[6]:.2f}-{row[7]:.2f})", flush=True)
            rows.append([*(f"{x:.4g}" if isinstance(x, float) else x for x in row), *(known[fact] for fact in FACTS)])
    if arguments.out is not None:
        with arguments.out.open("x", newline="") as file:
            csv.writer(file).writerows([[*FIELDS, *FACTS], *rows])


if __name__ == "__main__":
    main()
