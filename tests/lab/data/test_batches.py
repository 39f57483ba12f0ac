import dataclasses
import hashlib

import numpy as np
import pytest
import torch

from corpora import in_memory, prepared
from symexplin.lab.data.batches import BatchLoader, Corpus, eval_batches, read_tokens
from symexplin.lab.data.prepare import write_tokens
from symexplin.lab.data.tokenizer import train_bpe


def test_what_is_no_finished_dataset_or_damaged_is_named(data, tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=rf"data must be .*, got '{folder}' without dataset.json"):
            Corpus.load(folder)
    folder = tmp_path / "data"
    prepared(tmp_path)
    assert Corpus.load(folder).fingerprint == Corpus.load(data).fingerprint
    (folder / "valid.npy").write_bytes((folder / "valid.npy").read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"valid.npy' has not the .* tokens of dataset.json"):
        Corpus.load(folder)
    train_bpe([b"text"], 299).save(folder / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer.json' is not the tokenizer of the tokens, 'byte'"):
        Corpus.load(folder)
    for content in ("", '{"tokenizer": {}}'):
        (folder / "dataset.json").write_text(content)
        with pytest.raises(ValueError, match=r"dataset.json' is damaged"):
            Corpus.load(folder)


@pytest.mark.parametrize(("size", "dtype"), [(256, np.uint8), (100_000, np.uint32)])
def test_token_files_are_arrays_of_numpy_on_the_disk(tmp_path, size, dtype):
    path = tmp_path / "a.npy"
    expected = np.random.default_rng(0).integers(0, size, 999).astype(dtype)
    count, digest = write_tokens(path, np.array_split(expected, 7), np.dtype(dtype))
    assert (count, digest) == (999, hashlib.sha256(expected.tobytes()).hexdigest())
    found = read_tokens(path, 999)
    for tokens in (np.load(path), found):
        np.testing.assert_array_equal(tokens, expected, strict=True)
    assert isinstance(found.base, np.memmap)
    assert not found.flags.writeable
    whole = path.read_bytes()
    for content in (b"", b"text " * 99, whole[:50], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a.npy' has not the 999 tokens"):
            read_tokens(path, 999)


def test_batches_are_windows_and_pure_in_seed_and_step():
    tokens = (2**32 - 250 + np.arange(250)).astype(np.uint32)
    loader = BatchLoader(tokens, context=10, batch_size=6, seed=3)
    state = torch.get_rng_state()
    inputs, targets = loader.batch(5)
    loader.batch(0), loader.batch(6), np.random.seed(1)
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, (inputs, targets), BatchLoader(tokens, 10, 6, seed=3).batch(5)))
    assert (inputs.dtype, inputs.shape) == (torch.int64, (6, 10))
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(10))
    assert torch.equal(targets, inputs + 1)
    assert not torch.equal(inputs, loader.batch(6)[0])
    assert not torch.equal(inputs, BatchLoader(tokens, 10, 6, seed=4).batch(5)[0])


def test_the_order_of_the_data_stays():
    """Starts that an earlier version drew: runs of both remain comparable."""
    loader = BatchLoader(np.arange(250, dtype=np.uint8), context=10, batch_size=4, seed=3)
    assert loader.batch(5)[0][:, 0].tolist() == [5, 32, 13, 212]


def test_eval_batches_are_disjoint_windows_over_all_tokens():
    tokens = (np.arange(1000) % 251).astype(np.uint8)
    batches = eval_batches(tokens, context=10, batch_size=8, count=4)
    assert [inputs.shape for inputs, _ in batches] == [(8, 10)] * 4
    assert batches[0][0][0, 0] == 0
    assert batches[-1][1][-1, -1] == tokens[-1]
    few = torch.cat([inputs for inputs, _ in eval_batches(np.arange(45, dtype=np.uint8), 10, 8, 4)])
    assert few.shape == (4, 10)
    assert len(few.flatten().unique()) == 40
    shortest = np.arange(4, dtype=np.uint8)
    inputs, targets = BatchLoader(shortest, 3, 1).batch(0)
    assert inputs.tolist() == [[0, 1, 2]]
    assert torch.equal(eval_batches(shortest, 3, 1, 5)[0][1], targets)


def test_too_short_a_corpus_is_named():
    corpus = in_memory([b"long enough", b"short"])
    shortest = min(len(corpus.train), len(corpus.valid))
    corpus.check_context(shortest - 1)
    with pytest.raises(ValueError, match=f"context must be below {shortest}.*got {shortest}"):
        corpus.check_context(shortest)


def test_a_process_reads_its_rows_alone_of_the_same_batch():
    loader, read = BatchLoader(np.arange(250, dtype=np.uint8), context=10, batch_size=6, seed=3), []

    class Watched(np.ndarray):
        def __getitem__(self, index):
            read.append(index)
            return np.asarray(super().__getitem__(index))

    watched = dataclasses.replace(loader, tokens=loader.tokens.view(Watched))
    for part, whole in zip(watched.batch(5, slice(2, 4)), loader.batch(5), strict=True):
        assert torch.equal(part, whole[2:4])
        assert part.is_contiguous()  # else a GPU gets a copy that is in no pinned memory
    assert [index.shape for index in read] == [(2, 11)]
