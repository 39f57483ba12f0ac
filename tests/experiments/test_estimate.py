import dataclasses

from symexplin.experiments import estimate as module
from symexplin.experiments.estimate import Estimate, warnings
from symexplin.experiments.tables import load_table


def end(folder, panel, count):
    for number in range(count):
        path = folder / "panels" / panel / "runs" / str(number) / "summary.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


def test_the_time_left_follows_from_the_runs_that_have_ended(tmp_path, monkeypatch):
    clock, lines = [0.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    table = load_table("frozen", "mini", changes={"compare": {"confirm_seeds": [], "lrs": [1e-3, 2e-3], "jobs": 2}})
    estimate = Estimate(table.panels, tmp_path, lines.append)
    for seconds, count in ((600.0, 1), (650.0, 2), (1300.0, 4)):  # two at a time, of twelve
        clock[0] = seconds
        end(tmp_path, "128x4", count)
        estimate.echo("a line")
    assert [line for line in lines if line != "a line"] == [
        "runs left: at most 11, about 55 min",  # 11 / 2 times 10 min
        "runs left: at most 10, about 54 min",  # 5 times 650 s
        "runs left: at most 8, about 43 min",
    ]


def test_the_scales_own_settings_need_no_warning():
    panels = load_table("frozen", "mini").panels
    assert warnings(panels) == []
    grid = dataclasses.replace(panels[0].config.compare, lrs=(1e-3,))
    one = dataclasses.replace(panels[0], config=dataclasses.replace(panels[0].config, compare=grid))
    assert len(warnings([one])) == 1


def test_a_first_step_that_is_not_finite_leaves_the_time_open(data, tmp_path):
    changes = {"model": {"width": 16, "depth": 1, "heads": 2, "context": 8}, "compare": {"lrs": [1e30]}}
    changes["train"] = {"batch_size": 2, "warmup_steps": 0}
    lines = []
    Estimate(load_table("frozen", "mini", data=data, changes=changes).panels, tmp_path, lines.append).tell_first()
    assert lines == ["runs to do: at most 18, the time is known when the first one has ended"]
