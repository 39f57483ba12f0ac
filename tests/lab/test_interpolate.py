"""An old text beside the new one, and weights between the first and the last."""

import dataclasses
import json

import pytest

from corpora import TEXTS, prepared
from run_folders import MODEL, trained
from symexplin.lab.config import ComputeConfig, LogConfig, RunConfig, TrainConfig
from symexplin.lab.data.batches import Corpus, eval_batches
from symexplin.lab.evaluate import evaluate
from symexplin.lab.files import read_json_lines
from symexplin.lab.folders import INTERPOLATED
from symexplin.lab.interpolate import SHARES
from symexplin.lab.maps import CurveConfig
from symexplin.lab.run import train
from symexplin.lab.weights.files import load_model

NEW = [text.upper() for text in TEXTS]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    old, new = prepared(folder / "old", TEXTS), prepared(folder / "new", NEW)
    trained(old, folder / "base", CurveConfig(home="none"))
    return folder, old, new


def config_of(places, curve, **changes):
    folder, old, new = places
    schedule = {"steps": 6, "batch_size": 4, "warmup_steps": 2, "lr": 1e-2, "eval_every": 2, "eval_batches": 2}
    return RunConfig(
        new,
        MODEL,
        TrainConfig(**schedule, weights=str(folder / "base"), **changes),
        curve,
        ComputeConfig(device="cpu", threads=1, autocast="off"),
        LogConfig(tensorboard=False, old=old),
    )


CASES = {
    "AdamW": (CurveConfig(home="none"), {}),
    "LoRA": (CurveConfig(home="none"), {"lora_rank": 2}),
    "optimizer": (CurveConfig(map={"mode": "mismatch", "beta": 8.0}), {}),
    "module": (CurveConfig(home="module"), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_the_saved_weights_and_of_their_means(places, case, tmp_path):
    curve, changes = CASES[case]
    config = config_of(places, curve, **changes)
    train(config, tmp_path / "run", progress=False)
    last = [record for record in read_json_lines(tmp_path / "run/metrics.jsonl") if "eval_loss" in record][-1]
    found = json.loads((tmp_path / "run" / INTERPOLATED).read_text())
    assert list(found) == [f"{share:g}" for share in SHARES]
    first, model = (load_model(folder / "model.safetensors") for folder in (places[0] / "base", tmp_path / "run"))
    ends = {name: value.clone() for name, value in model.state_dict().items()}
    for name, folder in (("old_loss", places[1]), ("eval_loss", places[2])):
        batches = eval_batches(Corpus.load(folder).valid, MODEL.context, 4, 2)
        model.load_state_dict(ends)
        assert evaluate(model, batches) == pytest.approx(last[name], rel=1e-5)
        model.load_state_dict({key: (first.state_dict()[key] + value) / 2 for key, value in ends.items()})
        assert evaluate(model, batches) == pytest.approx(found["0.5"][name], rel=1e-5)
    assert last["old_loss"] != last["eval_loss"]


def config_with(config, **changes):
    return dataclasses.replace(config, log=dataclasses.replace(config.log, **changes))


def test_other_tokens_are_refused(places, tmp_path):
    folder, _, new = places
    other = prepared(folder / "bpe", TEXTS, tokenizer="bpe", vocab_size=300)
    config = config_with(config_of((folder, other, new), CASES["AdamW"][0]))
    with pytest.raises(ValueError, match="old must have the tokens of data, byte, got"):
        train(config, tmp_path / "run", progress=False)
