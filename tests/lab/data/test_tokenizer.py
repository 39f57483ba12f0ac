import hashlib
import json

import numpy as np
import pytest
import tokenizers

from symexplin.lab.data import tokenizer as module
from symexplin.lab.data.tokenizer import Tokenizer, pieces, train_bpe

TEXT = "The quick brown foxes' naïve 日本 jumps;     it's 42 o'clock.\n\n\tlow lower lowest\0 <|endoftext|> é"
DOCUMENTS = [f"{TEXT} {i * i} {'over and over ' * (i % 5)}".encode() for i in range(200)]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(DOCUMENTS, 400)


def encoded(tokenizer, *documents):
    return np.concatenate(list(tokenizer.encode_documents(documents)))


def word_level(*words, special=()):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(special))
    return backend


def test_byte_tokens_are_the_bytes(tmp_path):
    byte = Tokenizer.from_name("byte")
    every = "".join(map(chr, [*range(0x3000), *range(0x1F600, 0x1F650)]))
    for text in (TEXT, every, ""):
        assert byte.encode(text) == list(text.encode())
        assert byte.decode(list(text.encode())) == text
        assert encoded(byte, text.encode(), b"a").tolist() == [*text.encode(), 0, 97, 0]
    assert encoded(byte, b"a").dtype == np.uint8
    assert byte.decode([0xFF, 65]) == "\ufffdA"
    assert (byte.vocab_size, byte.end, byte.name, byte.decode([0])) == (256, 0, "byte", "\0")
    byte.save(tmp_path / "t.json")
    for end_token in (None, byte.end_token):
        assert Tokenizer.load(tmp_path / "t.json", end_token=end_token).end == 0


def test_bpe_is_lossless_and_shorter(bpe):
    assert (bpe.vocab_size, bpe.end, bpe.end_token) == (400, 0, "<|endoftext|>")
    for text in (TEXT, "unseen ßœ \x7f\x80", ""):
        assert bpe.decode(bpe.encode(text)) == text
        assert bpe.end not in bpe.encode(text)  # though TEXT names it
    assert len(bpe.encode(TEXT)) < 0.7 * len(TEXT.encode())
    assert train_bpe([b"ab"], 10_000).vocab_size < 300


def test_documents_are_encoded_one_by_one(bpe):
    expected = [i for d in [*DOCUMENTS, b"", b"bad \xff"] for i in [*bpe.encode(d.decode(errors="replace")), bpe.end]]
    tokens = encoded(bpe, *DOCUMENTS, b"", b"bad \xff")
    assert tokens.tolist() == expected
    assert tokens.dtype == np.uint16


@pytest.mark.parametrize("size", [1, 40])
def test_pieces_have_the_tokens_of_the_whole(bpe, monkeypatch, size):
    document = b"".join(DOCUMENTS)
    parts = list(pieces(document, size))
    assert b"".join(parts) == document
    assert all(len(part) >= size for part in parts[:-1])
    monkeypatch.setattr(pieces, "__defaults__", (size,))
    monkeypatch.setattr(module, "_PIECE", size)
    assert encoded(bpe, document, b"x").tolist() == [*bpe.encode(document.decode()), 0, *bpe.encode("x"), 0]


def test_save_and_load(bpe, tmp_path):
    bpe.save(tmp_path / "t.json")
    loaded = Tokenizer.from_name(str(tmp_path / "t.json"))
    assert loaded.encode(TEXT) == bpe.encode(TEXT)
    assert loaded.name == str(tmp_path / "t.json")
    # Spaces and the order of keys do not count; the tokens do.
    table = json.loads((tmp_path / "t.json").read_text())
    (tmp_path / "t.json").write_text(json.dumps(dict(reversed(table.items())), indent=3))
    canonical = json.dumps(table, sort_keys=True, separators=(",", ":"))
    for tokenizer in (bpe, loaded, Tokenizer.load(tmp_path / "t.json")):
        assert tokenizer.fingerprint == hashlib.sha256(canonical.encode()).hexdigest()
    assert train_bpe(DOCUMENTS, 399).fingerprint != bpe.fingerprint


def test_the_end_of_tokenizer_files(tmp_path):
    path = tmp_path / "t.json"
    word_level("?", "a", special=["[CLS]", "[SEP]"]).save(str(path))
    found = Tokenizer.from_name(str(path))
    assert (found.end_token, found.end, found.vocab_size) == ("[SEP]", 3, 4)
    assert encoded(found, b"a b").tolist() == [1, 0, 3]
    assert Tokenizer.from_name(str(path), end_token="[CLS]").end == 2
    with pytest.raises(ValueError, match=r"has none of \[CSL\]: name a token of it with end_token"):
        Tokenizer.from_name(str(path), end_token="[CSL]")
    word_level("?", "a").save(str(path))
    with pytest.raises(ValueError, match=r"has none of <.endoftext.>.*: name a token of it with end_token"):
        Tokenizer.from_name(str(path))


def test_settings_of_a_file_for_other_uses_are_off(tmp_path):
    backend = word_level("?", "a", special=["</s>"])
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.post_processor = tokenizers.processors.TemplateProcessing("</s> $A </s>", special_tokens=[("</s>", 2)])
    backend.save(str(tmp_path / "t.json"))
    tokenizer = Tokenizer.load(tmp_path / "t.json")
    assert tokenizer.encode("a a a") == [1, 1, 1]
    assert encoded(tokenizer, b"a a a").tolist() == [1, 1, 1, 2]


def test_bad_files_and_names_are_one_line(tmp_path):
    for content in (b"{}", b"\xff", b"not json", b"[1]"):
        (tmp_path / "t.json").write_bytes(content)
        with pytest.raises(ValueError, match="tokenizers library") as caught:
            Tokenizer.load(tmp_path / "t.json")
        assert "\n" not in str(caught.value)
    right = r"tokenizer must be 'byte', 'gpt2', 'bpe', 'hf:NAME' or an existing file.*'bytes'"
    with pytest.raises(FileNotFoundError, match=right):
        Tokenizer.from_name("bytes")


def test_tokenizers_of_models_come_from_the_hub(bpe, tmp_path, monkeypatch):
    bpe.save(tmp_path / "t.json")
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda *arguments: asked.append(arguments) or tmp_path / "t.json"
    )
    tokenizer = Tokenizer.from_name("gpt2")
    assert (tokenizer.name, tokenizer.end_token) == ("gpt2", "<|endoftext|>")
    assert Tokenizer.from_name("hf:some/model").name == "hf:some/model"
    assert asked == [("openai-community/gpt2", "tokenizer.json"), ("some/model", "tokenizer.json")]
