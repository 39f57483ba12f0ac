"""The folder of a dataset: documents split into two sides and encoded into token files, and those read.

dataset.json          tokenizer, counts, digests and configuration: written last
tokenizer.json        of the `tokenizers` library
train.npy, valid.npy  the tokens, one `numpy` array per side
.cache/               documents and finished shards while the folder is prepared
"""

import contextlib
import functools
import hashlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from symexplin.lab.data.tokenizer import TokenArray, Tokenizer, token_dtype
from symexplin.lab.files import read_json, replacing
from symexplin.validation import check_fraction

__all__ = [
    *("CACHE", "DATASET", "REPEATED", "SIDES", "TOKENIZER", "TRAIN", "VALID"),
    *("cut_in_two", "encode_shards", "hash_document", "read_dataset", "read_tokens"),
    *("rows_per_batch", "shard_tokens", "split_documents", "write_tokens"),
]

DATASET, TOKENIZER, CACHE = "dataset.json", "tokenizer.json", ".cache"
TRAIN, VALID, REPEATED = 0, 1, 2
SIDES = {TRAIN: "train", VALID: "valid"}

_SHARD_BYTES = 1 << 26  # text that a killed preparation encodes again, at most
_WORKER_BYTES = 1 << 22  # less text per process is not worth its start
_BATCH_BYTES = 1 << 20
_GLANCE = 0.2  # seconds between looks at whether the parent is there


def read_dataset(folder: Path) -> dict[str, Any]:
    """Return the content of a finished folder's dataset.json."""
    if not folder.is_dir():
        raise FileNotFoundError(f"data must be a folder that `symexplin prepare` made, got {str(folder)!r}")
    if (folder / "train.safetensors").exists():
        problem = "is of an older version: delete it, and run `symexplin prepare` again"
    elif (folder / DATASET).exists():
        return read_json(folder / DATASET)
    elif (folder / CACHE).exists():
        problem = "is not finished: run the same `symexplin prepare` again to continue"
    else:
        problem = f"has no {DATASET}: make one with `symexplin prepare SOURCE --out FOLDER`"
    raise ValueError(f"data must be a folder that `symexplin prepare` made; {str(folder)!r} {problem}")


# --- the split: a rule on the content of documents alone -------------------------------------------------------------


def hash_document(document: bytes, seed: int) -> int:
    """Return a number in [0, 2**64) that depends on the content and the seed alone."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8, key=str(seed).encode()).digest())


def split_documents(hashes: Sequence[int] | NDArray[np.uint64], given: int, fraction: float) -> NDArray[np.uint8]:
    """Return the side of each document: TRAIN, VALID, or REPEATED for one that does not count.

    The first `given` documents are to be split, the others are held out. Without others, those with the smallest hashes
    are held out: all below `fraction` * 2**64, but at least one, and never all. A document that occurs twice counts
    once, so no text is on both sides.
    """
    check_fraction("valid_fraction", fraction)
    hashes = np.asarray(hashes, np.uint64)
    if not len(hashes):
        raise ValueError("documents must hold at least one, got none")
    sides = np.full(len(hashes), REPEATED, np.uint8)
    train = np.sort(np.unique(hashes[:given], return_index=True)[1])
    if given == len(hashes):
        rank = hashes[train].astype(np.float64) / 2**64
        wanted = max(int((rank < fraction).sum()), 1)
        sides[train] = TRAIN
        sides[train[np.argsort(rank, kind="stable")[: min(wanted, len(train) - 1)]]] = VALID
        return sides
    sides[given + np.unique(hashes[given:], return_index=True)[1]] = VALID
    sides[train[~np.isin(hashes[train], hashes[given:])]] = TRAIN
    if not (sides == TRAIN).any():
        raise ValueError("sources must hold a document that valid does not hold, got none")
    return sides


def cut_in_two(document: bytes, fraction: float) -> tuple[bytes, bytes]:
    """Return both sides of a corpus of one document."""
    place = max(1, round(len(document) * (1 - fraction)))
    return document[:place], document[place:]


# --- encoding --------------------------------------------------------------------------------------------------------


def rows_per_batch(sizes: NDArray[np.int64]) -> int:
    """Return how many documents of these sizes make a batch of about a megabyte."""
    return int(np.clip(_BATCH_BYTES * len(sizes) // max(1, sizes.sum()), 1, 1000))


def encode_shards(
    rows: Any, sides: NDArray[np.uint8], sizes: NDArray[np.int64], tokenizer: Tokenizer, folder: Path, workers: int
) -> list[Any]:
    """Return the tokens of all documents as one `datasets.Dataset` per shard, in order; finished shards are kept.

    `rows` is a `datasets.Dataset` of documents in the column "text"; `sizes` are theirs in bytes. The folder takes one
    file per shard and process.
    """
    from datasets import Features, LargeList, Value

    features = Features(side=Value("uint8"), tokens=LargeList(Value(str(token_dtype(tokenizer.vocab_size)))))
    ends = np.cumsum(sizes)
    cuts = np.searchsorted(ends, np.arange(_SHARD_BYTES, ends[-1], _SHARD_BYTES)) + 1
    ranges = list(pairwise(np.unique([0, *cuts, len(ends)]).tolist()))
    shards = []
    for number, (start, stop) in enumerate(ranges):
        part = sizes[start:stop]
        with _pool_of_datasets():
            shard = rows.select(range(start, stop)).map(
                _encode,
                with_indices=True,
                batched=True,
                batch_size=rows_per_batch(part),
                remove_columns=rows.column_names,
                features=features,
                fn_kwargs={"tokenizer": tokenizer, "sides": sides[start:stop]},
                num_proc=min(workers, len(part), math.ceil(part.sum() / _WORKER_BYTES)),
                cache_file_name=str(folder / f"{number:06}.arrow"),
                load_from_cache_file=True,
                new_fingerprint=f"{number:06}",
                desc=f"tokens, shard {number + 1} of {len(ranges)}",
            )
        shards.append(shard)
    return shards


def _encode(
    batch: dict[str, list[bytes]], rows: Sequence[int], *, tokenizer: Tokenizer, sides: NDArray[np.uint8]
) -> Any:
    """Return a table with one row of tokens per side."""
    import pyarrow

    pairs = list(zip(sides[rows], batch["text"], strict=True))
    arrays = [tokenizer.encode_documents([text for side, text in pairs if side == wanted]) for wanted in SIDES]
    ends = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    tokens = pyarrow.LargeListArray.from_arrays(ends, np.concatenate(arrays))
    return pyarrow.table({"side": pyarrow.array(SIDES, pyarrow.uint8()), "tokens": tokens})


def shard_tokens(shards: Iterable[Any], side: int) -> Iterator[TokenArray]:
    """Yield the tokens of one side of the shards of :func:`encode_shards`, in order."""
    for shard in shards:
        for row, tokens in zip(shard.data.column("side"), shard.data.column("tokens"), strict=True):
            if row.as_py() == side:
                yield tokens.values.to_numpy()


_starting: int | None = None  # this process, while it starts a pool of `datasets`


@contextlib.contextmanager
def _pool_of_datasets() -> Iterator[None]:
    """Let processes forked within end with this one, also when it is killed, and make errors of their pool clear.

    The pool takes no initialiser, and its manager would stay for ever.
    """
    global _starting
    _watch_forks()
    _starting, environment = os.getpid(), os.environ
    try:
        yield
    except Exception as error:  # of datasets.utils.py_utils.iflatmap_unordered
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        if "abruptly died" in str(error):
            raise ChildProcessError(
                "a worker process was killed, for lack of memory perhaps: run again to continue, with fewer workers"
            ) from None
        raise
    finally:
        _starting = None
        os.environ = environment  # noqa: B003 (`datasets` leaves a copy)


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_follow)


def _follow() -> None:
    if _starting is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_with, args=(_starting,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_GLANCE)
    os._exit(1)


# --- token files -----------------------------------------------------------------------------------------------------


def write_tokens(path: Path, arrays: Iterable[TokenArray], count: int, dtype: np.dtype[Any]) -> str:
    """Write `arrays`, `count` tokens in all, as one .npy file, which appears when it is whole; return its sha256."""
    digest = hashlib.sha256()
    dtype = dtype.newbyteorder("<")
    with replacing(path) as temporary, temporary.open("wb") as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, header)
        for array in arrays:
            data = np.ascontiguousarray(array, dtype=dtype).data
            file.write(data)
            digest.update(data)
    return digest.hexdigest()


def read_tokens(path: Path, count: int, sha256: str, *, verify: bool = True) -> TokenArray:
    """Return the tokens of a file of :func:`write_tokens`, mapped into memory; `verify` compares their sha256."""
    try:
        tokens = np.load(path, mmap_mode="r").view(np.ndarray)
        whole = tokens.shape == (count,) and (not verify or hashlib.sha256(tokens.data).hexdigest() == sha256)
    except FileNotFoundError:
        raise FileNotFoundError(f"no token file at {str(path)!r}: run `symexplin prepare` into a new folder") from None
    except Exception:  # of numpy, for a damaged header: of many kinds
        whole = False
    if not whole:
        raise ValueError(
            f"{str(path)!r} is damaged: its tokens are not those of {DATASET} (sha256); run `symexplin prepare` into a "
            "new folder"
        )
    return cast(TokenArray, tokens)
