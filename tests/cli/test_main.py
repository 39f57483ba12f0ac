import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version

import pytest
import torch

from symexplin import cli
from symexplin.cli.commands import COMMANDS
from symexplin.cli.manual import PAGES

TINY = "--width 16 --depth 1 --heads 2 --context 8 --batch-size 4 --eval-every 5 --eval-batches 1 --no-tensorboard"


def run(*arguments, **options):
    command = [sys.executable, "-m", "symexplin", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment, **options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: COMMAND"),
        (["dmo"], "COMMAND must be one of 'prepare', .*did you mean 'demo'?"),
        (["train", "--out", "x", "--widht", "3"], "unknown argument '--widht'; did you mean --width?"),
        (["train", "--out", "x", "--steps", "ten"], "--steps: must be a whole number, got 'ten'"),
        (["train", "--out", "x", "--home", "modul"], "--home must be one of .*did you mean 'module'?"),
        (["train", "--out", "x", "--map", "beta"], "--map: must be KEY=VALUE"),
        (["train", "--out", "x"], "data must be given: folder that symexplin prepare made"),
        (["train", "--data", "/no/such", "--out", "x"], "/no/such"),
        (["train", "/no/such.toml", "--out", "x"], "config must be an existing TOML file"),
        (["train", "--data", "d"], "required: --out"),
        (["demo", "--step"], "--step"),
        (["demo", "--lrs", "fast"], "--lrs: must be a number, got 'fast'"),
        (["demo", "--lrs", "0"], "lrs must be a positive finite number, got 0.0"),
        (["demo", "--steps", "0"], "steps must be a whole number >= 1, got 0"),
        (["demo", "--arms", "AdamW", "SLE"], "did you mean 'SEL'?"),
        (["demo", "--data", "/no/such/file"], "got '/no/such/file'"),
        (["sample", "/no/such/run"], "/no/such/run"),
        (["export", "/no/such/run", "--out", "x"], "/no/such/run"),
        (["report", "/no/such/run"], "/no/such/run"),
        (["inspect", "/no/such/file"], "/no/such/file"),
        (["fold", "/no/such/file", "x"], "/no/such/file"),
        (["invert", "/no/such/file", "x", "--preset", "papper"], "did you mean 'paper'?"),
        (["prepare", "/no/such/file", "--out", "x"], "/no/such/file"),
        (["completion", "elvish"], "SHELL must be one of 'bash'"),
        (["train", "/tmp", "--out", "x"], "config must be an existing TOML file, got '/tmp'"),
        (["train", "--data", "d", "--out", "x", "--map", "bete=3"], "map: key must be one of .*did you mean 'beta'"),
        (["invert", "/no/such", "x", "--preset", "carried"], "--preset must be one of 'default'"),
        (["prepare", "", "--out", "x"], "sources must be 'stdlib', an existing file or folder, or 'hf:NAME', got ''"),
        (["prepare", "hf:", "--out", "x"], "got 'hf:' without a name"),
    ],
)
def test_a_users_error_is_one_line(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("symexplin: error: ")
    import re

    assert re.search(words.replace("?", r"\?"), line), line
    assert list(tmp_path.iterdir()) == []  # nothing is left half-written


def test_the_process_gives_the_same_line_and_status(tmp_path):
    (tmp_path / "mine").write_text("mine")
    done = run("demo", "--out", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("symexplin: error: out must be a new folder or that of an earlier demo")
    assert (tmp_path / "mine").read_text() == "mine"


def test_traceback_on_demand():
    with pytest.raises(ValueError, match="steps must be"):
        cli.main(["--traceback", "demo", "--steps", "0"])


def test_a_missing_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "symexplin.lab.demo", None)
    assert cli.main(["demo"]) == 2
    assert "symexplin[lab]" in capsys.readouterr().err


def test_an_error_of_the_program_is_not_hidden(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr("symexplin.lab.demo.run_demo", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["demo"])


def test_a_device_out_of_memory_is_a_users_error(monkeypatch, capsys):
    def greedy(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr("symexplin.lab.demo.run_demo", greedy)
    assert cli.main(["demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "raise --accumulation" in line


def test_a_model_too_large_for_the_memory_is_a_users_error(data, tmp_path, capsys):
    capsys.readouterr()
    assert cli.main(["train", "--data", data, "--out", str(tmp_path / "run"), "--width", "100000000000"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("symexplin: error: out of memory")
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_no_number_is_one_line(data, tmp_path, capsys):
    arguments = ["train", "--data", data, "--out", str(tmp_path / "run"), "--steps", "9", "--lr", "1e30", *TINY.split()]
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("symexplin: error: step 2: loss is nan")
    assert "--resume would go on from the start" in line
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_failed_compilation_is_told_in_one_line(monkeypatch, capsys):
    from torch._dynamo.exc import TorchDynamoException

    def fail(*_, **__):
        raise TorchDynamoException("g++ died\nwith many lines")

    monkeypatch.setattr("symexplin.lab.demo.run_demo", fail)
    assert cli.main(["demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "torch.compile failed: leave out --compile" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_manual_with_an_example(capsys, command):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert PAGES[command].description.strip() in text
    assert f"  symexplin {command}" in PAGES[command].epilog
    assert max(map(len, text.splitlines())) <= 120


def test_examples_of_the_manual_are_understood():
    """Every example parses: no flag in it is misspelt."""
    import shlex

    pages = [page.epilog for page in PAGES.values()]
    examples = [line.strip() for text in pages for line in text.splitlines() if line.startswith("  symexplin ")]
    assert len(examples) >= len(PAGES)
    for example in examples:
        words = shlex.split(example.partition(" > ")[0], comments=True)[1:]
        assert cli.make_parser(words).parse_args(words).command == words[0]


def test_version_and_help(capsys):
    for arguments, words in ((["--version"], f"symexplin {version('symexplin')}"), (["--help"], "exit status")):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 0
        assert words in capsys.readouterr().out


def test_help_does_not_need_the_lab():
    code = (
        "import sys\nfor m in ('safetensors', 'matplotlib', 'tomli_w', 'numpy', 'tokenizers'): sys.modules[m] = None\n"
    )
    code += "import symexplin.cli as c\nc.main(['--help'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_and_flags(capsys, tmp_path):
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    for words, expected in (("tra", "train"), ("train --wid", "--width"), ("train --home mod", "module")):
        line = f"symexplin {words}"
        code = f"""source {script}
            COMP_WORDS=({line}); COMP_CWORD={len(line.split()) - 1}; COMP_LINE='{line}'; COMP_POINT={len(line)}
            COMP_TYPE=9; $(complete -p symexplin | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo "${{COMPREPLY[@]}}" """
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False, timeout=60)
        assert expected in done.stdout.split(), (words, done)


def start(command, seen, ready):
    """Start a command and wait until `ready()`; `seen` gets the process."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from symexplin.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seen.append(process)
    deadline = time.monotonic() + 100
    while not ready() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_training_with_a_checkpoint_and_a_line(tmp_path, data, number, status):
    folder, seen = tmp_path / "run", []
    command = ["train", "--data", data, "--out", str(folder), "--steps", "100000", *TINY.split()]
    metrics = folder / "metrics.jsonl"
    try:
        process = start(command, seen, lambda: metrics.exists() and b'"step": 3,' in metrics.read_bytes())
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        seen[0].kill()
    assert process.returncode == status
    last = errors.splitlines()[-1]
    assert last.startswith(f"symexplin: stopped by {number.name} after step ")
    assert "Traceback" not in errors
    assert len(list((folder / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("outlet", ["| head -1", ">&-", "> /dev/full"])
def test_training_goes_on_when_nobody_reads(data, tmp_path, outlet):
    command = f"{sys.executable} -m symexplin train --data {data} --out {tmp_path}/run --steps 60 {TINY} {outlet}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_reader_who_leaves_ends_what_only_prints():
    code = "yes '' | head -100 > /dev/null; "
    command = f"{sys.executable} -m symexplin completion bash | head -1"
    done = subprocess.run(["bash", "-c", code + command], capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in done.stderr
