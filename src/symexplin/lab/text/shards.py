"""Shards of documents as files of tokens, encoded by worker processes; a shard is a file or is not there."""

import concurrent.futures
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple, cast

import safetensors
import safetensors.numpy

from symexplin.lab.files import replace_file
from symexplin.lab.stop import follow_parent
from symexplin.lab.text.split import SIDES
from symexplin.lab.text.tokenizer import TokenArray, Tokenizer

__all__ = ["Shard", "cut_shards", "encode_shards", "read_shard"]


class Shard(NamedTuple):
    """Consecutive documents of both sides, and the file that their tokens go to."""

    path: Path
    documents: dict[int, list[bytes]]

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(len(document) for side in self.documents.values() for document in side)


def cut_shards(pairs: Iterable[tuple[int, bytes]], folder: Path, size: int) -> Iterator[Shard]:
    """Yield shards of at least `size` bytes of text, the last one less, of documents paired with their sides.

    >>> pairs = [(0, b"aa"), (1, b"b"), (0, b"cc")]
    >>> [(shard.path.name, shard.documents) for shard in cut_shards(pairs, Path("parts"), 3)]
    [('000000.safetensors', {0: [b'aa'], 1: [b'b']}), ('000001.safetensors', {0: [b'cc'], 1: []})]
    """
    number, held = 0, 0
    documents: dict[int, list[bytes]] = {side: [] for side in SIDES}
    for side, document in pairs:
        documents[side].append(document)
        held += len(document)
        if held >= size:
            yield Shard(folder / f"{number:06}.safetensors", documents)
            number, held = number + 1, 0
            documents = {side: [] for side in SIDES}
    if any(documents.values()):
        yield Shard(folder / f"{number:06}.safetensors", documents)


def encode_shards(
    shards: Iterable[Shard], tokenizer: Tokenizer, workers: int, update: Callable[[int], object]
) -> list[Path]:
    """Write the tokens of all shards that have no whole file yet; return the files of all, in order.

    Args:
        shards: read one at a time, a few ahead of the workers.
        tokenizer: of the tokens.
        workers: processes; 1: none but this one. They are spawned: a script needs its main guard.
        update: takes the bytes of text of every shard that is done.

    Raises:
        OSError: the disk is full, ...
        ChildProcessError: a worker was killed.
    """
    paths = []

    def unfinished() -> Iterator[Shard]:
        for shard in shards:
            paths.append(shard.path)
            if _is_whole(shard.path):
                update(shard.size)
            else:
                yield shard

    sizes: Iterator[int]
    if workers == 1:
        sizes = map(functools.partial(_encode, tokenizer), unfinished())
    else:
        sizes = _in_processes(unfinished(), tokenizer, workers)
    for size in sizes:
        update(size)
    return paths


def read_shard(path: Path, side: int) -> TokenArray:
    """Return the tokens of one side of a shard's file."""
    with safetensors.safe_open(path, framework="np") as file:
        return cast(TokenArray, file.get_tensor(SIDES[side]))


def _is_whole(path: Path) -> bool:
    try:
        for side in SIDES:
            read_shard(path, side)
    except (OSError, safetensors.SafetensorError):
        return False
    return True


def _encode(tokenizer: Tokenizer, shard: Shard) -> int:
    tokens = {name: tokenizer.encode_documents(shard.documents[side]) for side, name in SIDES.items()}
    replace_file(shard.path, safetensors.numpy.save(tokens))
    return shard.size


def _in_processes(shards: Iterable[Shard], tokenizer: Tokenizer, workers: int) -> Iterator[int]:
    """Encode shards in `workers` processes, and yield the size of each as it is done."""
    # The tokenizers library starts threads, which a fork would not survive.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (tokenizer,))
    pending: set[concurrent.futures.Future[int]] = set()
    try:
        for shard in shards:
            pending.add(pool.submit(_work, shard))
            if len(pending) == 2 * workers:  # enough for all to go on while the next one is read
                done, pending = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
                yield from (future.result() for future in done)
        yield from (future.result() for future in concurrent.futures.as_completed(pending))
    except BrokenProcessPool:
        raise ChildProcessError(
            "a worker process was killed, for lack of memory perhaps: run again to go on, with fewer workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_tokenizer: Tokenizer


def _start_worker(tokenizer: Tokenizer) -> None:
    global _tokenizer
    _tokenizer = tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core is enough
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    follow_parent()


def _work(shard: Shard) -> int:
    return _encode(_tokenizer, shard)
