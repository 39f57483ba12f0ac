import hashlib
import os
import signal
import time

import numpy as np
import pytest

from corpora import split
from symexplin.lab.data import tokens as module
from symexplin.lab.data.tokenizer import train_bpe
from symexplin.lab.data.tokens import (
    REPEATED,
    TRAIN,
    VALID,
    cut_in_two,
    encode_shards,
    hash_document,
    read_dataset,
    read_tokens,
    shard_tokens,
    split_documents,
    write_tokens,
)

datasets = pytest.importorskip("datasets")

DOCUMENTS = [f"document {i} of these {i * i}".encode() for i in range(60)]
SIDES = np.array([VALID if i % 5 == 0 else REPEATED if i % 7 == 0 else TRAIN for i in range(60)], np.uint8)
SIZES = np.array(list(map(len, DOCUMENTS)))


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(DOCUMENTS, 300, progress=False)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(module, "_SHARD_BYTES", 400)
    monkeypatch.setattr(module, "_WORKER_BYTES", 150)


def encode(bpe, folder, workers=2):
    rows = datasets.Dataset.from_dict({"text": DOCUMENTS})
    return encode_shards(rows, SIDES, SIZES, bpe, folder, workers)


def sides(documents, held_out=(), fraction=0.05, seed=0):
    together = [*documents, *held_out]
    found = split_documents([hash_document(document, seed) for document in together], len(documents), fraction)
    return [[d for d, side in zip(together, found, strict=True) if side == wanted] for wanted in (TRAIN, VALID)]


@pytest.mark.parametrize(("count", "fraction", "seed"), [(1, 0.5, 0), (2, 0.0, 7), (3, 0.999, 0), (400, 0.05, 7)])
def test_the_rule_of_the_split(count, fraction, seed):
    documents = [f"document {i}: {'text ' * (i % 7)}".encode() for i in range(count)]
    expected = split(documents, fraction, seed)
    assert sides([*documents, *documents[: count // 2]], (), fraction, seed) == expected
    _, grown = sides([*documents, b"another"], (), fraction, seed)
    assert count < 400 or set(expected[1]) <= set(grown)  # a new document does not move the others


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.999])
def test_a_lone_document_is_cut(fraction):
    train, valid = cut_in_two(DOCUMENTS[1], fraction)
    assert train + valid == DOCUMENTS[1]
    assert len(train) == max(1, round(len(DOCUMENTS[1]) * (1 - fraction)))


def test_given_documents_are_held_out():
    assert sides([b"a", b"b", b"a", b"shared"], [b"c", b"shared", b"c"]) == [[b"a", b"b"], [b"c", b"shared"]]
    with pytest.raises(ValueError, match="sources must hold a document that valid does not hold"):
        sides([b"c"], [b"c"])


@pytest.mark.parametrize("workers", [1, 3])
def test_shards_have_the_tokens_of_each_side_in_order(tmp_path, bpe, workers):
    shards = encode(bpe, tmp_path, workers)
    assert len(shards) == -(-SIZES.sum() // 400)
    for side in (TRAIN, VALID):
        found = np.concatenate(list(shard_tokens(shards, side)))
        expected = bpe.encode_documents([d for d, s in zip(DOCUMENTS, SIDES, strict=True) if s == side])
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype == np.uint16


def test_finished_shards_are_kept_and_missing_ones_made_again(tmp_path, bpe):
    expected = [list(shard_tokens(encode(bpe, tmp_path), side)) for side in (TRAIN, VALID)]
    files = sorted(tmp_path.glob("*.arrow"))
    gone = files.pop(1)
    gone.unlink()
    before = [path.stat().st_mtime_ns for path in files]
    shards = encode(bpe, tmp_path, workers=1)  # fewer workers find the shards of more
    assert gone.exists()
    assert [path.stat().st_mtime_ns for path in files] == before
    for side in (TRAIN, VALID):
        np.testing.assert_array_equal(np.concatenate(list(shard_tokens(shards, side))), np.concatenate(expected[side]))


class Signalling:
    """A tokenizer that sends a signal instead of tokens."""

    vocab_size = 300

    def __init__(self, number, parent):
        self.number, self.parent = number, parent

    def encode_documents(self, _):
        os.kill(self.parent or os.getpid(), self.number)
        time.sleep(60)


def test_ctrl_c_is_an_interruption(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            encode(Signalling(signal.SIGINT, os.getpid()), tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_killed_worker_is_an_error(tmp_path):
    with pytest.raises(ChildProcessError, match=r"a worker process was killed.*with fewer workers"):
        encode(Signalling(signal.SIGKILL, None), tmp_path)


@pytest.mark.parametrize(("size", "dtype"), [(256, np.uint8), (100_000, np.uint32)])
def test_token_files_are_arrays_of_numpy(tmp_path, size, dtype):
    path = tmp_path / "a.npy"
    expected = np.random.default_rng(0).integers(0, size, 999).astype(dtype)
    digest = write_tokens(path, np.array_split(expected, 7), 999, np.dtype(dtype))
    assert digest == hashlib.sha256(expected.tobytes()).hexdigest()
    found = read_tokens(path, 999, digest)
    for tokens in (np.load(path), found):
        np.testing.assert_array_equal(tokens, expected, strict=True)
    assert type(found) is np.ndarray
    assert isinstance(found.base, np.memmap)  # the tokens stay on the disk
    assert not found.flags.writeable
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_token_files_are_named(tmp_path):
    path = tmp_path / "a.npy"
    digest = write_tokens(path, [np.arange(20, dtype=np.uint8)], 20, np.dtype(np.uint8))
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):  # in the header a flipped bit may be harmless
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            assert read_tokens(path, 20, digest).tolist() == list(range(20))
        except ValueError as error:
            assert "a.npy' is damaged" in str(error)  # noqa: PT017
    for content in (b"", b"text " * 99, whole[:50], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a.npy' is damaged"):
            read_tokens(path, 20, digest, verify=False)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"a.npy' is damaged"):
        read_tokens(path, 20, "0" * 64)
    with pytest.raises(FileNotFoundError, match=r"no token file at .*nowhere"):
        read_tokens(tmp_path / "nowhere", 20, digest)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.npy"
    path.write_text("old")

    def broken():
        yield np.zeros(9, dtype=np.uint8)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        write_tokens(path, broken(), 99, np.dtype(np.uint8))
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.npy", "old")]


def test_folders_that_are_no_finished_dataset_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data must be a folder that `symexplin prepare` made, got .*nowhere"):
        read_dataset(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no dataset.json: make one with `symexplin prepare SOURCE"):
        read_dataset(tmp_path)
    (tmp_path / ".cache").mkdir()
    with pytest.raises(ValueError, match="is not finished: run the same `symexplin prepare` again"):
        read_dataset(tmp_path)
    (tmp_path / "dataset.json").write_text("{}")
    assert read_dataset(tmp_path) == {}
    (tmp_path / "train.safetensors").write_text("")
    with pytest.raises(ValueError, match="older version: delete it, and run `symexplin prepare` again"):
        read_dataset(tmp_path)
