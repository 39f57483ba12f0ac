import shlex
import signal
import subprocess
import sys
import time

import pytest

from symexplin.lab.compare import launch
from symexplin.lab.compare.command import CommandConfig, compare_commands, configured
from symexplin.lab.compare.grid import Cell, CompareConfig, GridConfig

# Writes 1 + lr for "good", 2 + lr for "plain"; "slow" takes a minute. Starts are counted.
SCRIPT = """
import json, os, pathlib, sys, time
variant, lr, seed, out = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
starts = out / "starts"
starts.write_text((starts.read_text() if starts.exists() else "") + os.environ["OMP_NUM_THREADS"])
if variant == "slow":
    time.sleep(60)
loss = {"good": 1.0 + seed / 1000, "plain": 2.0}[variant] + lr
(out / "result.json").write_text(json.dumps({"loss": loss, "curve": [[0, 5.0], [50, 3.0], [100, 9.9]]}))
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return shlex.join([sys.executable, str(script)]) + " {variant} {lr} {seed} {out}"


def grid(*variants, **changes):
    return GridConfig(variants, **{"lrs": (0.1, 0.2), "seeds": (0, 1, 2), "jobs": 2, **changes})


def starts(out):
    return {path.parent.name: path.read_text() for path in out.glob("runs/*/starts")}


def test_runs_of_a_command_are_compared_as_those_of_the_laboratory(command, tmp_path):
    lines, out = [], tmp_path / "out"
    found = compare_commands(CommandConfig(command, grid("plain", "good")), out, echo=lines.append)
    base, row = found["comparison"]["best"]
    assert (base["variant"], base["lr"], base["loss"]) == ("plain", 0.1, pytest.approx(2.1))
    assert row["deltas"] == pytest.approx([-1.0, -0.999, -0.998])
    # The curve ends at the loss.
    assert row["speedup"] == pytest.approx(100 / (50 + 50 * (3 - 2.1) / (3 - 1.101)), rel=1e-2)
    assert "(better; 99% interval " in found["headline"][0]
    assert "12/12 good lr 0.2 seed 2: loss 1.2020" in lines
    assert len(starts(out)) == 12
    page = (out / "report.html").read_text()
    assert "as the command reports it" in page
    assert "nats" not in page


def test_a_resumed_comparison_runs_what_is_new(command, tmp_path):
    out = tmp_path / "out"
    compare_commands(CommandConfig(command, grid("plain", "good", seeds=(0,))), out)
    with pytest.raises(ValueError, match=r"command must be that of the folder"):
        compare_commands(CommandConfig(command + " more", grid("plain", "good")), out, resume=True)
    more = {"compare": {"confirm_seeds": [7]}}
    config = configured(out, more, resume=True)
    assert config == CommandConfig(command, grid("plain", "good", confirm_seeds=(7,), seeds=(0,)))
    found = compare_commands(config, out, resume=True)
    assert found["comparison"]["confirm_seeds"] == (7,)
    new = {"plain-lr0.1-seed7", "good-lr0.1-seed7"}
    assert set(starts(out)) == {f"{v}-lr{lr}-seed0" for v in ("plain", "good") for lr in (0.1, 0.2)} | new
    assert set(starts(out).values()) == {"1"}  # one thread, once


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "KeyError"),
        ("[2.3]", "TypeError"),
        ('{"loss": "2.3"}', "'2.3' is not a number"),
        ('{"loss": true}', "True is not a number"),
        ('{"loss": 2.3', "Expecting ',' delimiter"),
        ('{"loss": 2.3, "curve": [2.3]}', "TypeError"),
        ('{"loss": 2.3, "curve": [[0, 1.0], [0, 2.0]]}', "steps do not increase"),
        ('{"loss": 0.5, "curve": [[0, 0.6], [10.0, NaN]]}', None),
        ('{"loss": 1}', None),
        ('{"loss": NaN}', None),
    ],
)
def test_a_result_is_read_strictly(command, tmp_path, text, said):
    """A baseline without a curve has no steps, and so the variant has no speedup."""
    out = tmp_path / "out"
    for name, content in (("good", text), ("plain", '{"loss": 1.0}')):
        (out / "runs" / f"{name}-lr0.1-seed0").mkdir(parents=True)
        (out / "runs" / f"{name}-lr0.1-seed0" / "result.json").write_text(content)
    (out / "compare.toml").write_text(f"command = {command!r}")
    config = CommandConfig(command, grid("plain", "good", lrs=(0.1,), seeds=(0,)))
    if said:
        with pytest.raises(ChildProcessError, match=rf"good-lr0\.1-seed0/result\.json. must be like .*{said}"):
            compare_commands(config, out, resume=True)
        return
    found = compare_commands(config, out, resume=True)
    row = found["comparison"]["shared"][1]
    assert row["speedup"] is None
    assert row["loss"] == {"0.5": 0.5, "1}": 1.0}.get(text[9:].split(",")[0])
    assert ("good did not stay finite" in found["headline"][0]) == ("NaN}" in text and "0.5" not in text)


def test_a_command_gets_all_digits_of_a_learning_rate_and_other_braces_are_written_twice(tmp_path):
    config = CommandConfig(f"{sys.executable} {{variant}} {{lr}} '{{{{x}}}} y' {{out}}", grid("a", "b", seeds=(0,)))
    words = config.words(Cell("a", 0.00123456789, 0), tmp_path)
    assert words[1:] == ["a", "0.00123456789", "{x} y", str(tmp_path)]


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        ("{python} x {variant} {lr} {out} {steps}", {}, r"command must be words .* written twice, got .*: 'steps'"),
        ("{python} 'x {variant} {lr} {out}", {}, "command must be words that a shell could split"),
        ("", {}, r"command must have the place \{variant\}, got ''"),
        ("{python} x {variant} {out}", {}, r"must have the place \{lr\}"),
        ("{python} x {variant} {lr}", {}, r"must have the place \{out\}"),
        ("{python} x {variant} {lr} {out}", {"confirm_seeds": (1,)}, r"must have the place \{seed\}"),
        ("A=1 {python} x {variant} {lr} {out}", {}, "must begin with a program that exists, got 'A=1'; no shell runs"),
        *(
            ("{python} {variant} {lr} {out}", {"variants": ("a", name)}, "variants must be names that a folder can")
            for name in ("../../b", "", "a\nb")
        ),
    ],
)
def test_a_command_that_cannot_run_is_refused(text, changes, said):
    settings = GridConfig(**{"variants": ("a", "b"), "lrs": (0.1, 0.2), "seeds": (0,), **changes})
    with pytest.raises(ValueError, match=said):
        CommandConfig(text.replace("{python}", sys.executable), settings)


def test_tables_of_settings_say_what_is_compared(command, tmp_path):
    assert isinstance(configured(tmp_path, {"data": "data"}, {"compare": {"lrs": [0.1]}}, resume=True), CompareConfig)
    own = {"command": command, "compare": {"seeds": [1]}}
    assert configured(tmp_path, own, {"compare": {"seeds": [2]}}, resume=False).compare.seeds == (2,)
    with pytest.raises(ValueError, match="steps must be left to the command, got --steps beside --command"):
        configured(tmp_path, own, {"train": {"steps": 3}}, resume=False)
    (tmp_path / "compare.toml").write_text('data = "data"')
    assert configured(tmp_path, {"model": {"width": 8}}, resume=True).data == "data"
    with pytest.raises(ValueError, match="out must be new for a command"):
        configured(tmp_path, own, resume=True)
    (tmp_path / "compare.toml").write_text(f"command = {command!r}")
    with pytest.raises(ValueError, match="out must be new for runs of the laboratory's own"):
        configured(tmp_path, {"data": "data"}, resume=True)
    (tmp_path / "compare.toml").write_text("dat = 1")
    with pytest.raises(ValueError, match=r"compare\.toml' was edited"):
        configured(tmp_path, resume=True)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a child with its parent")
def test_a_killed_comparison_ends_its_runs(command, tmp_path):
    out = tmp_path / "out"
    words = ["compare", "--out", out, "--variants", "plain", "slow", "--lrs", "0.1", "--jobs", "2"]
    arguments = [sys.executable, "-m", "symexplin", *words, "--command", command]
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(out.glob("runs/*/starts"))) < 2 or not list(out.glob("runs/plain*/result.json")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    time.sleep(0.5)
    listed = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in listed.splitlines() if str(out) in line]
