"""Every command as a user gives it, on a small text, each in a process of its own where that matters."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from corpora import TEXTS
from symexplin import cli
from symexplin.lab.weights.files import load_model

TINY = (
    *("--width", "32", "--depth", "1", "--heads", "2", "--context", "16", "--steps", "6", "--batch-size", "4"),
    *("--eval-every", "3", "--no-tensorboard"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, its tokens and a run without biases in each home."""
    folder = tmp_path_factory.mktemp("walk")
    (folder / "mytext").mkdir()
    for index, text in enumerate(TEXTS):
        (folder / "mytext" / f"{index}.txt").write_text(text)
    data = str(folder / "data")
    assert cli.main(["prepare", str(folder / "mytext"), "--out", data, "--vocab-size", "400"]) == 0
    for home in ("optimizer", "module"):
        arguments = ["--data", data, "--out", str(folder / home), "--no-bias", "--home", home, "--preset", "paper"]
        assert cli.main(["train", *arguments, *TINY]) == 0
    return folder


def run(capsys, *arguments):
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_sample_writes_the_prompt_and_more_and_the_same_again(place, capsys):
    words = ("sample", place / "optimizer", "--prompt", "document 3", "--length", "20", "--top-k", "50")
    text = run(capsys, *words)
    assert text.startswith("document 3")
    assert len(text) > len("document 3\n")
    assert run(capsys, *words) == text
    assert run(capsys, *words, "--seed", "1") != text


def test_an_exported_folder_loads_in_transformers_with_equal_logits(place, capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    run(capsys, "export", place / "optimizer", "--out", tmp_path / "mymodel")
    found, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mymodel", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "mymodel")
    tokens = tokenizer("document 3 says 9", return_tensors="pt").input_ids
    ours = load_model(place / "optimizer" / "model.safetensors")
    with torch.no_grad():
        # transformers computes the angles of positions in float32; see lab/weights/export.py.
        torch.testing.assert_close(found(tokens[:, :16]).logits, ours(tokens[:, :16]), rtol=1e-4, atol=1e-4)


def test_a_model_with_biases_is_not_exported(place, capsys, tmp_path):
    data = str(place / "data")
    assert cli.main(["train", "--data", data, "--out", str(tmp_path / "run"), *TINY]) == 0
    capsys.readouterr()
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "mymodel")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--no-bias" in line
    assert not (tmp_path / "mymodel").exists()


def test_files_go_into_curved_space_and_back(place, capsys, tmp_path):
    plain, raw, back = (tmp_path / name for name in ("plain", "raw", "back"))
    plain.write_bytes((place / "optimizer" / "model.safetensors").read_bytes())
    text = run(capsys, "invert", plain, raw, "--preset", "paper", "--map", "beta=5")
    assert "largest difference" in text
    with safe_open(raw, "pt") as file:
        assert "blocks.0.ffn.up.raw_weight" in file.keys()  # noqa: SIM118
        assert json.loads(file.metadata()["symexplin_map"])["beta"] == 5.0
    assert "7 matrices and 0 biases folded" in run(capsys, "fold", raw, back)
    first, second = load_model(plain), load_model(back)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_checkpoint_of_the_module_home_folds_to_the_final_weights(place, capsys, tmp_path):
    (checkpoint,) = (place / "module" / "checkpoints").iterdir()
    run(capsys, "fold", checkpoint / "model.safetensors", tmp_path / "plain")
    expected = load_model(place / "module" / "model.safetensors")
    for a, b in zip(load_model(tmp_path / "plain").parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


def test_inspect_prints_writes_and_draws(place, capsys, tmp_path):
    file = place / "optimizer" / "model.safetensors"
    text = run(capsys, "inspect", file, "--json", tmp_path / "tails.json", "--figures", tmp_path / "tails")
    assert "blocks.0.ffn.up" in text
    rows = json.loads((tmp_path / "tails.json").read_text())["rows"]
    weight = load_model(file).blocks[0].ffn.up.weight.detach().double()
    (row,) = [row for row in rows if row["name"] == "blocks.0.ffn.up.weight"]
    assert row["max"] == pytest.approx(weight.abs().max().item())
    assert row["std"] == pytest.approx(weight.std(correction=0).item(), rel=1e-3)
    for name in ("weight_distribution", "heavy_tail"):
        assert (tmp_path / "tails" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_report_prints_its_path(place, capsys):
    assert run(capsys, "report", place / "optimizer").strip() == str(place / "optimizer" / "report.html")
    assert "<svg" in (place / "optimizer" / "report.html").read_text()


def test_a_file_and_flags_make_one_configuration(place, capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        f'data = "{place / "data"}"\n[model]\nwidth = 32\ndepth = 1\nheads = 2\ncontext = 16\n'
        '[train]\nsteps = 50\nbatch_size = 4\n[sel]\npreset = "paper"\n'
        "map = { e.k = [10, 2] }\n[log]\ntensorboard = false\n"
    )
    text = run(capsys, "train", file, "--out", tmp_path / "run", "--steps", "3", "--map", "beta=5")
    assert "steps = 3," in text
    assert "beta = 5" in text
    assert "k = [10.0, 2.0]" in text
    assert cli.main(["train", "--out", str(tmp_path / "run"), "--resume", "--lr", "0.5"]) == 2
    assert "train.lr is 0.003 there, 0.5 now" in capsys.readouterr().err
    assert "has finished already" in run(capsys, "train", "--out", tmp_path / "run", "--resume")


def test_compare_trains_arms_of_ones_own(place, capsys, tmp_path):
    arms = (
        "--arms",
        "AdamW",
        "mine",
        "--arm",
        "mine.preset=frozen",
        "mine.map.beta=5",
        "--lrs",
        "1e-2",
        "--seeds",
        "0",
    )
    text = run(capsys, "compare", "--data", place / "data", "--out", tmp_path / "c", *arms, *TINY)
    assert "mine" in text
    assert {path.name for path in (tmp_path / "c" / "runs").iterdir()} == {"AdamW-lr0.01-seed0", "mine-lr0.01-seed0"}
    assert (tmp_path / "c" / "report.html").exists()


def test_bench_prints_tables_and_refuses_a_second_time(capsys, tmp_path):
    words = ("bench", "--out", tmp_path / "b", "--parts", "optimizer", "--widths", "16", "--depths", "1")
    tiny = ("--context", "8", "--vocab-size", "16", "--repeats", "1", "--device", "cpu")
    text = run(capsys, *words, *tiny)
    assert "optimizer bf16: width 16, depth 1" in text
    assert (tmp_path / "b" / "results.csv").exists()
    assert cli.main([str(word) for word in (*words, *tiny)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "earlier measurement" in line


@pytest.mark.parametrize(
    ("arguments", "fetched", "instead"),
    [
        (("prepare", "openwebtext", "--out", "x"), "openwebtext", "local"),
        (("prepare", "hf:nobody/nothing", "--out", "x"), "nobody/nothing", "local"),
        (("prepare", "stdlib", "--tokenizer", "gpt2", "--out", "x"), "gpt2", "local"),
    ],
)
def test_without_a_network_one_line_says_what_would_be_fetched(tmp_path, arguments, fetched, instead):
    """A proxy that does not exist is no network, also where there is one."""
    pytest.importorskip("datasets")
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-m", "symexplin", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        cwd=tmp_path,
        env={**os.environ, **nowhere},
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert fetched in line
    assert instead in line
    assert not (tmp_path / "x").exists()
