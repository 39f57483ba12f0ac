import pytest

from symexplin.lab.compare.curves import share_of_steps

BASELINE = [(0, 5.0), (50, 3.0), (100, 2.0)]


RISES = [(0, 5.0), (40, 1.0), (100, 3.0)]  # at 3 first after 20 steps


@pytest.mark.parametrize(
    ("baseline", "variant", "expected"),
    [
        (BASELINE, BASELINE, 1.0),
        (BASELINE, [(0, 5.0), (50, 2.0), (100, 1.5)], 0.5),
        (BASELINE, [(0, 5.0), (50, 3.0), (100, 1.0)], 0.75),  # halfway between its evaluations
        (BASELINE, [(0, 4.0), (40, 1.0), (100, 3.0)], 0.4 * 2 / 3),  # the first time counts, not the last
        (BASELINE, [(0, 5.0), (50, 3.0), (100, 2.001)], None),
        (BASELINE, [(0, 2.0), (100, 1.0)], None),
        (BASELINE, [(0, 5.0)], None),
        (RISES, RISES, 1.0),
        (RISES, BASELINE, 50 / 20),
        ([(0, 3.0), (50, 1.0), (100, 4.0)], BASELINE, None),  # the baseline starts below its final loss
        ([(0, 2.0)], BASELINE, None),
    ],
)
def test_the_share_of_the_steps_to_the_final_loss_of_the_baseline(baseline, variant, expected):
    assert share_of_steps(baseline, variant) == (None if expected is None else pytest.approx(expected))
