import json
from pathlib import Path

import numpy as np
import pytest

from corpora import TEXTS, in_memory, split
from symexplin.lab.data import prepare as module
from symexplin.lab.data.batches import Corpus
from symexplin.lab.data.prepare import PrepareConfig, prepare

FILES = ["dataset.json", "tokenizer.json", "train.npy", "valid.npy"]


DOCUMENTS = [text.encode() for text in TEXTS]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\0".join([*DOCUMENTS, *DOCUMENTS[:7]]))
    return str(path)


def settings(*sources, **options):
    return PrepareConfig(tuple(map(str, sources)), **{"vocab_size": 400, **options})


def content(folder):
    """The files of a dataset, and nothing left over beside them."""
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == FILES
    return {name: (folder / name).read_bytes() for name in FILES}


def test_tokens_are_those_of_the_split(tmp_path, text):
    lines, expected = [], in_memory(DOCUMENTS)
    dataset = prepare(settings(text, tokenizer="byte"), tmp_path / "byte")
    found = Corpus.load(tmp_path / "byte")
    for side in ("train", "valid"):
        np.testing.assert_array_equal(getattr(found, side), getattr(expected, side))
        assert getattr(found, f"{side}_documents") == getattr(expected, f"{side}_documents")
    assert found.fingerprint == expected.fingerprint
    assert dataset["train"]["text_bytes"] == len(expected.train) - expected.train_documents

    dataset = prepare(settings(text), tmp_path / "bpe", echo=lines.append)
    found = Corpus.load(tmp_path / "bpe")
    for side, documents in zip((found.train, found.valid), split(DOCUMENTS), strict=True):
        assert found.tokenizer.decode(side).split("<|endoftext|>")[:-1] == [text.decode() for text in documents]
    assert (found.vocab_size, found.tokenizer.name, found.train.dtype) == (400, "bpe-400", np.uint16)
    assert dataset == json.loads((tmp_path / "bpe" / "dataset.json").read_text())
    assert f"{found.valid_documents} held out, 7 repeated" in lines[0]

    Path(text).unlink()  # a finished dataset stays as it is
    before = content(tmp_path / "bpe")
    assert prepare(settings(text), tmp_path / "bpe") == dataset
    with pytest.raises(ValueError, match=r"out must be .*vocab_size was 400, is 500 now; seed was 0, is 1 now"):
        prepare(settings(text, vocab_size=500, seed=1), tmp_path / "bpe")
    assert content(tmp_path / "bpe") == before


def test_the_bytes_of_token_files_stay(tmp_path):
    """The digests of an earlier version: prepared folders and runs on them stay comparable."""
    (tmp_path / "text").write_bytes(b"\0".join(b"%d and %d" % (i, i * i) for i in range(300)))
    found = [prepare(settings(tmp_path / "text", tokenizer=kind), tmp_path / kind) for kind in ("byte", "bpe")]
    digests = [data[side]["sha256"][:12] for data in found for side in ("train", "valid")]
    assert digests == ["2cc6886d27be", "35ea90eae994", "3511eb7e2fa1", "8bdb5078fcad"]


def test_bpe_learns_from_the_training_side_alone(tmp_path):
    (tmp_path / "train").write_bytes(b"aaaa bbbb " * 50)
    (tmp_path / "valid").write_bytes(b"zzzz " * 500)
    lines = []
    config = settings(tmp_path / "train", valid=(str(tmp_path / "valid"),))
    prepare(config, tmp_path / "out", echo=lines.append)
    tokenizer = Corpus.load(tmp_path / "out").tokenizer
    assert (len(tokenizer.encode(" bbbb")), len(tokenizer.encode(" zzzz"))) == (1, 5)
    assert any("not the 400 asked for" in line for line in lines)
    assert not any("is held out, not" in line for line in lines)  # given documents are no share


def test_the_sample_of_a_bpe_is_spread_evenly():
    documents = [bytes([65 + i % 26]) * 100 for i in range(1000)]
    for wanted in (1, 33_333, 100_000):
        sample = list(module._spread(documents, 100_000, wanted))
        assert abs(sum(map(len, sample)) - wanted) <= 100
        places = [i for i, d in enumerate(documents) if any(d is s for s in sample)]
        assert np.diff([*places, 1000]).max() <= np.ceil(100_000 / wanted) + 1


@pytest.mark.parametrize(("fraction", "told"), [(0.1, True), (0.2, False)])
def test_a_share_far_from_the_one_asked_for_is_told(tmp_path, fraction, told):
    """One of four documents is held out in both cases."""
    (tmp_path / "text").write_text("\0".join(f"document {i}" for i in range(4)))
    lines = []
    prepare(settings(tmp_path / "text", valid_fraction=fraction, tokenizer="byte"), tmp_path / "out", echo=lines.append)
    assert any(f"25.0% of the text is held out, not {fraction:.1%}: " in line for line in lines) == told


@pytest.mark.parametrize(("fraction", "cut"), [(0.05, 19), (0.0, 20), (0.999, 1)])
def test_a_lone_document_is_cut_in_two(tmp_path, fraction, cut):
    text = "0123456789" * 2
    (tmp_path / "text").write_text(f"{text}\0{text}")
    dataset = prepare(settings(tmp_path / "text", valid_fraction=fraction), tmp_path / "out")
    corpus = Corpus.load(tmp_path / "out")
    sides = [corpus.tokenizer.decode(side) for side in (corpus.train, corpus.valid)]
    assert sides == [part + corpus.tokenizer.end_token for part in (text[:cut], text[cut:])]
    assert (dataset["train"]["text_bytes"], dataset["valid"]["text_bytes"]) == (cut, 20 - cut)


def test_an_unfinished_folder_is_made_anew_and_no_data(tmp_path, text, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", lambda *_, **__: None)  # a kill removes nothing
        patch.setattr(module, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(text), tmp_path / "out")
    assert (tmp_path / "out" / ".unfinished" / "valid.npy").exists()
    with pytest.raises(FileNotFoundError, match=r"has finished, got .*out' without dataset.json"):
        Corpus.load(tmp_path / "out")
    prepare(settings(text, vocab_size=300), tmp_path / "out")
    prepare(settings(text, vocab_size=300), tmp_path / "fresh")
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokenizer": "nowhere"}, "nowhere"),
        ({"valid": ("nowhere",)}, "source of text must be 'stdlib', .*got 'nowhere'"),
        ({"valid": ("blank",)}, "source of text must have at least one document, got 'blank'"),
        ({"sources": ("nowhere.jsonl",)}, "nowhere"),
        ({"sources": (".",)}, "out must lie outside the sources"),
        ({"sources": ()}, "sources must name at least one"),
        ({"vocab_size": 256}, "vocab_size must be a whole number >= 257"),
        ({"end_token": "x"}, "end_token is for a tokenizer file, got 'x' with 'bpe'"),
    ],
)
def test_a_mistake_is_named_and_leaves_no_folder(tmp_path, text, options, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowhere.jsonl").write_text("{}")
    (tmp_path / "blank").write_text(" ")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        prepare(PrepareConfig(**{"sources": (text,), **options}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
