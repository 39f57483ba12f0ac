import numpy as np
import pytest
import torch

from symexplin.lab.data import (
    BatchLoader,
    Corpus,
    eval_batches,
    file_documents,
    load_documents,
    stdlib_documents,
)

DOCUMENTS = [f"document {i}: {'text ' * (i % 7)}".encode() for i in range(400)]


def split(tokens):
    return bytes(tokens).split(b"\0")[:-1]


def test_stdlib_is_python_sources_without_tests():
    documents = stdlib_documents()
    assert documents == stdlib_documents()
    assert len(documents) > 100
    for document in documents:
        document.decode("utf-8")
    text = b"\0".join(documents)
    assert b"class OrderedDict(dict)" in text  # collections
    assert b"def _parse_isoformat_date" in text  # datetime
    assert b"class TestCaseWithALongName" not in text
    assert not any(b"from test import support" in document[:2000] for document in documents)


def test_file_is_split_at_nul(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"one\0two\0\0 \n\0three")
    assert file_documents(path) == [b"one", b"two", b"three"]
    assert load_documents(str(path)) == [b"one", b"two", b"three"]


def test_folder_in_order_of_paths_without_binary_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    assert file_documents(tmp_path) == [b"first", b"second"]


def test_missing_and_empty_data_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data must be 'stdlib' or an existing file or folder.*nowhere"):
        load_documents(str(tmp_path / "nowhere"))
    (tmp_path / "blank").write_text(" \n")
    for path in (tmp_path, tmp_path / "blank"):
        with pytest.raises(ValueError, match="at least one document"):
            load_documents(str(path))
    with pytest.raises(ValueError, match="documents must hold at least one"):
        Corpus.from_documents([])


def test_split_is_a_partition_of_about_a_twentieth():
    corpus = Corpus.from_documents(DOCUMENTS)
    train, valid = split(corpus.train), split(corpus.valid)
    assert set(train).isdisjoint(valid)
    assert sorted(train + valid) == sorted(DOCUMENTS)
    assert train == [d for d in DOCUMENTS if d in set(train)]
    assert (corpus.train_documents, corpus.valid_documents) == (len(train), len(valid))
    # 400 fair draws at 5 %: 20 +- 4.4; five deviations either side.
    assert 0 < len(valid) < 42


def test_split_depends_on_content_and_seed_alone():
    corpus = Corpus.from_documents(DOCUMENTS)
    shuffled = Corpus.from_documents(DOCUMENTS[::-1])
    assert set(split(corpus.valid)) == set(split(shuffled.valid))
    assert set(split(corpus.valid)) != set(split(Corpus.from_documents(DOCUMENTS, seed=1).valid))
    # A new document does not move the others to the other side.
    grown = Corpus.from_documents([*DOCUMENTS, b"another"])
    assert set(split(corpus.valid)) <= set(split(grown.valid))


def test_repeated_documents_do_not_leak():
    corpus = Corpus.from_documents([b"same", b"same", b"other"])
    assert sorted(split(corpus.train) + split(corpus.valid)) == [b"other", b"same"]


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.999])
@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_both_sides_get_something(count, fraction):
    corpus = Corpus.from_documents(DOCUMENTS[:count], valid_fraction=fraction)
    assert min(corpus.train_documents, corpus.valid_documents) >= 1
    if count > 1:
        assert corpus.train_documents + corpus.valid_documents == count
    else:
        assert bytes(corpus.train[:-1]) + bytes(corpus.valid[:-1]) == DOCUMENTS[0]


def test_decode_inverts_utf8():
    corpus = Corpus.from_documents(["naïve ünïcode".encode(), b"b"])
    texts = {corpus.decode(corpus.train), corpus.decode(corpus.valid)}
    assert texts == {"naïve ünïcode\0", "b\0"}
    assert corpus.train.dtype == np.uint8


def test_batches_are_windows_and_pure_in_seed_and_step():
    tokens = np.arange(250, dtype=np.uint8)
    loader = BatchLoader(tokens, context=10, batch_size=6, seed=3)
    fifth = loader.batch(5)
    loader.batch(0), loader.batch(6)
    for first, second in zip(fifth, BatchLoader(tokens, 10, 6, seed=3).batch(5), strict=True):
        assert torch.equal(first, second)
        assert first.dtype == torch.int64
        assert first.shape == (6, 10)
    inputs, targets = fifth
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(10))
    assert not torch.equal(inputs, loader.batch(6)[0])
    assert not torch.equal(inputs, BatchLoader(tokens, 10, 6, seed=4).batch(5)[0])


def test_batches_ignore_and_leave_the_global_generators():
    loader = BatchLoader(np.arange(250, dtype=np.uint8), context=10, batch_size=6)
    np.random.seed(0)
    state = torch.get_rng_state()
    first = loader.batch(0)[0]
    assert torch.equal(state, torch.get_rng_state())
    np.random.seed(1)
    assert torch.equal(first, loader.batch(0)[0])


def test_every_window_can_come_up():
    loader = BatchLoader(np.arange(6, dtype=np.uint8), context=3, batch_size=200)
    assert set(loader.batch(0)[0][:, 0].tolist()) == {0, 1, 2}


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


@pytest.mark.parametrize("length", [0, 9, 10])
def test_too_short_a_corpus_is_named(length):
    tokens = np.zeros(length, dtype=np.uint8)
    for call in (lambda: BatchLoader(tokens, 10, 1), lambda: eval_batches(tokens, 10, 1, 1)):
        with pytest.raises(ValueError, match=f"context must be below {length}.*got 10"):
            call()
    corpus = Corpus.from_documents([b"long enough " * 9, b"short"])
    with pytest.raises(ValueError, match="context must be below"):
        corpus.check_context(50)


def test_the_shortest_corpus_serves():
    tokens = np.arange(11, dtype=np.uint8)
    inputs, targets = BatchLoader(tokens, 10, 1).batch(0)
    assert torch.equal(inputs[0], torch.arange(10))
    assert torch.equal(eval_batches(tokens, 10, 1, 5)[0][1], targets)
