import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from symexplin.lab.compare import launch
from symexplin.lab.compare.command import CommandConfig, compare_commands
from symexplin.lab.compare.grid import Cell, GridConfig

# Writes 1 + lr for "good", 2 + lr for "plain", NaN for "wild"; "bad" fails, "mute" writes nothing. Starts are counted.
SCRIPT = """
import json, pathlib, sys, time
variant, lr, seed, out = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
starts = out / "starts"
starts.write_text((starts.read_text() if starts.exists() else "") + "x")
print("working on", variant)
if variant == "slow":
    time.sleep(60)
if variant == "bad":
    sys.exit("no such optimizer: bad")
loss = {"good": 1.0, "plain": 2.0, "wild": float("nan"), "mute": 0.0}[variant] + lr + seed / 1000 * (variant == "good")
if variant != "mute":
    curve = [[0, 5.0], [50, 3.0], [100, 9.9]]
    (out / "result.json").write_text(json.dumps({"loss": loss, "curve": curve}))
"""


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda: 2)


@pytest.fixture
def command(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return shlex.join([sys.executable, str(script)]) + " {variant} {lr} {seed} {out}"


def grid(*variants, **changes):
    return GridConfig(variants, **{"lrs": (0.1, 0.2), "seeds": (0, 1, 2), "jobs": 2, **changes})


def starts(out):
    return {path.parent.name: len(path.read_text()) for path in out.glob("runs/*/starts")}


def test_runs_of_a_command_are_compared_as_those_of_the_laboratory(command, tmp_path):
    lines, out = [], tmp_path / "out"
    found = compare_commands(CommandConfig(command, grid("plain", "good")), out, echo=lines.append)
    base, row = found["comparison"]["best"]
    assert (base["variant"], base["lr"], base["loss"]) == ("plain", 0.1, pytest.approx(2.1))
    assert row["deltas"] == pytest.approx([-1.0, -0.999, -0.998])
    assert row["speedup"] == pytest.approx(
        100 / (50 + 50 * (3 - 2.1) / (3 - 1.101)), rel=1e-2
    )  # the curve ends at the loss
    assert "(better; 99 % interval " in found["headline"][0]
    assert len(starts(out)) == 12
    page = (out / "report.html").read_text()
    assert "as the command reports it" in page
    assert "nats" not in page
    assert "12/12 good lr 0.2 seed 2: loss 1.2020" in lines


def test_a_resumed_comparison_runs_what_is_new(command, tmp_path):
    out = tmp_path / "out"
    compare_commands(CommandConfig(command, grid("plain", "good", seeds=(0,))), out)
    with pytest.raises(ValueError, match=r"out must be a new folder.*add --resume"):
        compare_commands(CommandConfig(command, grid("plain", "good")), out)
    with pytest.raises(ValueError, match=r"command must be that of the folder"):
        compare_commands(CommandConfig(command + " more", grid("plain", "good")), out, resume=True)
    found = compare_commands(
        CommandConfig(command, grid("plain", "good", confirm_seeds=(7,), seeds=(0,))), out, resume=True
    )
    assert found["comparison"]["confirm_seeds"] == (7,)
    counts = starts(out)
    assert set(counts.values()) == {1}
    assert {name for name in counts if name.endswith("seed7")} == {"plain-lr0.1-seed7", "good-lr0.1-seed7"}


def test_a_failing_variant_is_named_with_its_last_lines_after_the_others_have_run(command, tmp_path):
    lines, out = [], tmp_path / "out"
    config = CommandConfig(command, grid("plain", "bad", "mute", "good", lrs=(0.1,), seeds=(0,), jobs=1))
    with pytest.raises(
        ChildProcessError, match=r"^2/4 bad .*working on bad / no such optimizer: bad .*; 1 more failed"
    ):
        compare_commands(config, out, echo=lines.append)
    assert any("failed: 3/4 mute" in line and "ended without result.json: working on mute" in line for line in lines)
    assert (out / "runs" / "good-lr0.1-seed0" / "result.json").exists()


def test_a_baseline_without_a_curve_has_no_speedup(tmp_path):
    script = tmp_path / "x.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "curve = {} if sys.argv[1] == 'a' else {'curve': [[0, 5.0], [10, 0.5]]}\n"
        "pathlib.Path(sys.argv[2], 'result.json').write_text(json.dumps({'loss': 1.0} | curve))\n"
    )
    words = shlex.join([sys.executable, str(script)]) + " {variant} {out}"
    found = compare_commands(CommandConfig(words, grid("a", "b", lrs=(0.1,), seeds=(0,), jobs=1)), tmp_path / "out")
    assert found["comparison"]["shared"][1]["speedup"] is None


def test_a_loss_that_is_not_finite_is_a_result(command, tmp_path):
    config = CommandConfig(command, grid("plain", "wild", lrs=(0.1,), seeds=(0,), jobs=1))
    found = compare_commands(config, tmp_path / "out")
    assert "wild did not stay finite" in found["headline"][0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"los": 1}', "it has no loss that is a number"),
        ('{"loss": "2.3"}', "it has no loss that is a number"),
        ('{"loss": true}', "it has no loss that is a number"),
        ("[2.3]", "it has no loss that is a number"),
        ('{"loss": 2.3', "Expecting ',' delimiter"),
        ('{"loss": 2.3, "curve": [2.3]}', r"its curve is not a list of \[step, loss\]"),
        ('{"loss": 2.3, "curve": [[0, 1.0], [0, 2.0]]}', "the steps of its curve do not increase"),
    ],
)
def test_a_damaged_result_is_named_after_the_others_have_run(tmp_path, text, said):
    out = tmp_path / "out"
    script = tmp_path / "damage.py"
    script.write_text(
        f"import pathlib, sys\npathlib.Path(sys.argv[2], 'result.json').write_text({text!r} if sys.argv[1] == 'a'"
        " else '{\"loss\": 1}')\n"
    )
    words = shlex.join([sys.executable, str(script)]) + " {variant} {out}"
    config = CommandConfig(words, grid("a", "b", lrs=(0.1,), seeds=(0,), jobs=1))
    with pytest.raises(
        ValueError, match=rf"a-lr0\.1-seed0/result\.json. must be like .*{said}.*delete it to run again"
    ):
        compare_commands(config, out)
    assert (out / "runs" / "b-lr0.1-seed0" / "result.json").exists()


def test_a_bad_result_does_not_keep_the_others_from_running(tmp_path):
    script, out, lines = tmp_path / "x.py", tmp_path / "out", []
    script.write_text(
        "import pathlib, sys\n"
        "text = 'oops' if sys.argv[1].startswith('bad') else '{\"loss\": 1}'\n"
        "pathlib.Path(sys.argv[2], 'result.json').write_text(text)\n"
    )
    command = shlex.join([sys.executable, str(script)]) + " {variant} {out}"
    config = CommandConfig(command, grid("a", "bad", "bad2", "b", lrs=(0.1,), seeds=(0,), jobs=1))
    with pytest.raises(ValueError, match=r"bad-lr0\.1-seed0/result\.json' must be like .*; 1 more: see above$"):
        compare_commands(config, out, echo=lines.append)
    assert any(line.startswith("failed: 2/4 bad lr 0.1 seed 0: ") for line in lines)
    assert "4/4 b lr 0.1 seed 0: loss 1.0000" in lines
    for name in ("bad", "bad2"):
        (out / "runs" / f"{name}-lr0.1-seed0" / "result.json").unlink()
    script.write_text(script.read_text().replace("'oops'", '\'{"loss": 0.5, "curve": [[0, 0.6], [10.0, NaN]]}\''))
    found = compare_commands(config, out, resume=True)
    assert found["comparison"]["shared"][1]["loss"] == 0.5
    assert found["seconds"] is None  # which nobody measured


@pytest.mark.parametrize("name", ["a/b", "../../b", "", " ", "a\nb", "a\\b"])
def test_a_variant_that_is_no_name_of_a_folder_is_refused(name):
    with pytest.raises(ValueError, match="variants must be names that a folder can have"):
        CommandConfig(f"{sys.executable} {{variant}} {{out}}", grid("a", name, lrs=(0.1,), seeds=(0,)))


def test_a_command_gets_all_digits_of_a_learning_rate(tmp_path):
    config = CommandConfig(f"{sys.executable} {{variant}} {{lr}} {{out}}", grid("a", "b", seeds=(0,)))
    assert config.words(Cell("a", 0.00123456789, 0), tmp_path)[2] == "0.00123456789"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{python} x {variant} {lr} {out} {steps}", r"got \{steps\}; write other braces twice"),
        ("{python} x {variant} {lr:.3f} {out}", r"got \{lr:\.3f\}; write other"),
        ("{python} x {variant} {lr} {out} {seed:{width}}", r"got \{seed:\{width\}\}; write other"),
        ("{python} x {variant} {lr} {out!q}", r"got \{out!q\}; write other"),
        ("A=1 {python} x {variant} {lr} {out}", "got 'A=1'; no shell runs it"),
        ("{python} x {variant} {out}", r"must have the place \{lr\}"),
        ("{python} x {variant} {lr}", r"must have the place \{out\}"),
        ("no-such-program {variant} {lr} {out}", "must begin with a program that exists, got 'no-such-program'"),
        ("{python} 'x {variant} {lr} {out}", "a shell could split"),
    ],
)
def test_a_command_that_cannot_run_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        CommandConfig(text.replace("{python}", sys.executable), grid("a", "b", seeds=(0,)))


def test_seeds_that_confirm_need_their_place():
    with pytest.raises(ValueError, match=r"must have the place \{seed\}"):
        CommandConfig(f"{sys.executable} {{variant}} {{lr}} {{out}}", grid("a", "b", seeds=(0,), confirm_seeds=(1,)))


def test_other_braces_are_written_twice(tmp_path):
    config = CommandConfig(f"{sys.executable} {{variant}} {{lr}} '{{{{x}}}} y' {{out}}", grid("a", "b", seeds=(0,)))
    assert config.words(Cell("a", 0.1, 0), tmp_path)[1:] == ["a", "0.1", "{x} y", str(tmp_path)]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a child with its parent")
@pytest.mark.parametrize(
    ("number", "wrapped"), [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGTERM, True)]
)
def test_a_killed_comparison_ends_its_runs_and_goes_on(command, tmp_path, number, wrapped):
    out = tmp_path / "out"
    if wrapped:  # a shell does not pass the signal on
        command = f"bash -c {shlex.quote(command + '; true')}"
    words = [
        "compare",
        "--out",
        out,
        "--variants",
        "plain",
        "slow",
        "--lrs",
        "0.1",
        "--jobs",
        "2",
        "--command",
        command,
    ]
    process = subprocess.Popen([sys.executable, "-m", "symexplin", *words], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(out.glob("runs/*/starts"))) < 2 or not list(out.glob("runs/plain*/result.json")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait() == (-9 if number == signal.SIGKILL else 143)
    time.sleep(0.5)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in listed.splitlines() if str(out) in line]
    os.environ.pop("OMP_NUM_THREADS", None)
    config = CommandConfig(command, grid("plain", "good", lrs=(0.1,), seeds=(0,)))
    compare_commands(config, out, resume=True)
    assert starts(out)["plain-lr0.1-seed0"] == 1
