import hashlib
import os
import signal
import time

import numpy as np
import pytest

from symexplin.lab.data import tokens as module
from symexplin.lab.data.split import REPEATED, TRAIN, VALID
from symexplin.lab.data.tokenizer import train_bpe
from symexplin.lab.data.tokens import encode_shards, read_dataset, read_tokens, shard_tokens, write_tokens

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


def test_the_environment_is_left_as_it_was(tmp_path, bpe, monkeypatch):
    before = os.environ
    for number, value in enumerate(("true", None)):
        if value:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
        else:
            monkeypatch.delenv("TOKENIZERS_PARALLELISM")
        encode(bpe, tmp_path / str(number))
        assert os.environ is before
        assert os.environ.get("TOKENIZERS_PARALLELISM") == value


class Signalling:
    """A tokenizer that sends a signal instead of tokens."""

    vocab_size = 300

    def __init__(self, number, parent):
        self.number, self.parent = number, parent

    def encode_documents(self, _):
        os.kill(self.parent or os.getpid(), self.number)
        time.sleep(60)


def test_ctrl_c_is_an_interruption(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        encode(Signalling(signal.SIGINT, os.getpid()), tmp_path)


def test_a_killed_worker_is_an_error(tmp_path):
    with pytest.raises(ChildProcessError, match=r"a worker process was killed.*with fewer workers"):
        encode(Signalling(signal.SIGKILL, None), tmp_path)


@pytest.mark.parametrize(("size", "dtype"), [(256, np.uint8), (50_257, np.uint16), (100_000, np.uint32)])
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
