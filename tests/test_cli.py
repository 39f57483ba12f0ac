"""The command line as a user gives it."""

import inspect
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch

import symexplin.__main__
from symexplin import __version__, cli
from symexplin.experiments.tables import names, read_table
from symexplin.lab.process import Stopped

TINY = "--width 32 --depth 1 --heads 2 --context 16 --steps 6 --batch-size 4 --eval-every 3 --no-tensorboard"


@pytest.fixture(scope="module")
def place(text, tmp_path_factory):
    """A folder with tokens and a run without biases."""
    folder = tmp_path_factory.mktemp("walk")
    data = str(folder / "data")
    assert cli.main(["prepare", text, "--out", data, "--vocab-size", "400"]) == 0
    arguments = ["--data", data, "--out", str(folder / "run"), "--no-bias", "--preset", "paper", *TINY.split()]
    assert cli.main(["train", *arguments]) == 0
    return folder


def run(capsys, *arguments):
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("symexplin: error: ")
    return line


# --- What a user gets wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("dmo", ["demo"]),
        ("train --out x --widht 3", ["--widht", "Did you mean --width?", "symexplin train --help"]),
        ("train --out x --betas 0.9", ["--betas", "2"]),
        ("train --out x --home modul", ["--home", 'Did you mean "module"']),
        ("train --out x --map beta", ["--map", "KEY=VALUE", "'beta'"]),
        ("train --data d --out x --map bete=3", ["map: ", "did you mean 'beta'"]),
        ("train --out x", ["data must be given", "symexplin prepare"]),
        ("train --data /no/such --out x", ["/no/such"]),
        ("compare --data d --out x --lr 1", ["--lr", "Did you mean --lrs?"]),
        ("demo --seed 1 b", ["'b'"]),
        ("sample /no/such/run", ["/no/such/run"]),
        ("sample x --length 1.5", ["--length", "whole number"]),
        ("inspect /no/such/file --preset papper", ["preset", "did you mean 'paper'?"]),
        ("prepare --out x", ["sources", "at least one"]),
        ("reproduce frozzen", ["did you mean 'frozen'"]),
        ("reproduce frozen --variants AdamW ful", ["did you mean 'full'"]),
        ("reproduce frozen --set modle.width=3", ["did you mean 'model'"]),
        ("reproduce frozen --out ''", ["out must name a folder"]),
        ("figure curves", ["name must be one of"]),
    ],
)
def test_a_users_error_is_one_line_that_names_the_key_and_leaves_nothing(capsys, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    found = refused(capsys, *shlex.split(line))
    assert [word for word in words if word not in found] == []
    assert list(tmp_path.iterdir()) == []


def test_traceback_on_demand():
    with pytest.raises(ValueError, match="steps must be"):
        cli.main(["--traceback", "demo", "--steps", "0"])


def test_a_missing_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "symexplin.lab.demo", None)
    assert "symexplin[lab]" in refused(capsys, "demo")
    for name in [name for name in sys.modules if name.startswith("symexplin.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cyclopts", None)
    monkeypatch.setattr(sys.modules["symexplin"], "cli", None)
    assert symexplin.__main__.main() == 2
    assert "symexplin[lab]" in capsys.readouterr().err


def failing(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("symexplin.lab.demo.run_demo", fail)


def test_an_error_of_the_program_is_not_hidden(monkeypatch):
    failing(monkeypatch, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["demo"])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (Stopped(signal.SIGINT, "after step 3"), "stopped by SIGINT after step 3"),
    ],
)
def test_an_interruption_has_its_status(monkeypatch, capsys, error, line):
    failing(monkeypatch, error)
    assert cli.main(["demo"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == f"symexplin: {line}\n"


def test_what_the_machine_cannot_do_is_one_line_with_a_remedy(monkeypatch, capsys):
    from torch._dynamo.exc import TorchDynamoException

    failing(monkeypatch, torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"))
    assert "raise --accumulation" in refused(capsys, "demo")
    failing(monkeypatch, TorchDynamoException("g++ died\nwith many lines"))
    assert "leave out --compile" in refused(capsys, "demo")


def test_a_model_too_large_for_the_memory_is_a_users_error(data, tmp_path, capsys):
    assert cli.main(["train", "--data", data, "--out", str(tmp_path / "run"), "--width", "100000000000"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("symexplin: error: out of memory")
    assert list(tmp_path.iterdir()) == []


# --- Help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_help_with_an_example_that_is_understood(capsys, command):
    text = run(capsys, command, "--help")
    about, _, examples = inspect.getdoc(cli.COMMANDS[command]).partition("Examples:\n")
    assert about.splitlines()[0][:70] in text
    lines = [line for line in examples.replace("\\\n", "").splitlines() if line.strip()]
    assert lines
    assert max(map(len, examples.splitlines())) <= 80
    for line in lines:
        _, _, words = line.partition("symexplin ")
        words = shlex.split(words.partition(" >")[0])
        assert words[0] == command
        cli.make_app(words).parse_args(words, exit_on_error=False, print_error=False)


def test_version_and_help_need_neither_torch_nor_the_laboratory(capsys):
    assert run(capsys, "--version") == f"symexplin {__version__}\n"
    assert "Exit status" in run(capsys, "--help")
    code = "import sys; from symexplin.cli import main\n"
    code += "for name in ('sample', 'train', 'compare', 'reproduce', 'demo'): main([name, '--help'])\n"
    code += "assert not {'torch', 'numpy', 'matplotlib', 'safetensors', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)


# --- Settings --------------------------------------------------------------------------------------------------------


def test_flags_take_precedence_over_the_file_and_tables_are_merged(place, capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        f'data = "{place / "data"}"\n[model]\nwidth = 32\ndepth = 1\nheads = 2\ncontext = 16\n'
        '[train]\nsteps = 50\nbatch_size = 4\n[sel]\npreset = "paper"\n'
        "map = { e.k = [10, 2] }\n[log]\ntensorboard = false\n"
    )
    text = run(capsys, "train", "--config", file, "--out", tmp_path / "run", "--steps", "3", "--map", "beta=5")
    assert "steps = 3," in text
    assert "map: mismatch, beta 5, e learned (row_col_mult, k 10 to 2), " in text
    assert "train.lr was 0.003, is 0.5 now" in refused(
        capsys, "train", "--out", tmp_path / "run", "--resume", "--lr", "0.5"
    )
    assert "has finished already" in run(capsys, "train", "--out", tmp_path / "run", "--resume")


# --- Commands --------------------------------------------------------------------------------------------------------


def test_sample_writes_the_prompt_and_more_and_the_same_again(place, capsys):
    words = ("sample", place / "run", "--prompt", "document 3", "--length", "20", "--top-k", "50")
    text = run(capsys, *words)
    assert text.startswith("document 3")
    assert len(text) > len("document 3\n")
    assert run(capsys, *words) == text
    assert run(capsys, *words, "--seed", "1") != text
    assert run(capsys, "sample", place / "run", "--prompt", "- item", "--length", "1").startswith("- item")


def test_export_and_inspect_write_what_they_are_asked_for(place, capsys, tmp_path):
    """Logits and figures are compared in tests/lab/test_export.py and test_inspect.py."""
    run(capsys, "export", place / "run", "--out", tmp_path / "mymodel")
    assert json.loads((tmp_path / "mymodel" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    file, written = place / "run" / "model.safetensors", tmp_path / "tails.json"
    assert "beta 5 (as given)" in run(capsys, "inspect", file, "--map", "beta=5", "--json", written)
    assert "blocks.0.ffn.up.weight" in [row["name"] for row in json.loads(written.read_text())["rows"]]


@pytest.mark.usefixtures("undrawn")
def test_compare_trains_variants_of_ones_own(place, capsys, tmp_path):
    variants = "--variants AdamW mine --variant mine.preset=frozen mine.map.beta=5 --lrs 1e-2 --seeds 0"
    text = run(capsys, "compare", "--data", place / "data", "--out", tmp_path / "c", *variants.split(), *TINY.split())
    assert "mine" in text
    assert {path.name for path in (tmp_path / "c" / "runs").iterdir()} == {"AdamW-lr0.01-seed0", "mine-lr0.01-seed0"}
    assert (tmp_path / "c" / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_reproduce_lists_plans_runs_and_continues(place, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = run(capsys, "reproduce").splitlines()
    assert [tuple(line.split(maxsplit=1)) for line in lines] == list(names().items())
    out = run(capsys, "reproduce", "main_grid", "--plan", "--scale", "paper", "--seeds", "1", "2")
    assert "3072x36: AdamW, mismatch, mismatch+offset; lrs 0.0003; seeds 1 2; up to 6 runs of 150,000 steps" in out
    assert not list(tmp_path.iterdir())
    tiny = "--lrs 2e-3 --steps 2 --jobs 1 --set model.width=16 model.depth=1 model.heads=2 model.context=8"
    tiny += " train.batch_size=2 train.eval_batches=1 compare.seeds=[0] --results results/mini.csv"
    command = ["reproduce", "frozen", "--data", place / "data", *tiny.split()]
    lines = run(capsys, *command, "--variants", "AdamW", "frozen").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("at most 2 runs, in all about"))
    assert first < next(i for i, line in enumerate(lines) if "step 0/2" in line)
    assert any("16x1: not tested at this scale: full was not trained" in line for line in lines)
    run(capsys, *command, "--variants", "AdamW", "frozen", "full", "--resume")
    folder = tmp_path / "runs" / "reproduce" / "frozen-mini"
    assert (folder / "report.html").exists()
    assert len((tmp_path / "results" / "mini.csv").read_text().splitlines()) == 1 + 3
    assert [trained["variant"] for trained in read_table(folder).panels[0].found["runs"]] == ["AdamW", "frozen", "full"]


# --- Signals and readers that leave ----------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
def test_training_continues_when_its_reader_leaves_until_a_signal_stops_it_with_a_checkpoint(tmp_path, data):
    arguments = ["train", "--data", data, "--out", str(tmp_path / "run"), *TINY.split(), "--steps", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "symexplin", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 100
    try:
        process.stdout.readline()
        process.stdout.close()
        while not (metrics.exists() and b'"step": 9,' in metrics.read_bytes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    (line,) = errors.splitlines()
    assert line.startswith("symexplin: stopped by SIGTERM after step ")
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_a_reader_who_leaves_ends_what_only_prints():
    line = f"{sys.executable} -m symexplin compare --help | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in done.stderr
