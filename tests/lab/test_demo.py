import dataclasses

import pytest

from executors import in_process  # noqa: F401 (a fixture)
from symexplin.lab.compare.grid import GridConfig
from symexplin.lab.compare.words import verdict
from symexplin.lab.config import ModelConfig, TrainConfig
from symexplin.lab.data.batches import Corpus
from symexplin.lab.demo import demo_config, run_demo
from symexplin.lab.pace import Pace
from symexplin.lab.provenance import cores
from symexplin.lab.settings import load_toml

pytestmark = pytest.mark.usefixtures("undrawn", "in_process")
TINY = dataclasses.replace(
    demo_config(),
    model=ModelConfig(width=16, depth=1, heads=2, context=16),
    train=TrainConfig(batch_size=4),
    compare=GridConfig(("AdamW", "default"), lrs=(1e-3,), jobs=1),
)


@pytest.fixture
def pace(monkeypatch):
    """Return a function that sets the pace of the machine."""
    return lambda found: monkeypatch.setattr("symexplin.lab.demo.measure", lambda _: found)


def losses(comparison):
    return [(run.variant, run.lr, run.curve) for run in comparison.runs]


def test_it_compares_on_its_data_with_seeds_that_judge(text, data, tmp_path, pace):
    pace(None)
    grid, lines = dataclasses.replace(demo_config().compare, jobs=1), []
    comparison = run_demo(tmp_path, dataclasses.replace(TINY, compare=grid), text, echo=lines.append)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "comparison"}
    assert Corpus.load(tmp_path / "data").fingerprint == Corpus.load(data).fingerprint
    assert comparison.variants == ("AdamW", "default", "paper")
    assert comparison.counted_seeds == (1, 2, 3)
    assert "99% interval" in verdict(comparison)[0]
    assert all(sentence in "\n".join(lines) for sentence in verdict(comparison))
    assert "paper&#39;s method" in (tmp_path / "comparison" / "report.html").read_text()
    assert demo_config().compare.jobs == min(2, cores())


def test_its_size_is_that_of_this_machine_and_stays_the_same_after_an_interruption(text, tmp_path, pace, monkeypatch):
    # Two runs of 84 steps and 13 evaluations on 8 batches, of a third of a step each: 214 s; 96 steps would take 235 s.
    pace(Pace(0.0, 0.9))
    lines = []

    def stop(line):
        lines.append(line)
        if line.startswith("2/2 default lr 0.001 seed 0: step 7/84"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path / "stopped", TINY, text, echo=stop)
    assert any(line.startswith("2 runs of 84 steps take about 4 min here") for line in lines)
    whole = run_demo(tmp_path / "whole", TINY, text)
    monkeypatch.setattr("symexplin.lab.demo.measure", None)
    assert losses(run_demo(tmp_path / "stopped", TINY, text)) == losses(whole)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("whole/comparison/runs/*/*.*")}
    assert written
    assert losses(run_demo(tmp_path / "whole", TINY, text)) == losses(whole)
    assert {path: path.stat().st_mtime_ns for path in written} == written


@pytest.mark.parametrize(("found", "steps"), [(Pace(1.0, 1e-3), 120), (Pace(1.0, 100.0), 60), (None, 60)])
def test_its_size_has_bounds(found, steps, text, tmp_path, pace):
    pace(found)
    run_demo(tmp_path, TINY, text)
    assert load_toml(tmp_path / "comparison" / "compare.toml")["train"]["steps"] == steps
