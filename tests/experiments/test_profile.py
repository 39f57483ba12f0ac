import itertools

from symexplin.experiments import profile as module
from symexplin.experiments.profile import profile
from symexplin.experiments.tables import load_table


def test_the_parts_of_a_step_are_timed_beside_the_papers(monkeypatch):
    """Each part takes a second more than the one before it: variants take turns."""
    ticks = (end for second in itertools.count(1) for end in (0.0, float(second)))
    monkeypatch.setattr(module, "timer", lambda: next(ticks))
    small = {"model": {"width": 16, "heads": 2, "context": 8}, "compare": {"variants": ["AdamW", "mismatch"]}}
    (panel, *_) = load_table("main_grid", "mini", data="data", changes=small).panels
    about, table = profile(panel)
    assert about.startswith("64x2: ")
    heading, adamw, ours, *papers = [line.split() for line in table.splitlines()]
    assert heading == ["milliseconds", "forward", "backward", "optimizer", "step", "overhead"]
    # Of rounds 3 to 9 the median is the sixth: after 5 rounds of 6 parts AdamW takes 31, 32 and 33 seconds.
    assert adamw == ["AdamW", "31,000.0", "32,000.0", "33,000.0", "+0.0%"]
    assert ours == ["mismatch", "34,000.0", "35,000.0", "36,000.0", "+9.4%"]
    assert papers[1] == ["paper,", "1024x12:", "SEL", "68", "209", "15", "+1.7%"]
