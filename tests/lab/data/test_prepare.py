import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from corpora import in_memory, split
from symexplin.lab.data import prepare as module
from symexplin.lab.data.batches import Corpus
from symexplin.lab.data.prepare import PrepareConfig, prepare

FILES = ["dataset.json", "tokenizer.json", "train.npy", "valid.npy"]


def words(seed):
    random_ = random.Random(seed)
    syllables = ["lo", "wer", "new", "est", "wi", "de", "ing", "un", "ä"]
    return " ".join("".join(random_.choices(syllables, k=random_.randint(1, 4))) for _ in range(40))


DOCUMENTS = [words(seed).encode() for seed in range(120)]


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


def test_byte_tokens_are_those_in_memory(tmp_path, text):
    dataset = prepare(settings(text, tokenizer="byte"), tmp_path / "out")
    expected, found = in_memory(DOCUMENTS), Corpus.load(tmp_path / "out")
    for side in ("train", "valid"):
        np.testing.assert_array_equal(getattr(found, side), getattr(expected, side))
        assert getattr(found, f"{side}_documents") == getattr(expected, f"{side}_documents")
    assert found.fingerprint == expected.fingerprint
    assert dataset["train"]["text_bytes"] == len(expected.train) - expected.train_documents


def test_bpe_tokens_are_those_of_the_split(tmp_path, text):
    lines = []
    dataset = prepare(settings(text), tmp_path / "out", echo=lines.append)
    corpus = Corpus.load(tmp_path / "out")
    for side, expected in zip((corpus.train, corpus.valid), split(DOCUMENTS), strict=True):
        assert corpus.tokenizer.decode(side).split("<|endoftext|>")[:-1] == [text.decode() for text in expected]
    assert (corpus.vocab_size, corpus.tokenizer.name, corpus.train.dtype) == (400, "bpe-400", np.uint16)
    assert dataset == json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert dataset["repeated_documents"] == 7
    assert dataset["bytes_per_token"] == sum(map(len, DOCUMENTS)) / (len(corpus.train) + len(corpus.valid))
    told = f"{corpus.train_documents:,} documents to train on, {corpus.valid_documents} held out, 7 repeated"
    assert told in lines[0]


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


def test_the_sample_of_a_bpe_is_spread_evenly():
    documents = [bytes([65 + i % 26]) * 100 for i in range(1000)]
    for wanted in (1, 33_333, 100_000):
        sample = list(module._spread(documents, 100_000, wanted))
        assert abs(sum(map(len, sample)) - wanted) <= 100
        places = [i for i, d in enumerate(documents) if any(d is s for s in sample)]
        assert np.diff([*places, 1000]).max() <= np.ceil(100_000 / wanted) + 1


@pytest.mark.parametrize(("fraction", "cut"), [(0.05, 19), (0.0, 20), (0.999, 1)])
def test_a_lone_document_is_cut_in_two(tmp_path, fraction, cut):
    text = "0123456789" * 2
    (tmp_path / "text").write_text(f"{text}\0{text}")
    dataset = prepare(settings(tmp_path / "text", valid_fraction=fraction), tmp_path / "out")
    corpus = Corpus.load(tmp_path / "out")
    sides = [corpus.tokenizer.decode(side) for side in (corpus.train, corpus.valid)]
    assert sides == [part + corpus.tokenizer.end_token for part in (text[:cut], text[cut:])]
    assert (dataset["train"]["text_bytes"], dataset["valid"]["text_bytes"]) == (cut, 20 - cut)
    assert dataset["repeated_documents"] == 1


DRIVER = """
import sys
from symexplin.lab.data import prepare as module, tokenizer
tokenizer._PIECE = 100
print("begin", flush=True)
module.prepare(module.PrepareConfig((sys.argv[1],), vocab_size=400), sys.argv[2])
"""


@pytest.mark.slow
def test_killed_again_and_again_it_starts_again(tmp_path, text):
    prepare(settings(text), tmp_path / "whole")
    out, random_ = tmp_path / "out", random.Random(0)
    for name in (".lock", ".unfinished", "tokenizer.json", "train.npy", "valid.npy"):
        with subprocess.Popen([sys.executable, "-c", DRIVER, text, str(out)], stdout=subprocess.PIPE) as driver:
            driver.stdout.readline()
            while not list(out.rglob(name)) and driver.poll() is None:
                time.sleep(0.0005)
            time.sleep(random_.uniform(0, 0.005))
            driver.kill()
        finished = (out / "dataset.json").exists()
        assert finished or not list(out.glob("*.npy")) or (out / ".unfinished").exists()
        if finished:  # faster than the kill
            assert content(out) == content(tmp_path / "whole")
            shutil.rmtree(out)
    prepare(settings(text), out)
    assert content(out) == content(tmp_path / "whole")


def test_an_unfinished_folder_is_made_anew_and_no_data(tmp_path, text, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", lambda *_, **__: None)  # a kill removes nothing
        patch.setattr(module, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(text), tmp_path / "out")
    assert (tmp_path / "out" / ".unfinished" / "valid.npy").exists()
    with pytest.raises(ValueError, match=r"made and finished; .*out' has no dataset.json"):
        Corpus.load(tmp_path / "out")
    prepare(settings(text, vocab_size=300), tmp_path / "out")
    prepare(settings(text, vocab_size=300), tmp_path / "fresh")
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


def test_a_finished_dataset_is_left_as_it_is(tmp_path, text):
    first = prepare(settings(text), tmp_path / "out")
    before = content(tmp_path / "out")
    Path(text).unlink()
    lines = []
    assert prepare(settings(text), tmp_path / "out", echo=lines.append) == first
    assert lines == [f"{tmp_path / 'out'} is finished already"]
    with pytest.raises(ValueError, match=r"out must be new .*vocab_size was 400, is 500 now; seed was 0, is 1 now"):
        prepare(settings(text, vocab_size=500, seed=1), tmp_path / "out")
    assert content(tmp_path / "out") == before


@pytest.mark.usefixtures("text")
def test_a_dataset_lies_outside_its_sources_and_takes_no_folder_of_others(tmp_path):
    for inside in (tmp_path, tmp_path / "out"):
        with pytest.raises(ValueError, match="out must lie outside the sources"):
            prepare(settings(tmp_path), inside)
    with pytest.raises(ValueError, match=r"an earlier dataset, got .* with 'text'"):
        prepare(settings("stdlib"), tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"tokenizer": "nowhere"}, {"valid": ("nowhere",)}, {"sources": ("nowhere.jsonl",)}],
)
def test_a_mistake_leaves_no_folder(tmp_path, text, options, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowhere.jsonl").write_text("{}")
    with pytest.raises((ValueError, FileNotFoundError), match="nowhere"):
        prepare(PrepareConfig(**{"sources": (text,), **options}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": ()}, "sources must name at least one"),
        ({"vocab_size": 256}, "vocab_size must be a whole number >= 257"),
        ({"valid_fraction": 1.0}, r"valid_fraction must be a number in \[0, 1\)"),
        ({"end_token": "x"}, "end_token goes with a tokenizer file, got 'x' with 'bpe'"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PrepareConfig(**{"sources": ("stdlib",), **options})


def test_what_is_left_out_is_told(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one\0two")
    for number in range(4):
        (folder / f"latin{number}.txt").write_bytes("größer".encode("latin1"))
    lines = []
    prepare(settings(folder), tmp_path / "out", echo=lines.append)
    names = ", ".join(str(folder / f"latin{number}.txt") for number in range(3))
    assert f"left out, not UTF-8 text or unreadable, 4 in all: {names}, ..." in lines
