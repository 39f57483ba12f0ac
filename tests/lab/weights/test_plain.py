import hashlib
import shutil

import pytest
import torch

import symexplin as sel
from run_folders import prepared, trained
from symexplin.lab.checkpoint import newest
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.weights.files import MODEL, save_model
from symexplin.lab.weights.plain import digest_of, find_weights, load_plain, start_from

TINY = ModelConfig(width=16, depth=1, heads=2, context=16)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose checkpoints hold raw weights, and whose final weights are plain."""
    folder = tmp_path_factory.mktemp("plain")
    return trained(prepared(folder / "data"), folder / "run", CurveConfig(home="module", preset="paper"), TINY)


def test_a_path_means_the_final_weights_else_those_of_the_newest_checkpoint(run, tmp_path):
    file = run / MODEL
    assert find_weights(run) == find_weights(str(file)) == file
    checkpoint = newest(run)[0]
    assert find_weights(checkpoint) == checkpoint / MODEL
    unfinished = shutil.copytree(run, tmp_path / "run")
    (unfinished / MODEL).unlink()
    assert find_weights(unfinished) == newest(unfinished)[0] / MODEL
    shutil.rmtree(unfinished / "checkpoints")
    with pytest.raises(ValueError, match=r"weights must be .*, got .*run', which has no weights yet"):
        find_weights(unfinished, "weights")
    with pytest.raises(FileNotFoundError, match=r"path must be .*, got .*nowhere', which is not there"):
        find_weights(tmp_path / "nowhere")


def test_raw_weights_are_folded(run):
    """Those of the last checkpoint are the final ones."""
    final, last = load_plain(run / MODEL), load_plain(newest(run)[0] / MODEL)
    for name, wanted in final.state_dict().items():
        torch.testing.assert_close(last.state_dict()[name], wanted, rtol=1e-6, atol=1e-7)
    assert not any(isinstance(module, sel.SELLinear) for module in last.modules())


def test_a_model_starts_from_the_weights_of_its_shape_and_no_other(run):
    model = Transformer(ModelConfig(width=16, depth=1, heads=2, context=8, init="xavier_normal"))
    start_from(model, run)
    assert torch.equal(model.head.weight, load_plain(run / MODEL).head.weight)
    assert model.config.context == 8
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for changes, here, there in (
        ({"width": 32, "bias": False}, "width 32, bias False", "width 16, bias True"),
        ({"depth": 2}, "depth 2", "depth 1"),
        ({"vocab_size": 300}, "vocab_size 300", "vocab_size 256"),
        ({"tie_head": True}, "tie_head True", "tie_head False"),
    ):
        other = Transformer(ModelConfig(**{"width": 16, "depth": 1, "heads": 2, "context": 16, **changes}))
        with pytest.raises(
            ValueError, match=f"weights must be those of a model with {here}, got .* of one with {there}$"
        ):
            start_from(other, run)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_digest_is_that_of_the_file(run, tmp_path):
    assert digest_of(str(run)) == hashlib.sha256((run / MODEL).read_bytes()).hexdigest()
    save_model(Transformer(TINY, torch.Generator().manual_seed(1)), tmp_path / MODEL)
    assert digest_of(tmp_path) != digest_of(run)
    with pytest.raises(FileNotFoundError, match="weights must be the folder of a run or a model's file"):
        digest_of(tmp_path / "nowhere")
