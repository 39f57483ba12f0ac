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

import symexplin.__main__
from executors import in_process  # noqa: F401 (a fixture)
from symexplin import __version__, cli
from symexplin.experiments.tables import names, read_table
from symexplin.lab.process import Stopped
from symexplin.lab.settings import load_toml

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


FILES = {
    "good.toml": "data = 'd'\n",
    "bad.toml": "data = = 'd'\n",
    "key.toml": "data = 'd'\n[model]\nwidht = 64\n",
    "tables.toml": "[[train]]\nsteps = 3\n",
}
# A command line (of train, compare and prepare without --out and data), and what its error must say.
WRONG = [
    ("dmo", 'Did you mean "demo"?'),
    ("--widht 3", "--widht", "symexplin --help"),
    ("demo b", "'b'", "symexplin demo --help"),
    ("train good.toml --steps 0", "steps must be a whole number >= 1, got 0"),
    ("train --widht 3", "--widht", "Did you mean --width?", "symexplin train --help"),
    ("train", "data must be given", "symexplin prepare"),
    ("train --data /no/such", "data must be", "symexplin prepare", "/no/such"),
    ("train train.lr=1e-3", "config must be an existing TOML file, got 'train.lr=1e-3'"),
    ("train good.toml bad.toml", "'bad.toml'"),
    ("train bad.toml", "config bad.toml is not TOML", "line 1"),
    ("train tables.toml --lr 1e-3", "[train] must be a table, got [{'steps': 3}]"),
    ("train key.toml", "'widht' in [model]; did you mean 'width'?"),
    ("train --width 1.5", "--width", "whole number"),
    ("train --lr fast", "--lr", '"fast"', "float"),
    ("train --betas 0.9", "--betas", "2"),
    ("train --home modul", "--home", 'Did you mean "module"'),
    ("train --map beta", "--map", "KEY=VALUE", "'beta'"),
    ("train --map.beta=5", "--map beta=5", "--map.beta=5"),
    ("train good.toml --map bete=3", "map: ", "did you mean 'beta'"),
    ("train good.toml --lr-factors a=-2", "lr_factors 'a' must be a positive finite number, got -2"),
    ("compare good.toml --lr 1", "--lr", "Did you mean --lrs?"),
    ("compare good.toml --seeds 0 0", "seeds must hold", "each once"),
    ("compare good.toml --variant mine.presett=paper --variants AdamW mine", "did you mean 'preset'?"),
    ("compare good.toml --cluster pbs", "--cluster", '"none", "slurm"'),
    ("prepare", "sources", "at least one"),
    ("prepare /no/such", "source of text must be", "'/no/such'"),
    ("sample", "MODEL requires an argument"),
    ("sample /no/such/run", "model must be", "/no/such/run"),
    ("reproduce frozzen", "did you mean 'frozen'"),
    ("reproduce frozen --scale maxi", "--scale", '"mini", "paper", "h200"'),
    ("reproduce frozen --variants AdamW ful", "did you mean 'full'"),
    ("reproduce frozen --out ''", "out must be a new folder"),
    ("figure curves", "name must be one of"),
]


@pytest.mark.parametrize(("line", "words"), [(line, words) for line, *words in WRONG])
def test_a_users_error_is_one_line_that_names_the_key_and_leaves_nothing(capsys, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    given = shlex.split(line) + ["--out", "x"] * (line.split()[0] in ("train", "compare", "prepare"))
    message = refused(capsys, *given)
    assert [word for word in words if word not in message] == []
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)


def test_traceback_on_demand():
    with pytest.raises(ValueError, match="data must be given"):
        cli.main(["--traceback", "train", "--out", "x"])


def test_a_missing_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "symexplin.lab.demo", None)
    assert "'.[lab]'" in refused(capsys, "demo")
    for name in [name for name in sys.modules if name.startswith("symexplin.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cyclopts", None)
    monkeypatch.setattr(sys.modules["symexplin"], "cli", None)
    assert symexplin.__main__.main() == 2
    assert "'.[lab]'" in capsys.readouterr().err


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


def test_an_error_of_the_machine_names_its_file(monkeypatch, capsys):
    failing(monkeypatch, OSError(28, "No space left on device", "x/runs/a"))
    assert refused(capsys, "demo").endswith(": 'x/runs/a': No space left on device")


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
    code = "import sys; from symexplin.cli import COMMANDS, main\n"
    code += "for name in COMMANDS: main([name, '--help'])\n"
    code += "assert not {'torch', 'numpy', 'matplotlib', 'safetensors', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)


# --- Settings --------------------------------------------------------------------------------------------------------


def test_defaults_give_way_to_the_saved_settings_then_the_file_then_flags(place, capsys, tmp_path):
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(
        f'data = "{place / "data"}"\n[model]\nwidth = 32\ndepth = 1\nheads = 2\ncontext = 16\n'
        '[train]\nsteps = 50\nbatch_size = 4\n[sel]\npreset = "paper"\n'
        "map = { e.k = [10, 2] }\n[log]\ntensorboard = false\n"
    )
    words = ("--steps", "3", "--lr", "0.1", "--lr", "0.2", "--map", "beta=5")
    text = run(capsys, "train", file, "--out", folder, *words)
    train = load_toml(folder / "config.toml")["train"]
    assert (train["steps"], train["batch_size"], train["accumulation"], train["lr"]) == (3, 4, 1, 0.2)
    assert "map: the paper's method, changed: mismatch, beta 5, e learned (row_col_mult, k 10 to 2), " in text
    resumed = ("train", "--out", folder, "--resume")
    message = refused(capsys, *resumed, "--lr", "0.5", "--map", "beta=6")
    assert "train.lr was 0.2, is 0.5 now" in message
    assert message.endswith("sel.map.beta was 5.0, is 6.0 now")
    assert "train.steps was 3, is 50 now" in refused(capsys, *resumed, file)
    assert "has finished already" in run(capsys, *resumed)


# --- Commands --------------------------------------------------------------------------------------------------------


def test_sample_writes_the_prompt_and_more_and_the_same_again(place, capsys):
    words = ("sample", place / "run", "--prompt", "document 3", "--length", "20")
    text = run(capsys, *words)
    assert text.startswith("document 3")
    assert len(text) > len("document 3\n")
    assert run(capsys, *words) == text
    assert run(capsys, *words, "--seed", "1") != text
    assert run(capsys, "sample", place / "run", "--prompt", "- item", "--length", "1").startswith("- item")


def test_export_writes_what_it_is_asked_for(place, capsys, tmp_path):
    """Logits are compared in tests/lab/test_export.py."""
    run(capsys, "export", place / "run", "--out", tmp_path / "mymodel")
    assert json.loads((tmp_path / "mymodel" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.usefixtures("undrawn", "in_process")
def test_compare_trains_variants_of_ones_own(place, capsys, tmp_path):
    variants = "--variants AdamW mine --variant mine.preset=frozen mine.map.beta=5 --lrs 1e-2 --seeds 0"
    text = run(capsys, "compare", "--data", place / "data", "--out", tmp_path / "c", *variants.split(), *TINY.split())
    assert "mine" in text
    assert {path.name for path in (tmp_path / "c" / "runs").iterdir()} == {"AdamW-lr0.01-seed0", "mine-lr0.01-seed0"}
    assert (tmp_path / "c" / "report.html").exists()


@pytest.mark.usefixtures("undrawn", "in_process")
def test_reproduce_lists_plans_runs_and_continues(place, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = run(capsys, "reproduce").splitlines()
    assert [tuple(line.split(maxsplit=1)) for line in lines] == list(names().items())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # on a GPU the plan would train some steps
    out = run(capsys, "reproduce", "main_grid", "--plan", "--scale", "paper", "--seeds", "1", "2")
    assert "3072x36: AdamW, mismatch, mismatch+offset; lrs 0.0003; seeds 1 2; up to 6 runs of 150,000 steps" in out
    assert not list(tmp_path.iterdir())
    tiny = "--lrs 2e-3 --steps 2 --jobs 1 --set model.width=16 model.depth=1 model.heads=2 model.context=8"
    tiny += " train.batch_size=2 train.eval_batches=1 compare.seeds=[0] --results results/mini.csv"
    command = ["reproduce", "frozen", "--data", place / "data", *tiny.split()]
    assert "2/2 frozen lr 0.002 seed 0: loss" in run(capsys, *command, "--variants", "AdamW", "frozen")
    run(capsys, *command, "--variants", "AdamW", "frozen", "full", "--resume")
    folder = tmp_path / "runs" / "reproduce" / "frozen-mini"
    assert (folder / "report.html").exists()
    assert len((tmp_path / "results" / "mini.csv").read_text().splitlines()) == 1 + 3
    assert [run.variant for run in read_table(folder).panels[0].comparison.runs] == ["AdamW", "frozen", "full"]


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
