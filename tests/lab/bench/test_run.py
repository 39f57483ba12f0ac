import csv
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch

from symexplin import kernels
from symexplin.lab.bench import floors, memory, table
from symexplin.lab.bench import run as module
from symexplin.lab.bench.config import BenchConfig
from symexplin.lab.bench.memory import peak_in_child
from symexplin.lab.bench.run import run_bench
from symexplin.lab.bench.variants import BASELINES
from symexplin.lab.settings import build, load_toml

TINY = {"widths": (16,), "depths": (1,), "context": 16, "vocab_size": 32, "tokens": 64, "device": "cpu", "threads": 1}
FACTS = {"context", "vocab_size", "preset", "seed", "device", "kernels", "machine", "cores", "threads", "torch"}
FACTS |= {"commit", "date"}


def read(folder):
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module", autouse=True)
def _small_product():
    """The product of matrices that tells the FLOP/s is of small ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(floors._SIDES, "cpu", 256)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "out"
    threads, lines = torch.get_num_threads(), []
    run_bench(BenchConfig(**TINY, microbatches=(1, 2), repeats=2, memory=False), folder, lines.append)
    assert torch.get_num_threads() == threads
    return folder, lines


def test_every_variant_of_every_case_has_a_row(done):
    rows = read(done[0])
    keys = [(row["part"], row["dtype"], row["shape"], row["microbatches"], row["variant"]) for row in rows]
    assert len(set(keys)) == len(keys)
    counts = {"map": 3, "optimizer": 1, "step": 2}  # shapes; microbatches
    for (part, dtype), variants in BASELINES.items():
        own = [key for key in keys if key[:2] == (part, dtype)]
        assert len(own) == counts[part] * len(variants)
    assert set(table.Row.__dataclass_fields__) | FACTS <= set(rows[0])


def test_a_row_says_how_it_was_measured(done):
    rows = read(done[0])
    assert {(row["kernels"], row["seed"], row["preset"]) for row in rows} == {(kernels.describe("cpu"), "0", "paper")}
    for row in rows:
        assert row["heads"] == ("" if row["part"] == "map" else "1")
        assert row["loss_chunk"] == ("0" if row["part"] == "step" else "")


def test_kernels_are_those_in_force(tmp_path):
    with kernels.using("readable"):
        run_bench(BenchConfig(("map",), dtypes=("fp32",), repeats=1, **TINY), tmp_path / "out")
    assert {row["kernels"] for row in read(tmp_path / "out")} == {"readable formulas"}


def test_the_settings_are_saved(tmp_path):
    asked = BenchConfig(("map",), repeats=1, map={"beta": 5.0}, **{**TINY, "threads": None})
    run_bench(asked, tmp_path / "out")
    saved = build(BenchConfig, load_toml(tmp_path / "out" / "config.toml"))
    assert saved == dataclasses.replace(asked, threads=torch.get_num_threads())


def test_rows_are_the_rounds(done):
    folder, _ = done
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for row in read(folder):
        own = [
            found["times"]
            for found in rounds
            if all(str(found[key]) == (row[key] or "None") for key in ("part", "dtype", "shape", "microbatches"))
        ]
        assert len(own) == int(row["rounds"]) == 2
        ratio = statistics.median(times[row["variant"]]["ms"] / times[row["baseline"]]["ms"] for times in own)
        assert float(row["ratio"]) == pytest.approx(ratio, rel=1e-5)
        assert float(row["ms"]) == pytest.approx(
            statistics.median(times[row["variant"]]["ms"] for times in own), rel=1e-5
        )


def test_counts_bytes_and_mfu_by_hand(done):
    (row,) = [
        row
        for row in read(done[0])
        if (row["part"], row["dtype"], row["variant"], row["microbatches"]) == ("step", "bf16", "sel", "2")
    ]
    width, hidden, vocabulary = 16, 64, 32
    matrices = 4 * width * width + 3 * width * hidden
    curved = matrices + 5 * width + 2 * hidden
    plain = 2 * width * vocabulary + 3 * width + 2 * width  # embedding, head, three norms, two of the head's size 16
    assert (int(row["curved"]), int(row["parameters"])) == (curved, curved + plain)
    assert int(row["floor_bytes"]) == (34 + 6) * curved + (30 + 6) * plain
    flops = 6 * (curved + plain - width * vocabulary) + 12 * 1 * width * 16
    assert float(row["mfu"]) == pytest.approx(float(row["tokens_per_s"]) * flops / float(row["peak_flops"]), rel=1e-4)
    assert float(row["tokens_per_s"]) == pytest.approx(64e3 / float(row["ms"]), rel=1e-4)
    assert row["peak_flops_source"] == "measured matmul"


def test_the_tables_and_the_plot_are_shown(done):
    folder, lines = done
    assert sum(line.startswith("map") for line in lines) == 6
    assert any("adamw_master" in line and "x baseline" in line for line in lines)
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    svg = (folder / "bench.svg").read_text()
    assert "SEL in the optimizer, bf16" in svg
    assert "microbatches a step" in svg


def test_an_earlier_measurement_is_not_written_over(done):
    folder, _ = done
    before = (folder / "results.csv").read_bytes()
    with pytest.raises(ValueError, match=r"out must be a new folder, got .* which has an earlier measurement"):
        run_bench(BenchConfig(**TINY), folder)
    assert (folder / "results.csv").read_bytes() == before


def test_what_was_measured_before_an_interruption_stays(tmp_path, monkeypatch):
    measure, calls = module.measure, []

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


@pytest.mark.parametrize("name", ["results.csv", "rounds.jsonl", "config.toml", "bench.svg", "results.csv.tmp"])
def test_any_earlier_file_is_left_alone(tmp_path, name):
    (tmp_path / name).write_text("earlier")
    with pytest.raises(ValueError, match="out must be a new folder"):
        run_bench(BenchConfig(("map",), repeats=1, **TINY), tmp_path)
    assert (tmp_path / name).read_text() == "earlier"


def test_a_mistake_found_while_building_leaves_no_folder(tmp_path, monkeypatch):
    def refuse(*_):
        raise ValueError("no inverse")

    monkeypatch.setattr(module, "make_work", refuse)
    with pytest.raises(ValueError, match="no inverse"):
        run_bench(BenchConfig(("step",), **TINY), tmp_path / "deep" / "out")
    assert not (tmp_path / "deep").exists()


def test_a_mistake_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="device must be one that torch finds"):
        run_bench(BenchConfig(**{**TINY, "device": "cuda:77"}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_memory_of_each_variant_is_asked_for(tmp_path, monkeypatch):
    peaks = {"adamw": 2**30, "sel": 2**30 + 2**28, "module": 2**31}
    monkeypatch.setattr(module, "peak_in_child", lambda name, *_: peaks[name])
    rows = run_bench(BenchConfig(("step",), dtypes=("fp32",), repeats=1, **TINY), tmp_path / "out")
    assert [(row.peak_mib, row.peak_ratio) for row in rows] == [(1024.0, 1.0), (1280.0, 1.25), (2048.0, 2.0)]


STEP = BenchConfig(("step",), dtypes=("fp32",), repeats=1, **TINY)


def test_memory_that_cannot_be_measured_is_left_out(tmp_path, monkeypatch):
    def peak(name, *_):
        if name == "sel":
            raise ChildProcessError("its process ended")
        return 2**30

    lines = []
    monkeypatch.setattr(module, "peak_in_child", peak)
    rows = run_bench(STEP, tmp_path / "out", lines.append)
    assert [row.peak_mib for row in rows] == [1024.0, None, 1024.0]
    assert [row["peak_mib"] for row in read(tmp_path / "out")] == ["1024", "", "1024"]
    assert lines[0].startswith("memory of sel, step fp32: width 16")
    assert lines[0].endswith("its process ended")


def test_timings_are_there_before_memory_and_survive_its_interruption(tmp_path, monkeypatch):
    def interrupted(*_):
        rows = read(tmp_path / "out")
        assert [(row["peak_mib"], float(row["ms"]) > 0) for row in rows] == 3 * [("", True)]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "peak_in_child", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bench(STEP, tmp_path / "out")
    assert {row["variant"] for row in read(tmp_path / "out")} == {"adamw", "sel", "module"}


def test_a_child_that_fails_says_why_in_a_line(capfd):
    with pytest.raises(ChildProcessError, match=r"^KeyError: 'fp8'$"):
        peak_in_child("adamw", STEP, next(STEP.cases())._replace(dtype="fp8"))
    assert "Traceback" not in capfd.readouterr().err


ENDLESS = """if True:
    import os, signal, sys, time
    from symexplin.lab.bench import memory
    from symexplin.lab.bench.config import BenchConfig

    def endless(*_):
        print(os.getpid(), flush=True)
        time.sleep(100)

    memory._peak = endless  # in the child, too, which imports this file again
    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background ignores it
        config = BenchConfig(("step",), device="cpu")
        try:
            memory.peak_in_child("adamw", config, next(config.cases()))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="kills")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_child_ends_with_its_parent(tmp_path, end):
    """Ctrl-C of a terminal reaches both, and the child says nothing."""
    script = tmp_path / "script.py"
    script.write_text(ENDLESS)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, script], text=True, **pipes) as parent:
        child = int(parent.stdout.readline())
        if end == signal.SIGINT:
            os.kill(child, end)
            time.sleep(0.3)  # for what it might say before its parent ends it
            os.kill(parent.pid, end)
        else:
            parent.kill()
        out, err = parent.communicate(timeout=30)  # until the child, which holds the pipes, has ended
    assert (out, err) == ("interrupted\n" if end == signal.SIGINT else "", "")


@pytest.mark.parametrize(("fresh", "resets"), [(False, 1), (True, 1 + 3 * 3)])
def test_no_model_is_one_too_many_for_torch_to_compile(tmp_path, monkeypatch, fresh, resets):
    """Once a case, and with `fresh` once a turn: three variants, a warm-up round and two that count."""
    compiled, calls = [], []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append(1))
    config = BenchConfig(("step",), dtypes=("fp32",), repeats=2, memory=False, compile=True, fresh=fresh, **TINY)
    run_bench(config, tmp_path / "out")
    assert len(calls) == resets
    assert len(compiled) == (9 if fresh else 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_tells_times_memory_and_its_name(tmp_path):
    run_bench(BenchConfig(repeats=2, **{**TINY, "device": "cuda"}), tmp_path / "out")
    for row in read(tmp_path / "out"):
        assert row["device"] == torch.cuda.get_device_name()
        assert float(row["ms"]) > 0.0
        assert float(row["host_ms"]) > 0.0
        assert row["part"] == "map" or float(row["peak_mib"]) * 2**20 > 12 * int(row["parameters"])


def test_a_childs_memory_is_its_own_and_grows_with_the_model():
    """What this process holds does not count, which getrusage would hand on to the child."""
    held = torch.ones(2**26)  # 256 MiB
    case = next(BenchConfig(("step",), dtypes=("fp32",), **TINY).cases())
    small = peak_in_child("adamw", BenchConfig(**TINY), case)
    assert small < memory._high_water() - 0.5 * held.nbytes
    wide = {**TINY, "vocab_size": 2**17}  # 2 x 2^21 parameters more, with gradients and moments 16 bytes each
    large = peak_in_child("adamw", BenchConfig(**wide), case)
    assert large - small > 0.9 * 16 * 2**22
