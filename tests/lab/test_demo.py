import json

import pytest
import torch

from symexplin.lab import demo as module
from symexplin.lab.arms import build_arm
from symexplin.lab.checkpoint import load_model
from symexplin.lab.data import Corpus, eval_batches, file_documents
from symexplin.lab.demo import DemoConfig, claim_folder, run_demo
from symexplin.lab.evaluate import evaluate

FILES = {".symexplin-demo", "summary.json", "report.html", "sample.txt", "model.safetensors", "runs"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(b"\0".join(f"document {i} says {i * i} and {i % 5}".encode() for i in range(80)))
    return str(path)


def tiny(data, **changes):
    shape = {"width": 16, "depth": 1, "heads": 2, "context": 16}
    rest = {"steps": 6, "batch_size": 4, "evaluations": 3, "eval_batches": 2, "sample_length": 20}
    return DemoConfig(**{"data": data, "lrs": (1e-3, 1e-2), **shape, **rest, **changes})


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    lines = []
    return folder, run_demo(folder, tiny(data), echo=lines.append), lines


def test_writes_what_it_promises(finished):
    folder, summary, _ = finished
    assert {path.name for path in folder.iterdir()} == FILES
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert (folder / "sample.txt").read_text() == summary["sample"]["text"] + "\n"
    runs = {path.name: path for path in (folder / "runs").iterdir()}
    assert set(runs) == {"AdamW-lr0.001", "AdamW-lr0.01", "SEL-lr0.001", "SEL-lr0.01"}
    for path in runs.values():
        steps = [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert steps[-1] == 6


def test_ends_with_the_table_and_the_headline(finished):
    _, summary, lines = finished
    text = "\n".join(lines)
    assert "at the shared learning rate" in text
    assert "each at its own best learning rate" in text
    assert all(sentence in text for sentence in summary["headline"])


def test_the_comparison_is_that_of_its_runs(finished):
    _, summary, _ = finished
    losses = {(run["arm"], run["lr"]): run["final_loss"] for run in summary["runs"]}
    best = {arm: min((losses[arm, lr], lr) for lr in (1e-3, 1e-2))[1] for arm in ("AdamW", "SEL")}
    comparison = summary["comparison"]
    assert comparison["shared_lr"] == best["AdamW"]
    assert [row["loss"] for row in comparison["shared"]] == [losses[arm, best["AdamW"]] for arm in best]
    assert [row["loss"] for row in comparison["best"]] == [losses[arm, lr] for arm, lr in best.items()]


def test_every_run_of_an_arm_starts_at_one_model(finished):
    _, summary, _ = finished
    for arm in ("AdamW", "SEL"):
        starts = {run["evals"][0][1] for run in summary["runs"] if run["arm"] == arm}
        assert len(starts) == 1


def test_the_export_is_the_best_curved_model(finished, data):
    folder, summary, _ = finished
    model = load_model(folder / "model.safetensors")
    assert all(type(m) is torch.nn.Linear for m in model.modules() if isinstance(m, torch.nn.Linear))
    corpus = Corpus.from_documents(file_documents(data))
    best = min(run["final_loss"] for run in summary["runs"] if run["arm"] == "SEL")
    assert evaluate(model, eval_batches(corpus.valid, 16, 4, 2)) == best
    assert summary["export"]["bit_equal"] is True


def test_an_export_that_differs_is_an_error(data, tmp_path, monkeypatch):
    def load_another(path):
        model = load_model(path)
        model.head.weight.data[0, 0] += 1e-6
        return model

    monkeypatch.setattr(module, "load_model", load_another)
    with pytest.raises(RuntimeError, match="other logits"):
        run_demo(tmp_path / "out", tiny(data))


def test_a_demo_repeats_exactly_and_may_replace_an_earlier_one(finished, data, tmp_path):
    folder, first, _ = finished
    run_demo(tmp_path, tiny(data, lrs=(5e-3,)))
    second = run_demo(tmp_path, tiny(data))
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert [run["evals"] for run in second["runs"]] == [run["evals"] for run in first["runs"]]
    assert second["sample"] == first["sample"]
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert not (tmp_path / "runs" / "SEL-lr0.005" / "metrics.jsonl").exists()


def test_another_seed_gives_another_run(finished, data, tmp_path):
    other = run_demo(tmp_path, tiny(data, seed=1, lrs=(1e-3,)))
    assert other["runs"][0]["evals"] != finished[1]["runs"][0]["evals"]


def test_a_run_that_breaks_down_is_reported(data, tmp_path, monkeypatch):
    def build(arm, model_config, config, seed):
        built = build_arm(arm, model_config, config, seed)
        if (arm, config.lr) == ("SEL", 1e-2):
            built.model.norm.weight.data.fill_(torch.nan)
        return built

    monkeypatch.setattr(module, "build_arm", build)
    lines = []
    summary = run_demo(tmp_path, tiny(data), echo=lines.append)
    (broken,) = [run for run in summary["runs"] if run["error"]]
    assert (broken["arm"], broken["lr"], broken["final_loss"]) == ("SEL", 1e-2, None)
    assert "norm.weight" in broken["error"]
    assert any("norm.weight" in line for line in lines)
    assert "norm.weight" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("foreign", ["notes.txt", "runs/notes.txt", "runs/a/model.pt", "model.safetensors/x"])
def test_a_folder_with_foreign_files_is_left_alone(tmp_path, foreign):
    path = tmp_path / foreign
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    (tmp_path / ".symexplin-demo").write_text("")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match=f"out must be a new folder.*{path.name}"):
        claim_folder(tmp_path)
    assert path.read_text() == "mine"
    assert (tmp_path / "summary.json").exists()


def test_somebodys_own_model_is_no_earlier_demo(tmp_path):
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(ValueError, match="out must be a new folder or one of an earlier demo"):
        claim_folder(tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "mine"
    assert not (tmp_path / ".symexplin-demo").exists()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="out must be a folder, got the file"):
        claim_folder(tmp_path / "file")


def test_nothing_is_removed_before_the_data_are_read(data, tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(FileNotFoundError):
        run_demo(tmp_path, tiny(str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="context must be below"):
        run_demo(tmp_path, tiny(data, context=5000))
    assert (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ("AdamW", "SLE")}, "arms must be one of .*did you mean 'SEL'"),
        ({"arms": ("SEL",)}, "arms must be 'AdamW' and at least one other"),
        ({"arms": ("AdamW",)}, "at least one other"),
        ({"arms": ("AdamW", "SEL", "SEL")}, "each once"),
        ({"lrs": ()}, "lrs must hold at least one"),
        ({"lrs": (1e-3, -1.0)}, "lrs must be a positive finite number, got -1.0"),
        ({"lrs": (1e-3, 1e-3)}, "lrs must differ"),
        ({"steps": 0}, "steps must be a whole number >= 1, got 0"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"width": 100, "heads": 3}, "width must be a multiple of"),
        ({"warmup": 1.5}, "warmup must be a number in"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        DemoConfig(**changes)
