"""What is exported loads as a stock model of transformers, and gives the logits of this one."""

import pytest
import torch

from networks import moved
from symexplin.lab.data.tokenizer import Tokenizer, train_bpe
from symexplin.lab.export import export_transformers
from symexplin.lab.model import ModelConfig, Transformer

transformers = pytest.importorskip("transformers")
BPE = train_bpe([b"the quick brown fox jumps over the lazy dog, don't it? " * 20], 300)
TINY = {"width": 32, "depth": 2, "heads": 2, "vocab_size": BPE.vocab_size, "context": 24, "bias": False}
TOKENS = torch.randint(BPE.vocab_size, (3, 24), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """A connection would be an error, not a wait."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))


def build(dtype=torch.float32, **changes):
    """A model whose norms are not at their start."""
    return moved(Transformer(ModelConfig(**{**TINY, **changes}), torch.Generator().manual_seed(0))).to(dtype)


def stock(folder, **settings):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **settings)
    assert type(model) is transformers.Qwen3ForCausalLM
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize(
    ("dtype", "shape", "close"),
    [(torch.float32, {"tie_head": True, "fused_gate_up": True}, 2e-5), (torch.bfloat16, {}, 0.1)],
)
@torch.no_grad()
def test_logits_are_equal_but_for_rounding(tmp_path, dtype, shape, close):
    model = build(dtype, **shape)
    export_transformers(model, tmp_path / "out", BPE)
    loaded = stock(tmp_path / "out")
    assert loaded.dtype == dtype
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS), rtol=0, atol=close)
    assert float(model(TOKENS).abs().max()) > 0.5


TEXTS = ("the quick fox", "a <|endoftext|> b", "Wörld Ā \n\n  x\0y", "don't , stop .", "")


@pytest.mark.parametrize("ours", [BPE, Tokenizer.from_name("byte")], ids=["bpe", "byte"])
def test_the_tokenizer_is_this_one(tmp_path, ours):
    export_transformers(build(), tmp_path / "out", ours)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert theirs(text)["input_ids"] == theirs.encode(text) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert (theirs.eos_token_id, theirs.eos_token, theirs.model_max_length) == (ours.end, ours.end_token, 24)
    assert theirs.decode([*ours.encode("fox"), ours.end], skip_special_tokens=True) == "fox"
    loaded = stock(tmp_path / "out")
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == ours.end


def test_what_cannot_be_exported_is_named_and_nothing_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match=f"out must be a new or empty folder, got '{place}'"):
            export_transformers(build(), place, BPE)
    for shape in ({"bias": True}, {"norm": "layer"}, {"head_bias": True}, {"input_projection": True}):
        with pytest.raises(ValueError, match=f"model must have {next(iter(shape))} = .*, as Qwen3 has, got "):
            export_transformers(build(**shape), tmp_path / "out", BPE)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
