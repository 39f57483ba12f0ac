import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import parallel_runs
import processes
from run_folders import CURVES, TRAIN, tiny
from symexplin.lab.checkpoint import newest
from symexplin.lab.config import LogConfig
from symexplin.lab.data.batches import Corpus
from symexplin.lab.files import read_json, read_json_lines
from symexplin.lab.model import ModelConfig
from symexplin.lab.parallel import Ranks
from symexplin.lab.settings import dump_toml, load_toml, merge, to_table
from symexplin.lab.weights import iter_tensors, read_map

KINDS = [(home, kind) for home in CURVES for kind in ("ddp", "fsdp")]
RESUMED, MOVED = [("none", "ddp"), ("optimizer", "fsdp")], [("optimizer", "ddp"), ("module", "fsdp")]


def table(data, home="none", kind=None, **train):
    schedule = {"steps": 6, "batch_size": 8, "accumulation": 2, "eval_every": 4, "eval_batches": 1}
    config = tiny(
        data,
        home,
        model=ModelConfig(width=16, depth=1, heads=2, context=16, tie_head=home == "none"),
        train=dataclasses.replace(TRAIN, **{**schedule, "max_grad_norm": 0.5, **train}),
        log=LogConfig(checkpoint_every=3, tensorboard=False),
    )
    return merge(to_table(config), {"compute": {"parallel": kind}} if kind else {})


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    """Runs in two processes: of each kind, two also stopped and resumed, two handed to one process and back."""
    place = tmp_path_factory.mktemp("runs")
    tasks, later = [], []
    for home, kind in KINDS:
        config, name = table(data, home, kind), str(place / f"{home}-{kind}")
        if (home, kind) in MOVED:
            tasks += [(config, name, 2)]
            later += [(config, name)]
            continue
        tasks += [(config, name)]
        if (home, kind) in RESUMED:
            tasks += [(config, f"{name}-resumed", 5), (config, f"{name}-resumed")]
    first, second = processes.run(2, place, parallel_runs.runs, tasks)
    assert first == second  # the last losses, and where the runs stopped
    assert sum("stopped by SIGTERM after step" in str(result) for result in first) == 4
    for config, name in later:
        assert "after step 4" in parallel_runs.go_on(config, name, 4)
    processes.run(2, place, parallel_runs.runs, later)
    for home in CURVES:
        parallel_runs.go_on(table(data, home), place / home)
    return place


def assert_close(path, expected):
    """The same records but for the rounding of float32."""
    found, wanted = (read_json_lines(p / "metrics.jsonl") for p in (path, expected))
    assert [set(record) for record in found] == [set(record) for record in wanted]
    for record, want in zip(found, wanted, strict=True):
        for key in ("step", "loss", "eval_loss", "lr", "grad_norm", "tokens"):
            assert record.get(key) == pytest.approx(want.get(key), abs=2e-5), (key, record["step"])
        assert record.get("stats", {}) == pytest.approx(want.get("stats", {}), rel=1e-4, abs=1e-6)


def assert_same_bits(path, expected):
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (path / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.distributed
@pytest.mark.parametrize(("home", "kind"), KINDS)
def test_two_processes_train_what_one_does(folder, home, kind):
    run = folder / f"{home}-{kind}"
    assert_close(run, folder / home)
    records = read_json_lines(run / "metrics.jsonl")
    assert any(record.get("grad_norm", 0) > 0.5 for record in records)  # some steps were clipped
    assert ("stats" in records[-1]) == (home != "none")
    assert read_json(run / "run.json")["provenance"]["processes"] == 2
    assert load_toml(run / "config.toml")["compute"]["parallel"] == kind
    names = {path.name for path in run.iterdir()}
    assert names == {path.name for path in (folder / home).iterdir()}  # nothing from the other process


@pytest.mark.distributed
@pytest.mark.parametrize(("home", "kind"), RESUMED)
def test_a_run_that_a_signal_to_one_process_stopped_resumes_to_the_same_bits(folder, home, kind):
    assert_same_bits(folder / f"{home}-{kind}-resumed", folder / f"{home}-{kind}")


@pytest.mark.distributed
def test_a_checkpoint_of_a_sharded_run_is_that_of_one_process(folder):
    for home in CURVES:
        last, alone = (newest(folder / name)[0] for name in (f"{home}-fsdp", home))
        for name in ("model.safetensors", "optimizer.safetensors"):
            found, wanted = (dict(iter_tensors(place / name)) for place in (last, alone))
            assert found.keys() == wanted.keys()
            for key, tensor in wanted.items():
                torch.testing.assert_close(found[key], tensor, rtol=1e-2, atol=1e-5)
        assert read_map(last) == read_map(alone)


@pytest.mark.distributed
def test_four_processes_resume_to_the_same_bits_and_share_out_few_rows(data, tmp_path):
    """Among four, sums depend on their order; and an evaluation's last batch has fewer rows than processes."""
    config = table(data, "none", "ddp", eval_batches=100)
    assert len(Corpus.load(data).valid) // 16 % 4 in (1, 2, 3)
    names = [str(tmp_path / name) for name in ("whole", "resumed")]
    processes.run(4, tmp_path, parallel_runs.runs, [(config, names[0]), (config, names[1], 5), (config, names[1])])
    assert_same_bits(tmp_path / "resumed", tmp_path / "whole")
    parallel_runs.go_on(table(data, eval_batches=100), tmp_path / "one")
    assert_close(tmp_path / "whole", tmp_path / "one")


FLAGS = "--width 16 --depth 1 --heads 2 --context 8 --batch-size 4 --steps 4 --eval-batches 1 --device cpu --threads 1"


@pytest.mark.distributed
def test_each_error_of_a_job_is_one_line_and_all_processes_have_its_status(folder, data, tmp_path):
    taken = folder / "none-ddp"
    flags = f"--data {data} {FLAGS} --no-tensorboard"
    new = f"train {flags} --out {tmp_path}/a"
    cases = [  # what the first process tells, whether one process is wrong or both
        (f"train {flags} --out {taken}", None, "out must be a new folder, got "),
        (f"{new} --batch-size 3", None, "error: batch_size / accumulation must be a multiple of the 2 processes"),
        (f"{new} --device cuda:99", None, "device must be one that torch finds here, got 'cuda:99'"),
        (f"{new} --home module --map e.pattern=global --parallel fsdp", None, "'ddp'"),
        (new, "one process", "error: process 1: this process is odd"),
        (f"train {flags} --out {tmp_path}/b", "a full disk", "error: No space left on device"),
        (f"train {flags} --out {tmp_path}/c", "no number", "a non-finite gradient; --resume continues at step 0"),
    ]
    lines = [case[:2] for case in cases]
    outcomes = zip(*processes.run(2, tmp_path, parallel_runs.commands, lines), strict=True)
    for (line, _, words), ((status, _, errors), other) in zip(cases, outcomes, strict=True):
        assert (status, errors.count("\n")) == (2, 1), line
        assert words in errors, line
        assert other == (2, "", ""), line
    assert not (tmp_path / "a").exists()
    assert not list((tmp_path / "b" / "checkpoints").iterdir())
    assert "loss is nan" in read_json(tmp_path / "c" / "result.json")["error"]


def workers_of(job):
    tasks = f"/proc/{job.pid}/task/{job.pid}/children"
    with open(tasks) as file:  # noqa: PTH123 (not a file to keep)
        return [int(pid) for pid in file.read().split()]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds torchrun's processes there")  # noqa: PTH110
def test_a_job_of_torchrun_ends_with_one_of_its_processes_and_goes_on_to_the_same_bits(data, tmp_path):
    config = table(data, "optimizer", "fsdp", steps=24)
    (tmp_path / "run.toml").write_text(dump_toml(config))
    processes.run(2, tmp_path, parallel_runs.runs, [(config, str(tmp_path / "whole"))])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    train = [f"{sys.prefix}/bin/symexplin", "train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]
    job = subprocess.Popen(
        [*torchrun, *train],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    while not any((tmp_path / "run").glob("checkpoints/step-*[36]")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(workers_of(job)[0], signal.SIGKILL)
    assert "Signal 9 (SIGKILL)" in job.communicate(timeout=60)[0]
    assert not (tmp_path / "run" / "result.json").exists()
    processes.run(2, tmp_path, parallel_runs.runs, [(config, str(tmp_path / "run"))])
    assert_same_bits(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("rank", [0, 1])
def test_what_all_processes_refuse_the_first_one_tells(monkeypatch, capsys, tmp_path, rank):
    started = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "TORCHELASTIC_ERROR_FILE": tmp_path / "error.json"}
    for name, value in started.items():
        monkeypatch.setenv(name, str(value))
    assert parallel_runs.cli.main(["train", "--data", "d", "--out", "x", "--steps", "0"]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert ("steps must be" in captured.err, captured.err.count("\n")) == ((True, 1) if rank == 0 else (False, 0))
    assert "steps must be" in read_json(tmp_path / "error.json")["message"]


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 14])
def test_rows_are_all_shared_out(size, count):
    shares = [Ranks(rank, size).rows(count) for rank in range(size)]
    assert [i for share in shares for i in range(count)[share]] == list(range(count))
    assert max(s.stop - s.start for s in shares) - min(s.stop - s.start for s in shares) <= 1


def test_an_environment_that_is_not_torchruns_is_one_line(monkeypatch, capsys, data, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert parallel_runs.cli.main(f"train --data {data} --out {tmp_path / 'run'}".split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("symexplin: error: Error initializing torch.distributed")
