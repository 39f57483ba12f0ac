import hashlib
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from corpora import in_memory
from symexplin.lab.data.batches import BatchesAhead, BatchLoader, Corpus, eval_batches, read_tokens
from symexplin.lab.data.prepare import PrepareConfig, prepare, write_tokens
from symexplin.lab.data.tokenizer import train_bpe

DOCUMENTS = [f"document {i}: {'text ' * (i % 7)}".encode() for i in range(400)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").write_bytes(b"\0".join(DOCUMENTS))
    prepare(PrepareConfig((str(tmp_path / "text"),), vocab_size=300), tmp_path / "data")
    return tmp_path / "data"


def test_the_fingerprint_tells_data_apart(folder, tmp_path):
    found = {Corpus.load(folder).fingerprint}
    for seed in (0, 1):
        config = PrepareConfig((str(tmp_path / "text"),), tokenizer="byte", seed=seed)
        prepare(config, tmp_path / str(seed))
        found.add(Corpus.load(tmp_path / str(seed)).fingerprint)
    assert len(found) == 3
    assert Corpus.load(folder, verify=False).fingerprint in found
    assert in_memory(DOCUMENTS).fingerprint in found


def test_what_is_no_finished_dataset_or_damaged_is_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data must be a folder that `symexplin prepare` made, got .*nowhere"):
        Corpus.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no dataset.json: run `symexplin prepare SOURCE"):
        Corpus.load(tmp_path)
    whole = (folder / "valid.npy").read_bytes()
    (folder / "valid.npy").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"valid.npy' is damaged"):
        Corpus.load(folder)
    Corpus.load(folder, verify=False)
    train_bpe(DOCUMENTS, 299).save(folder / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer.json' is not the tokenizer of the tokens, 'bpe-300'"):
        Corpus.load(folder)
    for content in ("", '{"tokenizer": {}}'):
        (folder / "dataset.json").write_text(content)
        with pytest.raises(ValueError, match=r"dataset.json' is damaged"):
            Corpus.load(folder)


@pytest.mark.parametrize(("size", "dtype"), [(256, np.uint8), (100_000, np.uint32)])
def test_token_files_are_arrays_of_numpy(tmp_path, size, dtype):
    path = tmp_path / "a.npy"
    expected = np.random.default_rng(0).integers(0, size, 999).astype(dtype)
    count, digest = write_tokens(path, np.array_split(expected, 7), np.dtype(dtype))
    assert count == 999
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
    _, digest = write_tokens(path, [np.arange(20, dtype=np.uint8)], np.dtype(np.uint8))
    whole = path.read_bytes()
    for content in (b"", b"text " * 99, whole[:50], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a.npy' is damaged"):
            read_tokens(path, 20, digest, verify=False)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"a.npy' is damaged"):
        read_tokens(path, 20, "0" * 64)
    with pytest.raises(ValueError, match=r"nowhere' is damaged or missing"):
        read_tokens(tmp_path / "nowhere", 20, digest)


TRAIN_WITHOUT = """
import sys
sys.modules["datasets"] = sys.modules["pyarrow"] = None  # as if they were not installed
from symexplin.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_training_needs_neither_datasets_nor_pyarrow(folder, tmp_path):
    words = ["train", "--data", str(folder), "--out", str(tmp_path / "run"), "--steps", "2", "--width", "16"]
    words += ["--depth", "1", "--heads", "2", "--context", "8", "--batch-size", "2"]
    done = subprocess.run([sys.executable, "-c", TRAIN_WITHOUT, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_batches_are_windows_and_pure_in_seed_and_step():
    tokens = (2**32 - 250 + np.arange(250)).astype(np.uint32)
    loader = BatchLoader(tokens, context=10, batch_size=6, seed=3)
    state = torch.get_rng_state()
    fifth = loader.batch(5)
    loader.batch(0), loader.batch(6), np.random.seed(1)
    assert torch.equal(state, torch.get_rng_state())
    for first, second in zip(fifth, BatchLoader(tokens, 10, 6, seed=3).batch(5), strict=True):
        assert torch.equal(first, second)
        assert first.dtype == torch.int64
        assert first.shape == (6, 10)
    inputs, targets = fifth
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(10))
    assert not torch.equal(inputs, loader.batch(6)[0])
    assert not torch.equal(inputs, BatchLoader(tokens, 10, 6, seed=4).batch(5)[0])


@pytest.mark.parametrize("steps", [(0, 1, 2, 3), (4, 5, 2, 2, 9)])
def test_batches_read_ahead_are_those_of_the_loader(steps):
    loader = BatchLoader(np.arange(250, dtype=np.uint8), context=10, batch_size=6, seed=3)
    ahead = BatchesAhead(loader)
    for step in steps:
        assert all(map(torch.equal, ahead.batch(step), loader.batch(step)))


def test_the_next_batch_is_read_while_one_is_used():
    read, told = threading.Event(), []

    class Loader:
        def batch(self, step):
            told.append((step, threading.current_thread() is threading.main_thread()))
            if step == 1:
                read.set()
            return torch.zeros(1), torch.zeros(1)

    BatchesAhead(Loader()).batch(0)
    assert read.wait(timeout=60)
    assert told == [(0, False), (1, False)]


def test_every_window_can_come_up():
    loader = BatchLoader(np.arange(6, dtype=np.uint8), context=3, batch_size=200)
    assert set(loader.batch(0)[0][:, 0].tolist()) == {0, 1, 2}
    shortest = np.arange(4, dtype=np.uint8)
    inputs, targets = BatchLoader(shortest, 3, 1).batch(0)
    assert inputs.tolist() == [[0, 1, 2]]
    assert torch.equal(eval_batches(shortest, 3, 1, 5)[0][1], targets)


def test_eval_batches_are_disjoint_windows_over_all_tokens():
    tokens = (np.arange(1000) % 251).astype(np.uint8)
    batches = eval_batches(tokens, context=10, batch_size=8, count=4)
    assert [inputs.shape for inputs, _ in batches] == [(8, 10)] * 4
    flat = torch.cat([inputs for inputs, _ in batches])
    assert flat[0, 0] == 0
    assert torch.cat([targets for _, targets in batches])[-1, -1] == tokens[-1]
    again = torch.cat([inputs for inputs, _ in eval_batches(tokens, 10, 8, 4)])
    assert torch.equal(flat, again)
    few = torch.cat([inputs for inputs, _ in eval_batches(np.arange(45, dtype=np.uint8), 10, 8, 4)])
    assert few.shape == (4, 10)
    assert len(few.flatten().unique()) == 40


def test_too_short_a_corpus_is_named():
    corpus = in_memory([b"long enough", b"short"])
    shortest = min(len(corpus.train), len(corpus.valid))
    corpus.check_context(shortest - 1)
    with pytest.raises(ValueError, match=f"context must be below {shortest}.*got {shortest}"):
        corpus.check_context(shortest)
