"""Comparisons of tiny runs of the laboratory, and what a command may be; a kill, with real processes."""

import dataclasses
import shutil
import signal
import subprocess
import sys

import pytest

from executors import executed, in_process  # noqa: F401 (a fixture)
from symexplin.lab.compare import launch
from symexplin.lab.compare.grid import Cell, ClusterConfig, CompareConfig, GridConfig
from symexplin.lab.compare.kinds import Command, Laboratory, configured
from symexplin.lab.compare.sweep import compare
from symexplin.lab.config import ComputeConfig, LogConfig, TrainConfig
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.run import train
from symexplin.lab.settings import dump_toml, from_table, load_toml, to_table

NAMES = [f"{variant}-lr{lr}-seed{seed}" for seed in (0, 3) for lr in (0.001, 0.01) for variant in ("AdamW", "default")]
pytestmark = pytest.mark.usefixtures("undrawn")  # but for what a fixture of the module draws once


def tiny(data, steps=6, **grid):
    return CompareConfig(
        data,
        ModelConfig(width=16, depth=1, heads=2, context=16),
        TrainConfig(steps=steps, batch_size=4, warmup_steps=1, eval_every=2, eval_batches=2),
        compute=ComputeConfig(device="cpu", threads=1, autocast="off"),
        log=LogConfig(checkpoint_every=3, tensorboard=False),
        compare=GridConfig(**{"lrs": (1e-3, 1e-2), "seeds": (0, 3), **grid}),
    )


def compared(config, out, **options):
    return compare(Laboratory(config), out, **options)


def bits(folder):
    """Return what a sweep measured and trained, without times."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for name in ("metrics.jsonl", "model.safetensors")
        for path in folder.glob(f"runs/*/{name}")
    }


def numbers(comparison):
    return [(run.variant, run.lr, run.seed, run.curve, run.error) for run in comparison.runs]


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare") / "out"
    with executed():
        return folder, compared(tiny(data), folder)


def test_its_runs_are_ordinary_runs_and_the_comparison_is_theirs(finished, data, tmp_path):
    folder, comparison = finished
    assert [comparison.folder_of(run) for run in comparison.runs] == [folder / "runs" / name for name in NAMES]
    config = tiny(data)
    for cell, run in zip(config.compare.cells()[-2:], comparison.runs[-2:], strict=True):
        result = train(config.run(cell), tmp_path / cell.name)
        assert (run.curve, run.loss) == (tuple((step, loss) for step, loss, _ in result["curve"]), result["loss"])
        assert [loss for _, loss in run.by_time] == [loss for _, loss, _ in result["curve"]]
        assert (tmp_path / cell.name / "metrics.jsonl").read_bytes() == bits(folder)[f"runs/{cell.name}/metrics.jsonl"]
    assert comparison.maps["AdamW"] is None
    expected = {"home": "optimizer", "start": "matched", "mode": "exp_only"}
    assert expected.items() <= comparison.maps["default"].items()
    assert (comparison.facts["corpus"]["tokenizer"], comparison.facts["provenance"]["threads"]) == ("byte", 1)
    assert comparison.facts["model"]["parameters"] == sum(p.numel() for p in Transformer(config.model).parameters())
    assert from_table(CompareConfig, load_toml(folder / "compare.toml")).compare == config.compare


@pytest.mark.usefixtures("in_process")
def test_a_finished_comparison_is_told_again_may_shrink_and_trains_a_removed_run_again(finished, data, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "out")
    assert numbers(compared(tiny(data), folder, resume=True)) == numbers(finished[1])
    small = compared(tiny(data, lrs=(1e-2,), seeds=(3,)), folder, resume=True)
    assert numbers(small) == [run for run in numbers(finished[1]) if run[1:3] == (1e-2, 3)]
    assert bits(folder) == bits(finished[0])
    damaged = folder / "runs" / NAMES[0]
    shutil.rmtree(damaged)
    assert numbers(compared(tiny(data), folder, resume=True)) == numbers(finished[1])


@pytest.mark.usefixtures("in_process")
def test_a_mistake_is_found_before_the_first_run_or_by_it(finished, data, tmp_path):
    with pytest.raises(ValueError, match="context must be below"):
        compared(dataclasses.replace(tiny(data), model=ModelConfig(16, 1, 2, context=5000)), tmp_path / "new" / "out")
    assert not list(tmp_path.iterdir())
    own = {"on": {"home": "none", "train": {"frozen": ["*.nothing"]}}}
    grid = GridConfig(("on", "AdamW"), baseline="AdamW")
    with pytest.raises(
        ChildProcessError,
        match=r"^1/6 on lr 0\.0015 seed 0: frozen pattern '\*\.nothing' matches no[^;]*; correct that and --resume$",
    ):
        compared(dataclasses.replace(tiny(data), variant=own, compare=grid), tmp_path / "out")
    folder = shutil.copytree(finished[0], tmp_path / "copy")
    with pytest.raises(ValueError, match=r"another configuration.* train\.steps was 6, is 7 now"):
        compared(tiny(data, steps=7), folder, resume=True)


@pytest.mark.slow
def test_killed_in_the_second_stage_it_goes_on_to_the_same_bits(finished, data, tmp_path, monkeypatch):
    """Killed within a run that has a checkpoint, which ends with its comparison; gone on with two jobs."""
    config = tiny(data, lrs=(1e-2,), seeds=(0,), confirm_seeds=(3,))
    (tmp_path / "config.toml").write_text(dump_toml(config.table()))
    out = tmp_path / "out"
    for name in NAMES[2:4]:  # those of the first stage
        shutil.copytree(finished[0] / "runs" / name, out / "runs" / name)
    shutil.copy(finished[0] / "compare.toml", out)
    words = ["compare", str(tmp_path / "config.toml"), "--out", str(out), "--resume"]
    command = [sys.executable, "-m", "symexplin", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        confirming = False
        for line in process.stdout:
            confirming = confirming or line.startswith("to confirm")
            if confirming and "step 4/6" in line:
                process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "comparison.json").exists()
    monkeypatch.setattr(launch, "cores", lambda: 2)
    grid = dataclasses.replace(config.compare, jobs=2)
    comparison = compared(dataclasses.replace(config, compare=grid), out, resume=True)
    assert numbers(comparison) == [run for run in numbers(finished[1]) if run[1] == 1e-2]
    assert bits(out) == {name: content for name, content in bits(finished[0]).items() if "lr0.01-" in name}


@pytest.mark.usefixtures("in_process")
def test_variants_may_have_training_of_their_own_and_resume_from_any_folder(data, tmp_path, monkeypatch):
    own = {"decayed": {"home": "none", "train": {"weight_decay": 0.5}}}
    grid = GridConfig(("AdamW", "decayed"), (1e-3,), (3,), confirm_seeds=(4,))
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    comparison = compared(dataclasses.replace(tiny("data"), variant=own, compare=grid), "out")
    curves = {(run.variant, run.seed): run.curve for run in comparison.runs}
    for seed in (3, 4):
        assert curves["decayed", seed][0] == curves["AdamW", seed][0]
        assert curves["decayed", seed][-1] != curves["AdamW", seed][-1]
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = compared(configured(tmp_path / "out", resume=True), tmp_path / "out", resume=True)
    assert again.runs == comparison.runs


def task_of(config, out):
    kind = Laboratory(config)
    cell = kind.grid.cells()[0]
    task = kind.task("", cell, out / "runs" / cell.name)
    return task, load_toml(out / "processes" / f"{cell.name}.toml")["compute"]


def test_runs_get_their_share_of_the_machine(data, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda: 6)
    here = dataclasses.replace(tiny(data, jobs=2), compute=ComputeConfig())
    task, compute = task_of(here, tmp_path)
    assert (compute["threads"], task.command[1:3]) == (3, ["-m", "symexplin"])
    task, _ = task_of(dataclasses.replace(here, cluster=ClusterConfig(gpus=8)), tmp_path)
    assert (task.command[1:6][-1], task.places) == ("8", 8)


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        ("auto", 2, ("cuda", 2)),
        ("auto", 0, ("cpu", 0)),
        ("cuda", None, ("cuda", 1)),
        ("cpu", None, ("cpu", 0)),
        ("auto", None, "device must be 'cuda' or 'cpu' with cluster 'slurm' and without gpus"),
    ],
)
def test_jobs_ask_for_what_their_device_needs(data, tmp_path, device, gpus, expected):
    """This machine may have no GPU."""
    config = dataclasses.replace(
        tiny(data, cluster="slurm"), compute=ComputeConfig(device=device), cluster=ClusterConfig(gpus=gpus, cpus=5)
    )
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            Laboratory(config)
        return
    task, compute = task_of(config, tmp_path)
    assert (compute["device"], task.cluster.gpus, compute["threads"]) == (*expected, 5)
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert (task.command[1:6] == several) == (gpus == 2)


# --- Commands --------------------------------------------------------------------------------------------------------

PLACES = "{variant} {lr} {seed} {out}"


def grid(*variants, **changes):
    return GridConfig(variants, **{"lrs": (0.1, 0.2), "seeds": (0,), **changes})


def test_a_command_gets_all_digits_of_a_learning_rate_and_other_braces_stay(tmp_path):
    config = Command(sys.executable + """ {variant} {lr} '{"x": {{seed}}} y' {out}""", grid("a", "b"))
    words = config.words(Cell("a", 0.00123456789, 0), tmp_path)
    assert words[1:] == ["a", "0.00123456789", '{"x": {0}} y', str(tmp_path)]


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        ("true 'x {variant} {lr} {out}", {}, "command must be words as for a shell, .* No closing quotation"),
        ("", {}, r"command must have the placeholder \{variant\}, got ''"),
        ("true x {variant} {out}", {}, r"must have the placeholder \{lr\}"),
        ("true x {variant} {lr}", {}, r"must have the placeholder \{out\}"),
        ("true x {variant} {lr} {out}", {"confirm_seeds": (1,)}, r"must have the placeholder \{seed\}"),
        ("A=1 true {variant} {lr} {out}", {}, "must begin with a program that exists, got 'A=1'; no shell runs"),
        *(
            (f"true {PLACES}", {"variants": ("a", name)}, "must be names of folders, without '/'")
            for name in ("../../b", "a\nb")
        ),
    ],
)
def test_a_command_that_cannot_run_is_refused(text, changes, said):
    with pytest.raises(ValueError, match=said):
        Command(text, GridConfig(**{"variants": ("a", "b"), "lrs": (0.1, 0.2), "seeds": (0,), **changes}))


def test_tables_of_settings_say_what_is_compared(tmp_path):
    command = f"true {PLACES}"
    assert isinstance(configured(tmp_path, {"data": "data"}, {"compare": {"lrs": [0.1]}}, resume=True), CompareConfig)
    own = {"command": command, "compare": {"seeds": [1]}}
    assert configured(tmp_path, own, {"compare": {"seeds": [2]}}, resume=False).compare.seeds == (2,)
    with pytest.raises(ValueError, match="unknown key 'train'"):
        configured(tmp_path, own, {"train": {"steps": 3}}, resume=False)
    (tmp_path / "compare.toml").write_text('data = "data"')
    assert configured(tmp_path, {"model": {"width": 8}}, resume=True).data == "data"
    with pytest.raises(ValueError, match="unknown key 'data'"):
        configured(tmp_path, own, resume=True)
    (tmp_path / "compare.toml").write_text("dat")
    with pytest.raises(ValueError, match=r"compare\.toml is not TOML"):
        configured(tmp_path, resume=True)


def test_the_folder_of_a_command_is_absolute_and_stays(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    given = {"command": "true {variant} {lr} {seed} {out}", "cwd": "..", "compare": {"variants": ["a", "b"]}}
    config = configured(tmp_path / "c", given, resume=False)
    assert config.cwd == str(tmp_path)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "compare.toml").write_text(dump_toml(to_table(config)))
    assert configured(tmp_path / "c", {}, resume=True).cwd == str(tmp_path)
    with pytest.raises(ValueError, match=r"cwd must be a folder, got .*none"):
        configured(tmp_path / "d", {**given, "cwd": "none"}, resume=False)
