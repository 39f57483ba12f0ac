import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from symexplin.lab.settings import build, keys, to_table
from symexplin.lab.text import prepare as module
from symexplin.lab.text.corpus import Corpus
from symexplin.lab.text.dataset import PARTS
from symexplin.lab.text.documents import load_documents
from symexplin.lab.text.prepare import PrepareConfig, prepare
from symexplin.lab.text.tokenizer import Tokenizer

FILES = ["dataset.json", "tokenizer.json", "train.safetensors", "valid.safetensors"]


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


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(module, "_SHARD_BYTES", 5000)


def settings(text, **options):
    return PrepareConfig((text,), **{"vocab_size": 400, "workers": 1, **options})


def content(folder):
    """The files of a dataset, and nothing left over beside them."""
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == FILES
    return {name: (folder / name).read_bytes() for name in FILES}


def test_byte_tokens_of_the_standard_library_are_those_in_memory(tmp_path):
    dataset = prepare(PrepareConfig(("stdlib",), tokenizer="byte", workers=1), tmp_path / "out")
    expected, found = Corpus.from_documents(load_documents("stdlib")), Corpus.load(tmp_path / "out")
    for side in ("train", "valid"):
        np.testing.assert_array_equal(getattr(found, side), getattr(expected, side))
        assert getattr(found, f"{side}_documents") == getattr(expected, f"{side}_documents")
    assert found.fingerprint == expected.fingerprint
    assert dataset["train"]["tokens"] == len(expected.train)
    assert dataset["train"]["text_bytes"] == len(expected.train) - expected.train_documents
    assert dataset["bytes_per_token"] == pytest.approx(1, abs=0.001)


def test_bpe_tokens_are_those_of_the_split(tmp_path, text):
    lines = []
    dataset = prepare(settings(text), tmp_path / "out", echo=lines.append)
    corpus, by_bytes = Corpus.load(tmp_path / "out"), Corpus.from_documents(DOCUMENTS)
    assert corpus.decode(corpus.train).split("<|endoftext|>") == by_bytes.decode(by_bytes.train).split("\0")
    assert corpus.decode(corpus.valid).split("<|endoftext|>") == by_bytes.decode(by_bytes.valid).split("\0")
    assert corpus.vocab_size == 400
    assert corpus.train.dtype == np.uint16
    assert dataset == json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert dataset["repeated_documents"] == 7
    size = sum(map(len, DOCUMENTS))
    assert dataset["train"]["text_bytes"] + dataset["valid"]["text_bytes"] == size
    assert dataset["bytes_per_token"] == size / (len(corpus.train) + len(corpus.valid))
    assert (
        f"{corpus.train_documents:,} documents to train on, {corpus.valid_documents} held out, 7 repeated" in lines[0]
    )
    assert f"{len(corpus.train):,} tokens to train on" in lines[1]


def test_bpe_learns_from_the_training_side_alone(tmp_path):
    (tmp_path / "train").write_bytes(b"aaaa bbbb " * 50)
    (tmp_path / "valid").write_bytes(b"zzzz " * 500)
    config = settings(str(tmp_path / "train"), valid=(str(tmp_path / "valid"),))
    prepare(config, tmp_path / "out")
    tokenizer = Corpus.load(tmp_path / "out").tokenizer
    assert len(tokenizer.encode(" bbbb")) == 1
    assert len(tokenizer.encode(" zzzz")) == 5


def test_the_sample_of_a_bpe_is_spread_evenly():
    documents = [bytes([65 + i % 26]) * 100 for i in range(1000)]
    for wanted in (1, 500, 33_333, 100_000):
        sample = list(module._spread(documents, 100_000, wanted))
        assert abs(sum(map(len, sample)) - wanted) <= 100
        places = [i for i, d in enumerate(documents) if any(d is s for s in sample)]
        gaps = np.diff([*places, 1000])
        assert gaps.max() <= np.ceil(100_000 / wanted) + 1


def test_given_documents_are_held_out(tmp_path, text):
    (tmp_path / "valid").write_bytes(DOCUMENTS[3] + b"\0another")
    prepare(settings(text, tokenizer="byte", valid=(str(tmp_path / "valid"),)), tmp_path / "out")
    corpus = Corpus.load(tmp_path / "out")
    assert bytes(corpus.valid) == DOCUMENTS[3] + b"\0another\0"
    assert bytes(corpus.train).split(b"\0")[:-1] == [*DOCUMENTS[:3], *DOCUMENTS[4:]]


def test_a_lone_document_is_cut_in_two(tmp_path):
    (tmp_path / "text").write_bytes(b"0123456789" * 2)
    dataset = prepare(settings(str(tmp_path / "text"), tokenizer="byte"), tmp_path / "out")
    corpus = Corpus.load(tmp_path / "out")
    assert bytes(corpus.train) + bytes(corpus.valid) == b"0123456789012345678\x009\0"
    assert (dataset["train"]["text_bytes"], dataset["valid"]["text_bytes"]) == (19, 1)


def test_a_tokenizer_file_with_its_end(tmp_path, text):
    prepare(settings(text), tmp_path / "first")
    path = str(tmp_path / "first" / "tokenizer.json")
    prepare(settings(text, tokenizer=path, end_token="a"), tmp_path / "out")
    corpus = Corpus.load(tmp_path / "out")
    assert corpus.tokenizer.end == Tokenizer.load(path).encode("a")[0]
    assert corpus.train[-1] == corpus.tokenizer.end
    assert corpus.tokenizer.name == path


def test_any_number_of_workers_gives_the_same_files(tmp_path, text):
    expected = prepare(settings(text), tmp_path / "one")
    assert prepare(settings(text, workers=2), tmp_path / "many") == expected
    assert content(tmp_path / "many") == content(tmp_path / "one")


def killed_at(number, before, config, out):
    """Prepare in a child that kills itself at its rename of that number; return whether it came to that."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == signal.SIGKILL
    replace, done = Path.replace, 0

    def dying(self, target):
        nonlocal done
        done += 1
        if done == number and before:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(self, target)
        if done == number:
            os.kill(os.getpid(), signal.SIGKILL)

    Path.replace = dying
    try:
        prepare(config, out)
    finally:
        os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a fork")
def test_killed_at_every_step_and_resumed_the_files_are_the_same(tmp_path, text):
    prepare(settings(text), tmp_path / "whole")
    expected = content(tmp_path / "whole")
    parts = -(-sum(map(len, DOCUMENTS)) // 5000)
    deaths = 0
    for before in (True, False):
        for number in range(1, 99):
            out = tmp_path / f"out{number}{before}"
            if not killed_at(number, before, settings(text), out):
                assert content(out) == expected
                break
            deaths += 1
            prepare(settings(text), out)
            assert content(out) == expected
    assert deaths >= 2 * (parts + 5)  # the tokenizer, the plan, the shards, two token files, dataset.json


DRIVER = """
import sys
from symexplin.lab.text import prepare as module
if __name__ == "__main__":
    module._SHARD_BYTES = 300
    print("begin", flush=True)
    module.prepare(module.PrepareConfig((sys.argv[1],), vocab_size=400, workers=2), sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc")
def test_killed_with_its_workers_and_resumed_the_files_are_the_same(tmp_path, text, monkeypatch):
    monkeypatch.setattr(module, "_SHARD_BYTES", 300)
    prepare(settings(text), tmp_path / "whole")
    (tmp_path / "driver.py").write_text(DRIVER)
    out = tmp_path / "out"
    driver = subprocess.Popen([sys.executable, str(tmp_path / "driver.py"), text, str(out)])
    while len(list((out / PARTS).glob("*.safetensors"))) < 20 and driver.poll() is None:
        time.sleep(0.001)
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
    assert children
    driver.kill()
    driver.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in children):  # the suite's timeout ends a failure
        time.sleep(0.01)
    assert not (out / "dataset.json").exists()
    finished = {path: path.stat().st_mtime_ns for path in (out / PARTS).glob("*.safetensors")}
    kept = []
    encode = module.encode_shards

    def watched(shards, tokenizer, workers, update):
        paths = encode(shards, tokenizer, workers, update)
        kept.extend(path for path in finished if path.stat().st_mtime_ns == finished[path])
        return paths

    monkeypatch.setattr(module, "encode_shards", watched)
    prepare(settings(text), out)
    assert content(out) == content(tmp_path / "whole")
    assert sorted(kept) == sorted(finished)
    assert len(kept) >= 20


@pytest.mark.parametrize("size", [3000, 20_000])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_line_and_can_be_resumed(tmp_path, text, size, workers, monkeypatch):
    """The limit stops the tokenizer's file at the lower size, else a token file or a shard."""
    monkeypatch.setattr(module, "_SHARD_BYTES", 50_000 if workers == 2 else 5000)
    config = settings(text, workers=workers, tokenizer="byte" if size > 10_000 else "bpe")
    prepare(config, tmp_path / "whole")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(OSError, match=r"File too large; what is finished stays, .*goes on: '.*out'") as caught:
            prepare(config, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert "\n" not in str(caught.value)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.suffix == ".tmp"]
    assert not (tmp_path / "out" / "dataset.json").exists()
    prepare(config, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def begin(config, out, monkeypatch):
    """A preparation that failed after its shards."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_tokens", lambda *_, **__: (_ for _ in ()).throw(RuntimeError))
        with pytest.raises(RuntimeError):
            prepare(config, out)
    assert (out / PARTS).is_dir()


def test_another_configuration_or_text_is_refused(tmp_path, text, monkeypatch):
    out = tmp_path / "out"
    begin(settings(text), out, monkeypatch)
    with pytest.raises(
        ValueError, match=r"prepared otherwise: vocab_size was 400, now 500; seed was 0, now 1 .*delete"
    ):
        prepare(settings(text, vocab_size=500, seed=1), out)
    whole = Path(text).read_bytes()
    Path(text).write_bytes(whole + b"\0more")
    with pytest.raises(ValueError, match="prepared otherwise: text_digest was '"):
        prepare(settings(text), out)
    Path(text).write_bytes(whole)
    tokenizer = (out / "tokenizer.json").read_text()
    (out / "tokenizer.json").write_text(tokenizer.replace('"dropout":null', '"dropout":0.5'))
    with pytest.raises(ValueError, match="prepared otherwise: tokenizer_digest was '"):
        prepare(settings(text), out)
    (out / "tokenizer.json").write_text(tokenizer)
    monkeypatch.setattr(module, "_SHARD_BYTES", 4000)
    with pytest.raises(ValueError, match="prepared otherwise: shard_bytes was 5000, now 4000"):
        prepare(settings(text), out)
    monkeypatch.setattr(module, "_SHARD_BYTES", 5000)
    prepare(settings(text, workers=2), out)
    with pytest.raises(ValueError, match="prepared otherwise: tokenizer was 'bpe', now 'byte'"):
        prepare(settings(text, tokenizer="byte"), out)


def test_a_finished_dataset_is_left_as_it_is(tmp_path, text):
    first = prepare(settings(text), tmp_path / "out")
    before = content(tmp_path / "out")
    Path(text).unlink()
    lines = []
    assert prepare(settings(text), tmp_path / "out", echo=lines.append) == first
    assert lines == [f"{tmp_path / 'out'} is finished already"]
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize(
    "options", [{"sources": ("nowhere",)}, {"tokenizer": "nowhere"}, {"valid": ("nowhere",)}, {"split": ""}]
)
def test_a_mistake_leaves_no_folder(tmp_path, text, options):
    with pytest.raises((ValueError, OSError), match=r"nowhere|must not be empty"):
        prepare(PrepareConfig(**{"sources": (text,), **options}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": ()}, "sources must name at least one"),
        ({"vocab_size": 256}, "vocab_size must be a whole number >= 257"),
        ({"bpe_bytes": 0}, "bpe_bytes must be a whole number >= 1"),
        ({"valid_fraction": 1.0}, r"valid_fraction must be a number in \[0, 1\)"),
        ({"seed": -1}, "seed must be a whole number >= 0"),
        ({"workers": 0}, "workers must be a whole number >= 1"),
        ({"text_key": ""}, "text_key must not be empty"),
        ({"end_token": "x"}, "end_token goes with a tokenizer file, got 'x' with 'bpe'"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PrepareConfig(**{"sources": ("stdlib",), **options})


def test_every_setting_is_documented_and_survives_a_table():
    assert all(key.help for key in keys(PrepareConfig))
    config = PrepareConfig(("a", "b"), end_token="x", tokenizer="file", workers=3)
    assert build(PrepareConfig, to_table(config)) == config


def test_the_environment_is_left_as_it_was(tmp_path, text, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    prepare(settings(text), tmp_path / "out")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    prepare(settings(text), tmp_path / "again")
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_files_left_out_are_told(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"text number {number}")
    (folder / "latin.txt").write_bytes("größer".encode("latin1"))
    lines = []
    prepare(PrepareConfig((str(folder),), tokenizer="byte"), tmp_path / "out", echo=lines.append)
    assert f"left out as not UTF-8 text, 1 in all: {folder / 'latin.txt'}" in lines


def test_a_text_too_short_for_its_vocabulary_is_told(tmp_path, text):
    lines = []
    prepare(PrepareConfig((str(text),), vocab_size=60_000, workers=1), tmp_path / "out", echo=lines.append)
    assert any("not the 60,000 asked for" in line for line in lines)
