"""What is exported loads as a stock model of transformers, and gives the logits of this one."""

import sys

import pytest
import tokenizers
import torch
from safetensors import safe_open

import symexplin as sel
from symexplin.lab.data.tokenizer import Tokenizer, train_bpe
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.weights.export import export_transformers
from symexplin.lab.weights.inspect import inspect_file

transformers = pytest.importorskip("transformers")
BPE = train_bpe([b"the quick brown fox jumps over the lazy dog, don't it? " * 20], 300, progress=False)
TINY = {"width": 32, "depth": 2, "heads": 2, "vocab_size": BPE.vocab_size, "context": 24, "bias": False}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """A connection would be an error, not a wait."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))


def build(dtype=torch.float32, **changes):
    """A model whose norms are not at their start, with logits well apart."""
    model = Transformer(ModelConfig(**{**TINY, **changes}), torch.Generator().manual_seed(0)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.data.mul_(1.5)
    return model


def stock(folder, **settings):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **settings)
    assert type(model) is transformers.Qwen3ForCausalLM
    assert not any(info.values()), info
    return model


TOKENS = torch.randint(BPE.vocab_size, (3, 24), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("dtype", "shape", "attention"),
    [
        (torch.float32, {}, "eager"),
        (torch.float64, {"tie_head": True}, "sdpa"),
        (torch.float32, {"fused_gate": True}, "sdpa"),
    ],
)
@torch.no_grad()
def test_logits_are_equal_but_for_rounding(tmp_path, dtype, shape, attention):
    model = build(dtype, **shape)
    report = export_transformers(model, tmp_path / "out")
    loaded = stock(tmp_path / "out", attn_implementation=attention)
    assert loaded.dtype == dtype
    # transformers rounds angles, norms and softmax to float32 whatever the dtype.
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS), rtol=0, atol=2e-5)
    assert 0 < report["largest_difference"] < 2e-5
    assert report["largest_logit"] > 0.5


@torch.no_grad()
def test_only_rounding_differs(tmp_path, monkeypatch):
    """With our angles, and norms in float64, the stock model gives the logits to float64's precision."""
    model = build(torch.float64)
    export_transformers(model, tmp_path / "out")
    loaded = stock(tmp_path / "out", attn_implementation="sdpa")
    cos, sin = (torch.cat((table, table), dim=-1)[None] for table in (model.cos, model.sin))
    loaded.model.rotary_emb.forward = lambda _, positions: (cos[:, positions[0]], sin[:, positions[0]])
    kind = type(loaded.model.norm)
    exact = torch.nn.functional.rms_norm
    monkeypatch.setattr(kind, "forward", lambda self, x: exact(x, x.shape[-1:], self.weight, self.variance_epsilon))
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_bfloat16_stays_bfloat16(tmp_path):
    model = build(torch.bfloat16)
    report = export_transformers(model, tmp_path / "out")
    loaded = stock(tmp_path / "out")
    assert report["dtype"] == "bfloat16"
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, model.blocks[1].ffn.up.weight)
    assert report["largest_difference"] < 2e-5  # the weights are the same; computed in float32 the logits are, too


@torch.no_grad()
def test_generation_is_greedy_decoding_by_this_model(tmp_path):
    model = build()
    tokens = TOKENS[:1, :5]
    for _ in range(12):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    BPE.save(tmp_path / "t.json")
    ended = int(tokens[0, 9])
    name = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json")).id_to_token(ended)
    export_transformers(model, tmp_path / "out", Tokenizer.load(tmp_path / "t.json", end_token=name))
    loaded = stock(tmp_path / "out")
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones(1, 5)}
    assert loaded.generate(tokens[:, :5], eos_token_id=None, **options).tolist() == tokens.tolist()
    short = loaded.generate(tokens[:, :5], **options)
    assert short[0].tolist() == tokens[0, : tokens[0, 5:].tolist().index(ended) + 6].tolist()


TEXTS = ("the quick fox", "a <|endoftext|> b", "Wörld Ā \n\n  x\0y", "don't , stop .", "")


@pytest.mark.parametrize("name", ["bpe", "byte"])
def test_the_tokenizer_is_this_one(tmp_path, name):
    ours = BPE if name == "bpe" else Tokenizer.from_name("byte")
    report = export_transformers(build(), tmp_path / "out", ours)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert theirs(text)["input_ids"] == theirs.encode(text) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert (theirs.eos_token_id, theirs.eos_token, theirs.model_max_length) == (ours.end, ours.end_token, 24)
    assert theirs.decode([*ours.encode("fox"), ours.end], skip_special_tokens=True) == "fox"
    loaded = stock(tmp_path / "out")
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == ours.end
    assert report["files"] == sorted(path.name for path in (tmp_path / "out").iterdir())


def test_a_tokenizer_that_adds_tokens_and_an_end_of_another_name(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "one": 1, "stop": 2, "?": 3}, "?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    export_transformers(build(), tmp_path / "out", Tokenizer(backend.to_str(), "mine", "stop"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("one one one")["input_ids"] == [1, 1, 1]
    assert theirs.eos_token == "stop"
    bare = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert bare.encode("one one one").ids == [1, 1, 1]


def test_the_file_has_the_map_of_the_training(tmp_path):
    config, lines = sel.preset("paper", beta=5, exclude=("blocks.0.*",)), []
    (tmp_path / "out").mkdir()
    export_transformers(build(), tmp_path / "out", trained_with=config, echo=lines.append)
    found = inspect_file(tmp_path / "out")
    assert found.config == sel.preset("paper", beta=5).resolve(16)  # the patterns are for other names
    assert len(found.rows) == 14
    assert "largest difference of a logit" in lines[-1]
    export_transformers(build(), tmp_path / "plain")
    with safe_open(tmp_path / "plain" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode != 0o40700
    assert stock(tmp_path / "out").config.architectures == ["Qwen3ForCausalLM"]


def test_models_that_have_no_stock_architecture(tmp_path):
    with pytest.raises(ValueError, match=r"no biases.*--no-bias"):
        export_transformers(build(bias=True), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_another_model(tmp_path):
    with pytest.raises(ValueError, match=f"tokenizer must have at most the model's 100 tokens, got {BPE.vocab_size}"):
        export_transformers(build(vocab_size=100), tmp_path / "out", BPE)
    assert not (tmp_path / "out").exists()


def test_folders_with_files_are_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match=f"out must be a new or empty folder, got '{place}'"):
            export_transformers(build(), place)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("symexplin.lab.weights.export.write_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        export_transformers(build(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_without_transformers_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"^export needs transformers: pip install 'symexplin\[hf\]'$"):
        export_transformers(build(), tmp_path / "out")
