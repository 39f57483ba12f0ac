import errno
import multiprocessing
import os
import resource
import signal

import numpy as np
import pytest

from symexplin.lab.text.shards import cut_shards, encode_shards, read_shard
from symexplin.lab.text.split import TRAIN, VALID
from symexplin.lab.text.tokenizer import Tokenizer, train_bpe

PAIRS = [(VALID if i % 5 == 0 else TRAIN, f"document {i} of these {i * i}".encode()) for i in range(60)]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe((document for _, document in PAIRS), 300)


def shards(folder, size=200):
    folder.mkdir(exist_ok=True)
    return cut_shards(PAIRS, folder, size)


def test_shards_hold_all_documents_in_order(tmp_path):
    found = list(shards(tmp_path))
    for side in (TRAIN, VALID):
        documents = [document for shard in found for document in shard.documents[side]]
        assert documents == [document for s, document in PAIRS if s == side]
    longest = max(len(document) for _, document in PAIRS)
    assert all(200 <= shard.size < 200 + longest for shard in found[:-1])
    assert len({shard.path for shard in found}) == len(found)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_files_do_not_depend_on_the_workers(tmp_path, bpe, workers):
    done = []
    paths = encode_shards(shards(tmp_path), bpe, workers, done.append)
    assert sum(done) == sum(len(document) for _, document in PAIRS)
    assert paths == sorted(tmp_path.iterdir())
    for side in (TRAIN, VALID):
        tokens = np.concatenate([read_shard(path, side) for path in paths])
        expected = bpe.encode_documents([document for s, document in PAIRS if s == side])
        np.testing.assert_array_equal(tokens, expected)
        assert tokens.dtype == expected.dtype


def test_whole_files_are_kept_and_broken_ones_made_again(tmp_path):
    byte = Tokenizer.from_name("byte")
    paths = encode_shards(shards(tmp_path), byte, 1, int)
    before = [path.read_bytes() for path in paths]
    paths[1].write_bytes(before[1][:-1])
    paths[2].write_bytes(b"")
    paths[3].unlink()
    times = [path.stat().st_mtime_ns for path in (paths[0], *paths[4:])]
    done = []
    assert encode_shards(shards(tmp_path), byte, 1, done.append) == paths
    assert [path.read_bytes() for path in paths] == before
    assert [path.stat().st_mtime_ns for path in (paths[0], *paths[4:])] == times
    assert sum(done) == sum(len(document) for _, document in PAIRS)


def test_a_killed_worker_is_an_error(tmp_path, bpe):
    def kill(_):
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(ChildProcessError, match=r"a worker process was killed.*run again to go on"):
        encode_shards(shards(tmp_path, 1), bpe, 2, kill)
    paths = encode_shards(shards(tmp_path, 1), bpe, 1, int)
    assert len(paths) == len(PAIRS)


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_of_workers_come_out(tmp_path, bpe, workers):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            encode_shards(shards(tmp_path), bpe, workers, int)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []
