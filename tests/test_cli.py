import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version

import pytest

from symexplin import cli


def run(*arguments, **options):
    command = [sys.executable, "-m", "symexplin.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: COMMAND"),
        (["dmo"], "invalid choice: 'dmo'"),
        (["demo", "--step"], "--step"),
        (["demo", "--lrs", "fast"], "invalid float value: 'fast'"),
        (["demo", "--lrs", "0"], "lrs must be a positive finite number, got 0.0"),
        (["demo", "--steps", "0"], "steps must be a whole number >= 1, got 0"),
        (["demo", "--arms", "AdamW", "SLE"], "did you mean 'SEL'?"),
        (["demo", "--data", "/no/such/file"], "got '/no/such/file'"),
    ],
)
def test_a_users_error_is_one_line(capsys, arguments, words):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("symexplin: error: ")
    assert words in line


def test_the_process_gives_the_same_line_and_status(tmp_path):
    (tmp_path / "mine").write_text("mine")
    done = run("demo", "--out", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("symexplin: error: out must be a new folder or one of an earlier demo")
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


def test_version_and_help(capsys):
    for arguments, words in (
        (["--version"], f"symexplin {version('symexplin')}"),
        (["--help"], "demo"),
        (["demo", "--help"], "runs/demo"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 0
        assert words in capsys.readouterr().out


def test_help_does_not_import_the_lab():
    code = "import sys, symexplin.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(any(m in sys.modules for m in ('symexplin.lab', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode == 0


def test_options_reach_the_demo(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("symexplin.lab.demo.run_demo", lambda *arguments, **_: seen.append(arguments))
    line = f"demo --out {tmp_path} --steps 7 --seed 3 --data x --arms AdamW SEL-frozen --lrs 1e-3 0.1"
    assert cli.main(line.split()) == 0
    ((out, config),) = seen
    assert out == str(tmp_path)
    assert (config.steps, config.seed, config.data) == (7, 3, "x")
    assert (config.arms, config.lrs) == (("AdamW", "SEL-frozen"), (1e-3, 0.1))


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_ends_with_one_line_and_readable_metrics(tmp_path):
    # A test run in the background inherits an ignored SIGINT, and so would the child.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from symexplin.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "demo", "--out", str(tmp_path), "--steps", "100000"]
    metrics = tmp_path / "runs" / "AdamW-lr0.0015" / "metrics.jsonl"
    deadline = time.monotonic() + 100
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "symexplin: interrupted"
    assert "Traceback" not in errors
    assert metrics.read_text().endswith("}\n")
