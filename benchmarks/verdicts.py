"""How often the rule of `symexplin compare` is wrong, and how large a difference it finds: simulated comparisons.

    python benchmarks/verdicts.py            # both tables, with the sampling error of each rate

Every simulated loss is that of its seed, which all variants share, plus the noise of its run. Where nothing differs, a
comparison is wrong if any of its variants is called better or worse. The size of a difference is in standard deviations
of the difference of two runs with one seed.
"""

import argparse
import math
from collections.abc import Iterator

import numpy as np

from symexplin.lab.compare.interval import BETTER, WORSE, intervals

VARIANTS, SEEDS = (1, 3, 10), (3, 5, 8)
KINDS = ("normal", "heavy-tailed", "one variant five times as noisy")
POWERS = (0.5, 0.8)


def verdicts(variants: int, seeds: int, kind: str, size: float, count: int, seed: int = 0) -> Iterator[list[str]]:
    """Yield the verdicts of comparisons in which the first variant is better by `size` standard deviations."""
    generator = np.random.default_rng(seed)
    shape = count, variants + 1, seeds
    if kind == "heavy-tailed":  # Student's t with three degrees of freedom has a variance of 3
        noise = generator.standard_t(3, shape) / math.sqrt(3)
    else:
        noise = generator.standard_normal(shape)
    if kind == KINDS[2]:
        noise[:, 1] *= 5.0
    losses = noise + 3.0 * generator.standard_normal((count, 1, seeds))
    losses[:, 1] -= size * math.sqrt(2)
    for one in losses:
        differences = {str(k): dict(enumerate(map(float, one[k] - one[0]))) for k in range(1, variants + 1)}
        yield [interval.verdict for interval in intervals(differences).values()]


def wrong(variants: int, seeds: int, kind: str, count: int) -> float:
    """Return the share of comparisons of noise with a verdict of better or worse."""
    found = [{BETTER, WORSE} & {*one} for one in verdicts(variants, seeds, kind, 0.0, count)]
    return sum(map(bool, found)) / count


def least(variants: int, seeds: int, power: float, count: int) -> float:
    """Return the size of the difference that is found with this probability, by bisection."""
    low, high = 0.0, 64.0
    while high - low > 0.05:
        size = (low + high) / 2
        share = sum(one[0] == BETTER for one in verdicts(variants, seeds, "normal", size, count)) / count
        low, high = (low, size) if share >= power else (size, high)
    return high


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=20_000)
    count = parser.parse_args().comparisons
    error = math.sqrt(0.01 * 0.99 / count)
    print(f"wrong verdicts in {count:,} comparisons of noise (1.00% has a standard error of {error:.2%})")
    for kind in KINDS:
        for variants in VARIANTS:
            rates = "  ".join(f"{seeds} seeds {wrong(variants, seeds, kind, count):.2%}" for seeds in SEEDS)
            print(f"{kind:32} {variants:2} variants  {rates}", flush=True)
    print("\nsizes of a difference that are found, in standard deviations of a difference")
    for power in POWERS:
        for variants in VARIANTS:
            sizes = "  ".join(f"{seeds} seeds {least(variants, seeds, power, count // 10):.1f}" for seeds in SEEDS)
            print(f"with a probability of {power:.0%}  {variants:2} variants  {sizes}", flush=True)


if __name__ == "__main__":
    main()
