"""Time the optimizer's step on lists of matrices: large ones, many small ones, and the first step on one of each size.

    python benchmarks/tensors.py --out benchmarks/results/MACHINE-tensors.csv

In each round every optimizer has one turn, in an order that rotates. `ratio` is the median over the rounds of the ratio
to the baseline in the same round: fused AdamW for large matrices and foreach AdamW for small ones, both after
`clip_grad_norm_`. Rows named "first step" are SELAdamW's first step by its own later ones.
"""

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import symexplin as sel
from symexplin import kernels
from symexplin.lab.bench.run import measure, spread
from symexplin.lab.bench.work import Work
from symexplin.lab.files import write_csv
from symexplin.lab.provenance import cores, provenance

CLIP, STEPS = 1.0, 100_000
# How many matrices, their side, and torch's own optimizer that they are held against.
CASES = {"4 x 1024^2": (4, 1024, {"fused": True}), "400 x 16^2": (400, 16, {"foreach": True})}
FIRST = (64, 512, 1024, 2048, 4096)
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


def timed(case: str, rounds: int) -> list[dict[str, object]]:
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
        {
            **{"case": case, "optimizer": name},
            **spread("ms", [one[name].ms for one in found]),
            **spread("ratio", [one[name].ms / one[baseline].ms for one in found]),
        }
        for name in arms
    ]


def first_step(side: int) -> dict[str, object]:
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
    return {
        **{"case": "first step", "optimizer": f"SELAdamW, paper, {side}^2"},
        **spread("ms", firsts),
        **spread("ratio", [a / b for a, b in zip(firsts, later, strict=True)]),
    }


def main() -> None:
    """Run all cases, print them, and write them with where they come from."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a new CSV file; the default only prints")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=cores())
    arguments = parser.parse_args()
    if arguments.out is not None and arguments.out.exists():
        parser.error(f"--out must be a new file, got {str(arguments.out)!r}")
    torch.set_num_threads(arguments.threads)
    known = provenance() | {"kernels": kernels.describe("cpu")}
    known["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    rows = []
    for case in [lambda name=name: timed(name, arguments.rounds) for name in CASES] + [
        lambda side=side: [first_step(side)] for side in FIRST
    ]:
        for row in case():
            print(
                "{case:12} {optimizer:28} {ms:9.2f} ms  {ratio:6.2f} x ({ratio_p10:.2f}-{ratio_p90:.2f})".format(**row),
                flush=True,
            )
            rows.append(row | {fact: known[fact] for fact in FACTS})
    if arguments.out is not None:
        write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
