"""How the losses of two runs compare before their end: by optimizer steps and by seconds."""

import itertools
from collections.abc import Sequence

__all__ = ["apart_at_equal_time", "share_of_steps", "steps_to"]

# Evaluations of a run as (step, loss) or as (seconds, loss), in order; losses between them are interpolated linearly.
Curve = Sequence[tuple[float, float]]


def share_of_steps(baseline: Curve, variant: Curve) -> float | None:
    """Return the step at which `variant` first reaches the baseline's final loss, over that at which the baseline does.

    None: not reached, or by one of both before the first step.

    >>> share_of_steps([(0, 5.0), (100, 2.0)], [(0, 5.0), (50, 3.0), (100, 1.0)])
    0.75
    """
    own, steps = (steps_to(curve, baseline[-1][1]) for curve in (variant, baseline))
    return None if own is None or steps is None else own / steps


def steps_to(curve: Curve, target: float) -> float | None:
    """Return the step at which a loss first reaches `target`; None: not reached, or before the first step.

    >>> steps_to([(0, 5.0), (50, 3.0), (100, 1.0)], 2.5)
    62.5
    """
    if curve[0][1] <= target:
        return None
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= target:
            return before + (after - before) * (high - target) / (high - low)
    return None


def apart_at_equal_time(baseline: Curve, variant: Curve) -> float | None:
    """Return the loss of `variant` minus that of the baseline when the faster one ended; None without times.

    >>> apart_at_equal_time([(0.0, 5.0), (10.0, 2.0)], [(0.0, 5.0), (20.0, 1.0)])
    1.0
    """
    if not baseline or not variant:
        return None
    end = min(baseline[-1][0], variant[-1][0])
    return _loss_after(variant, end) - _loss_after(baseline, end)


def _loss_after(curve: Curve, end: float) -> float:
    for (before, high), (after, low) in itertools.pairwise(curve):
        if end < after:
            return high + (low - high) * (end - before) / (after - before)
    return curve[-1][1]
