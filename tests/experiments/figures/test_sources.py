"""The weights of a run by role, against the files that the run leaves and the public map."""

import shutil

import pytest
import safetensors.torch
import torch

from run_folders import MODEL, trained
from symexplin import functional
from symexplin.experiments.figures import sources as module
from symexplin.experiments.figures.sources import probe
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import Transformer

ROLES = ["q", "k", "v", "o", "gate", "up", "down"]
CURVES = {
    "default": CurveConfig(),
    "absorbed": CurveConfig(preset="absorbed", start="mismatched"),
    "module": CurveConfig(home="module", preset="paper+offset", start="matched"),
}


@pytest.fixture(scope="module")
def folders(data, runs, tmp_path_factory):
    return runs | {name: trained(data, tmp_path_factory.mktemp(name), curve) for name, curve in CURVES.items()}


def of_role(state, role):
    """All matrices of a role in the order of the blocks, flat, from a plain model's tensors."""
    place = "attention" if role in ("q", "k", "v", "o") else "ffn"
    return torch.cat([state[f"blocks.{i}.{place}.{role}.weight"].flatten() for i in range(MODEL.depth)])


def mapped(weights):
    """The map of a role at its raw weights by the public function, in float64."""
    values = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in weights.scales._asdict().items()}
    kappa, delta, beta = (values.pop(name) for name in ("kappa", "delta", "normalizer"))
    options = {"mode": weights.mode, "beta": beta or 1.0, "normalize": beta is None}
    curvature = {"curvature": "absorbed", "beta_tilde": torch.as_tensor(kappa)}
    value = functional.effective(weights.raw.double(), **options, **curvature, **values)
    return value if delta is None else value + delta


@pytest.mark.parametrize("name", ["plain", *CURVES])
def test_the_weights_are_those_that_the_run_leaves_and_the_map_gives(folders, name):
    step, roles = probe(folders[name])
    left = safetensors.torch.load_file(folders[name] / "model.safetensors")
    drawn = Transformer(MODEL, torch.Generator().manual_seed(0)).state_dict()
    assert (step, list(roles)) == (6, ROLES)
    for role, weights in roles.items():
        assert torch.equal(weights.effective, of_role(left, role))
        torch.testing.assert_close(mapped(weights), weights.effective.double(), rtol=2e-5, atol=1e-7)
        assert torch.equal(weights.raw, weights.effective) == (name == "plain")
        places = torch.arange(0, len(weights.raw), 7)
        own = weights.curves(weights.raw[places].double(), places).diagonal()
        torch.testing.assert_close(own, mapped(weights)[places], rtol=1e-12, atol=1e-14)
        # The mismatched start of that preset weakens negative weights alone.
        target = of_role(drawn, role)
        kept = target > (0 if name == "absorbed" else -1)
        torch.testing.assert_close(weights.initial[kept], target[kept], rtol=1e-5, atol=1e-8)
        assert (weights.initial[~kept & (target < -0.01)] > 0.9 * target[~kept & (target < -0.01)]).all()


def test_a_large_model_is_sampled_at_the_same_places(folders, monkeypatch):
    whole = probe(folders["absorbed"])
    monkeypatch.setattr(module, "LIMIT", 700)
    sampled = probe(folders["absorbed"])
    assert 500 < len(sampled.pooled("raw")) <= 750 < len(whole.pooled("raw"))
    for role, weights in sampled.roles.items():
        assert torch.isin(weights.initial, whole.roles[role].initial).all()
        torch.testing.assert_close(mapped(weights), weights.effective.double(), rtol=2e-5, atol=1e-7)


def test_a_run_is_read_wherever_it_trains_from_its_checkpoints(folders, tmp_path):
    folder = shutil.copytree(folders["default"], tmp_path / "run")
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace('device = "cpu"', 'device = "cuda:7"'))
    assert probe(folder).step == 6
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ValueError, match=r"sources must be runs with a checkpoint, got .*run', which has none"):
        probe(folder)
