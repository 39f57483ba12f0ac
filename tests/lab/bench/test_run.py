import csv
import dataclasses
import json
import statistics

import pytest
import torch

from symexplin import kernels
from symexplin.lab.bench import BenchConfig, Case
from symexplin.lab.bench import run as module
from symexplin.lab.bench.run import Timing, draw, measure, rows_of, run_bench
from symexplin.lab.bench.work import BASELINES, Work
from symexplin.lab.settings import from_table, load_toml

TINY = {"widths": (16,), "depths": (1,), "context": 16, "vocab_size": 32, "tokens": 64, "device": "cpu", "threads": 1}
STEP = BenchConfig(("step",), dtypes=("fp32",), repeats=1, **TINY)
CPU = torch.device("cpu")
PHASES = ("forward", "backward", "optimizer")


class Machine:
    """A clock that only work moves on, and a record of what was built and run."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.built, self.ran, self.seconds = 0.0, [], [], seconds
        monkeypatch.setattr(module, "timer", lambda: self.now)

    def arms(self):
        return {name: lambda name=name: self._make(name) for name in self.seconds}

    def _make(self, name):
        phases = {"all": 0.0}

        def run():
            self.now += self.seconds[name]
            phases["all"] += self.seconds[name]
            self.ran.append(name)

        def prepare():
            self.now += 1000.0
            self.ran.append(f"({name})")

        self.built.append(name)
        return Work(run, prepare, phases)


def test_times_are_those_of_the_work_alone(monkeypatch):
    machine = Machine(monkeypatch, {"a": 0.5, "b": 0.003})
    rounds = list(measure(machine.arms(), CPU, repeats=3))
    assert [list(found) for found in rounds] == [["a", "b"]] * 3
    for found in rounds:
        assert [found[name].ms for name in "ab"] == pytest.approx([500.0, 3.0])
        assert [found[name].phases["all"] for name in "ab"] == pytest.approx([500.0, 3.0])
    # Two calls first, then a warm-up round and three that count; 7 x 3 ms are more than 20 ms.
    assert [machine.ran.count(name) for name in ("a", "(a)", "b", "(b)")] == [6, 6, 2 + 7 * 4, 6]


def test_turns_rotate_and_each_is_prepared(monkeypatch):
    machine = Machine(monkeypatch, dict.fromkeys("abc", 0.1))
    list(measure(machine.arms(), CPU, repeats=3, warmup=1))
    assert machine.built == ["a", "b", "c"]
    assert machine.ran == [word for name in "aabbcc" + "cab" + "abc" + "bca" + "cab" for word in (f"({name})", name)]


def test_fresh_ones_are_built_for_every_turn(monkeypatch):
    machine = Machine(monkeypatch, dict.fromkeys("ab", 0.1))
    rounds = list(measure(machine.arms(), CPU, repeats=2, warmup=0, fresh=True))
    assert machine.built == ["a", "b", "b", "a"]
    assert [list(found) for found in rounds] == [["a", "b"]] * 2


def test_rows_are_medians_of_what_each_round_shows():
    """A machine that drifts: every round is slower than the one before, all variants alike."""
    times = ((1.0, 1.1, 2.0), (10.0, 13.0, 20.0), (100.0, 120.0, 200.0))
    spent = [{"forward": ms, "backward": 2 * ms, "optimizer": 5.0} for ms in (1.0, 3.0, 9.0)]
    names = ("adamw", "sel", "module")
    rounds = [
        {name: Timing(ms, phases) for name, ms in zip(names, row, strict=True)}
        for row, phases in zip(times, spent, strict=True)
    ]
    found = rows_of(Case("step", "fp32", 4, 2, 1, 64), rounds, {"adamw": 2**30})
    adamw, sel, own = found
    assert [row["ms"] for row in found] == [10.0, 13.0, 20.0]
    assert (adamw["ms_p10"], adamw["ms_p90"]) == pytest.approx((1.0 + 0.2 * 9.0, 10.0 + 0.8 * 90.0))
    assert [sel[key] for key in ("ratio", "ratio_p10", "ratio_p90")] == pytest.approx([1.2, 1.12, 1.28])
    assert (adamw["ratio"], own["ratio"]) == (1.0, 2.0)
    assert [sel[f"{phase}_ms"] for phase in PHASES] == [3.0, 6.0, 5.0]
    assert (adamw["peak_mib"], sel["peak_mib"], sel["rounds"]) == (1024.0, None, 3)
    assert {row["wall_clock_speedup"] for row in found} == {None}


def test_bf16_variants_are_held_against_their_own_baselines():
    for baselines in BASELINES.values():
        first = next(iter(baselines))
        assert baselines[first] == first
        assert set(baselines.values()) <= set(baselines)
    times = {"adamw_master": 4.0, "sel": 5.0, "adamw_autocast": 8.0, "module": 16.0}
    rounds = [{name: Timing(ms, dict.fromkeys(PHASES, 1.0)) for name, ms in times.items()}]
    rows = rows_of(Case("step", "bf16", 4, 2, 1, 64), rounds, {})
    assert [(row["variant"], row["ratio"]) for row in rows] == list(
        zip(times, (1.0, 1.25, 2.0, 2.0), strict=True)  # the module's baseline is AdamW under autocast
    )


@pytest.mark.parametrize(
    ("baseline", "curved", "steps", "wall_clock"),
    [((67, 214, 6), (68, 209, 15), 1.32, 1.29), ((265, 895, 46), (271, 940, 62), 1.44, 1.37)],
)
def test_the_speedup_in_time_is_the_papers(baseline, curved, steps, wall_clock):
    """Table 11: forward, backward and optimizer in milliseconds, and a speedup in steps."""
    spent = {"adamw_autocast": baseline, "module": curved, "adamw_master": baseline, "sel": curved}
    found = {name: Timing(sum(ms), dict(zip(PHASES, ms, strict=True))) for name, ms in spent.items()}
    rows = {row["variant"]: row for row in rows_of(Case("step", "bf16", 4, 2, 1, 64), [found], {}, steps)}
    assert {name for name, row in rows.items() if row["wall_clock_speedup"]} == {"sel", "module"}
    for name in ("sel", "module"):
        assert rows[name]["wall_clock_speedup"] == pytest.approx(wall_clock, abs=0.0101)
    alone = {name: Timing(1.0, {}) for name in BASELINES["optimizer", "bf16"]}
    assert not any(row["wall_clock_speedup"] for row in rows_of(Case("optimizer", "bf16", 4, 2), [alone], {}, steps))


def read(folder):
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "out"
    threads, lines = torch.get_num_threads(), []
    run_bench(BenchConfig(**TINY, microbatches=(1, 2), repeats=2, memory=False), folder, lines.append)
    assert torch.get_num_threads() == threads
    return folder, lines


def test_every_variant_of_every_case_has_a_row(done):
    rows = read(done[0])
    keys = [(row["part"], row["dtype"], row["microbatches"], row["variant"]) for row in rows]
    assert len(set(keys)) == len(keys)
    counts = {"optimizer": 1, "step": 2}  # microbatches
    for (part, dtype), variants in BASELINES.items():
        own = [key for key in keys if key[:2] == (part, dtype)]
        assert len(own) == counts[part] * len(variants)


def test_rows_are_the_rounds(done):
    folder, _ = done
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for row in read(folder):
        own = [
            found["times"]
            for found in rounds
            if all(str(found[key]) == (row[key] or "None") for key in ("part", "dtype", "microbatches"))
        ]
        assert len(own) == int(row["rounds"]) == 2
        ratio = statistics.median(times[row["variant"]]["ms"] / times[row["baseline"]]["ms"] for times in own)
        assert float(row["ratio"]) == pytest.approx(ratio, rel=1e-6)
        ms = statistics.median(times[row["variant"]]["ms"] for times in own)
        assert float(row["ms"]) == pytest.approx(ms, rel=1e-6)
        phases = sum(float(row[f"{phase}_ms"] or 0) for phase in PHASES)
        assert phases == 0 if row["part"] != "step" else 0.5 * ms < phases < 1.5 * ms


def test_the_tables_and_the_plot_are_shown(done):
    folder, lines = done
    assert sum(line.startswith("optimizer") for line in lines) == 2
    assert any("adamw_master" in line and "ratio" in line for line in lines)
    svg = (folder / "bench.svg").read_text()
    assert "step bf16: width 16, depth 1, 64 tokens in 2, module / adamw_autocast" in svg


def test_facts_are_those_in_force(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    asked = BenchConfig(("optimizer",), dtypes=("fp32",), repeats=1, map={"beta": 5.0}, **{**TINY, "threads": None})
    with kernels.using("readable"):
        run_bench(asked, tmp_path / "out")
    for row in read(tmp_path / "out"):
        assert (row["kernels"], row["malloc"]) == ("PyTorch's operations", "MALLOC_MMAP_MAX_=0")
        assert (row["map"], row["preset"]) == ("{'beta': 5.0}", "paper")
        assert (row["device"], row["threads"]) == ("cpu", str(torch.get_num_threads()))
        assert row["torch"] == torch.__version__
        assert row["processor"]
        assert row["date"]
    saved = from_table(BenchConfig, load_toml(tmp_path / "out" / "config.toml"))
    assert saved == dataclasses.replace(asked, threads=torch.get_num_threads())


def test_an_interruption_keeps_what_was_measured_before(tmp_path, monkeypatch):
    calls = []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(module, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bench(BenchConfig(("optimizer",), repeats=1, **TINY), tmp_path / "out")
    assert {row["dtype"] for row in read(tmp_path / "out")} == {"fp32"}
    assert len((tmp_path / "out" / "rounds.jsonl").read_text().splitlines()) == 1


def test_an_earlier_measurement_is_left_alone(tmp_path):
    (tmp_path / "rounds.jsonl").write_text("earlier")
    with pytest.raises(ValueError, match="out must be a new folder"):
        run_bench(BenchConfig(("optimizer",), repeats=1, **TINY), tmp_path)
    assert (tmp_path / "rounds.jsonl").read_text() == "earlier"


@pytest.mark.parametrize("device", ["cpu", "cuda:77"])
def test_a_mistake_leaves_no_folder(tmp_path, monkeypatch, device):
    def refuse(*_):
        raise ValueError("no inverse")

    monkeypatch.setattr(module, "make_work", refuse)
    with pytest.raises(ValueError, match="no inverse" if device == "cpu" else "device must be"):
        run_bench(BenchConfig(("step",), **{**TINY, "device": device}), tmp_path / "deep" / "out")
    assert not (tmp_path / "deep").exists()


def test_memory_that_cannot_be_measured_is_left_out(tmp_path, monkeypatch):
    def peak(name, *_):
        if name == "sel":
            raise ChildProcessError("its process ended")
        return 2**30

    lines = []
    monkeypatch.setattr(module, "peak_in_child", peak)
    rows = run_bench(STEP, tmp_path / "out", lines.append)
    assert [row["peak_mib"] for row in rows] == [1024.0, None, 1024.0]
    assert [row["peak_mib"] for row in read(tmp_path / "out")] == ["1024", "", "1024"]
    assert lines[0].startswith("memory of sel, step fp32: width 16")
    assert lines[0].endswith("its process ended")


@pytest.mark.parametrize(("fresh", "resets"), [(False, 1), (True, 1 + 3 * 3)])
def test_no_model_is_one_too_many_for_torch_to_compile(tmp_path, monkeypatch, fresh, resets):
    """Once per case, and with `fresh` once per turn: three variants, a warm-up round and two that count."""
    compiled, calls = [], []
    monkeypatch.setattr(torch, "compile", lambda model, mode: compiled.append((model, mode)) or model)
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append(1))
    config = dataclasses.replace(STEP, repeats=2, memory=False, compile=True, compile_mode="max-autotune", fresh=fresh)
    run_bench(config, tmp_path / "out")
    assert len(calls) == resets
    assert {mode for _, mode in compiled} == {"max-autotune"}
    assert len(compiled) == (9 if fresh else 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_tells_times_memory_and_its_name(tmp_path):
    run_bench(BenchConfig(repeats=2, **{**TINY, "device": "cuda"}), tmp_path / "out")
    weights = 2 * 16 * 32 + 4 * 16 * 16 + 3 * 16 * 64  # embedding, head and the block's matrices
    for row in read(tmp_path / "out"):
        assert row["device"] == torch.cuda.get_device_name()
        assert float(row["ms"]) > 0.0
        assert float(row["peak_mib"]) * 2**20 > 12 * weights


def test_the_plot_has_a_group_per_case_with_the_spread_of_each_variant():
    rows = []
    for width, seconds in ((64, (1.0, 1.2, 1.6)), (128, (3.0,))):
        spent = dict.fromkeys(PHASES, 0.0)
        times = [{"adamw": 1.0, "sel": slower, "module": 2.0} for slower in seconds]
        rounds = [{name: Timing(ms, spent) for name, ms in found.items()} for found in times]
        rows += rows_of(Case("step", "fp32", width, 2, 1, 8192), rounds, {})
    figure = draw(rows, "a machine")
    (axes,) = figure.axes
    assert figure.get_suptitle() == "a machine"
    cases = [f"step fp32: width {width}, depth 2, 8,192 tokens in 1" for width in (64, 128)]
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == [f"{case}, {name} / adamw" for case in cases for name in ("sel", "module")]
    points, _, (bars,) = axes.containers[0]
    assert points.get_xdata() == pytest.approx([1.2, 2.0, 3.0, 2.0])
    ((low, _), (high, _)) = bars.get_segments()[0]
    assert (low, high) == pytest.approx((1.04, 1.52))  # the percentiles lie between the rounds
