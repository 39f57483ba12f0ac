import dataclasses
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch

from run_folders import MODEL, trained
from symexplin import functional
from symexplin.lab.folders import CONFIG
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import Transformer
from symexplin.lab.report import probe as module
from symexplin.lab.report.figures import map_lines
from symexplin.lab.report.probe import probe, read_run

ROLES = ["q", "k", "v", "o", "gate", "up", "down"]
CURVES = {
    "AdamW": CurveConfig(home="none"),
    "frozen": CurveConfig(),
    "learned": CurveConfig(preset="paper"),
    "absorbed": CurveConfig(preset="absorbed"),
    "module": CurveConfig(home="module", preset="paper+offset", start="matched"),
}


@pytest.fixture(scope="module")
def folders(data, tmp_path_factory):
    return {name: trained(data, tmp_path_factory.mktemp(name), curve) for name, curve in CURVES.items()}


def pooled(state, role):
    """All matrices of a role in the order of the blocks, flat, from a plain model's tensors."""
    place = "attention" if role in ("q", "k", "v", "o") else "ffn"
    return torch.cat([state[f"blocks.{i}.{place}.{role}.weight"].flatten() for i in range(MODEL.depth)])


def mapped(weights, raw, pick=slice(None)):
    """The map of a role by the public function, in float64."""
    form, scales = weights.form, weights.scales
    values = {k: v[pick].double() if isinstance(v, torch.Tensor) else v for k, v in scales._asdict().items()}
    kappa, delta = values.pop("kappa"), values.pop("delta")
    value = functional.effective(
        raw.double(),
        mode=form.mode,
        beta=form.beta,
        curvature="absorbed",
        beta_tilde=torch.as_tensor(kappa),
        normalize=form.normalize,
        **values,
    )
    return value if delta is None else value + delta


@pytest.mark.parametrize("name", CURVES)
def test_the_weights_are_those_that_the_run_leaves(folders, name):
    found = probe(read_run(folders[name]))
    left = safetensors.torch.load_file(folders[name] / "model.safetensors")
    assert found.step == 6
    assert list(found.roles) == ROLES
    for role, weights in found.roles.items():
        assert weights.total == len(weights.effective) == pooled(left, role).numel()
        assert torch.equal(weights.effective, pooled(left, role))
        assert (weights.raw is None) == (name == "AdamW")


@pytest.mark.parametrize("name", [name for name in CURVES if name != "AdamW"])
def test_raw_weights_and_scales_give_the_effective_weights(folders, name):
    for weights in probe(read_run(folders[name])).roles.values():
        torch.testing.assert_close(mapped(weights, weights.raw), weights.effective.double(), rtol=2e-5, atol=1e-7)
        assert not torch.equal(weights.raw, weights.effective)


@pytest.mark.parametrize("name", ["AdamW", "frozen", "module"])
def test_the_start_is_the_draw_of_the_seed(folders, name):
    drawn = Transformer(MODEL, torch.Generator().manual_seed(0)).state_dict()
    for role, weights in probe(read_run(folders[name])).roles.items():
        torch.testing.assert_close(weights.initial, pooled(drawn, role), rtol=1e-5, atol=1e-8)


def test_a_mismatched_start_weakens_negative_weights_alone(folders):
    drawn = Transformer(MODEL, torch.Generator().manual_seed(0)).state_dict()
    for role, weights in probe(read_run(folders["learned"])).roles.items():
        target = pooled(drawn, role)
        torch.testing.assert_close(weights.initial[target > 0], target[target > 0], rtol=1e-5, atol=1e-8)
        assert (weights.initial[target < -0.01] > 0.9 * target[target < -0.01]).all()


def test_a_large_role_is_sampled_at_the_same_places(folders, monkeypatch):
    whole = probe(read_run(folders["learned"]))
    monkeypatch.setattr(module, "LIMIT", 100)
    run = read_run(folders["learned"])
    found, again = probe(run), probe(run)
    for role, weights in found.roles.items():
        assert weights.total == whole.roles[role].total > 100
        assert 50 < len(weights.raw) == len(weights.initial) <= 100
        assert torch.isin(weights.initial, whole.roles[role].initial).all()
        torch.testing.assert_close(mapped(weights, weights.raw), weights.effective.double(), rtol=2e-5, atol=1e-7)
        assert torch.equal(weights.raw, again.roles[role].raw)


@pytest.mark.parametrize("name", ["learned", "module"])
def test_the_line_of_a_map_is_that_of_its_positions(folders, name):
    weights = probe(read_run(folders[name])).roles["q"]
    _, line = map_lines(weights)
    assert float(line.x[-1]) == -float(line.x[0]) == float(weights.raw.abs().max())
    for i in (0, 30, 80):
        values = mapped(weights, line.x[i].expand(len(weights.raw))).numpy()
        wanted = np.percentile(values, [5, 50, 95])
        found = [float(edge[i]) for edge in (line.band[0], line.y, line.band[1])]
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def copied(folder, to):
    shutil.copytree(folder, to, dirs_exist_ok=True)
    return to


def test_a_run_without_checkpoints_shows_what_it_left(folders, tmp_path):
    folder = copied(folders["frozen"], tmp_path)
    shutil.rmtree(folder / "checkpoints")
    found, whole = probe(read_run(folder)), probe(read_run(folders["frozen"]))
    assert found.step == 6
    for role, weights in found.roles.items():
        assert torch.equal(weights.effective, whole.roles[role].effective)
        assert weights.raw is weights.scales is None
    (folder / "model.safetensors").unlink()
    assert probe(read_run(folder)) is None


def test_a_damaged_checkpoint_is_passed_over(folders, tmp_path):
    folder = copied(folders["learned"], tmp_path)
    path = folder / "checkpoints/step-00000006/optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    lines = []
    assert probe(read_run(folder), lines.append).step == 4
    assert ["step-00000006 is damaged: optimizer.safetensors" in line for line in lines] == [True]


def test_a_run_trained_elsewhere_is_read_here(folders, tmp_path):
    folder = copied(folders["frozen"], tmp_path)
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(text.replace('device = "cpu"', 'device = "cuda:7"'))
    assert probe(read_run(folder)).step == 6


def test_the_records_of_a_run(folders, tmp_path):
    run = read_run(folders["learned"])
    assert [record["step"] for record in run.updates] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in run.evaluations] == [0, 2, 4, 6]
    assert [record["step"] for record in run.timing] == [0, 2, 4, 6]
    assert (run.step, run.summary["steps"]) == (6, 6)
    assert run.config.model == dataclasses.replace(MODEL, vocab_size=256)
    folder = copied(folders["learned"], tmp_path)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines[:2], lines[2][:9] + "\n", *lines[3:6]]))
    told = []
    damaged = read_run(folder, told.append)
    assert ["line 3" in text for text in told] == [True]
    assert [record["step"] for record in damaged.evaluations] == [0, 2]
    (folder / "timing.jsonl").unlink()
    assert read_run(folder).timing == []
    (folder / "run.json").write_text("[]")
    with pytest.raises(ValueError, match=r"run.json.*JSON object"):
        read_run(folder)
    with pytest.raises(FileNotFoundError, match="config must be an existing TOML file"):
        read_run(tmp_path / "none")
