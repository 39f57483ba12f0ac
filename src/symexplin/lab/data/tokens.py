"""The folder of a dataset: documents encoded into token files, and those read.

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
from tqdm import tqdm

from symexplin.lab.data.split import SIDES
from symexplin.lab.data.tokenizer import TokenArray, Tokenizer, token_dtype
from symexplin.lab.files import read_json, replacing

__all__ = [
    "CACHE",
    "DATASET",
    "TOKENIZER",
    "encode_shards",
    "read_dataset",
    "read_tokens",
    "rows_per_batch",
    "shard_tokens",
    "token_file",
    "write_tokens",
]

DATASET, TOKENIZER, CACHE = "dataset.json", "tokenizer.json", ".cache"

_SHARD_BYTES = 1 << 26  # text that a killed preparation encodes again, at most
_WORKER_BYTES = 1 << 22  # less text per process is not worth its start
_BATCH_BYTES = 1 << 20
_CHUNK = 1 << 24
_BAR_FROM = 1 << 30
_THREADS = "TOKENIZERS_PARALLELISM"
_GLANCE = 0.2  # seconds between looks at whether the parent is there


def token_file(folder: Path, side: str) -> Path:
    """Return the path of the tokens of "train" or "valid"."""
    return folder / f"{side}.npy"


def read_dataset(folder: Path) -> dict[str, Any]:
    """Return the content of a finished folder's dataset.json.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: a folder that is not prepared, not finished, or of an older version.
    """
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


# --- encoding --------------------------------------------------------------------------------------------------------


def rows_per_batch(sizes: NDArray[np.int64]) -> int:
    """Return how many documents of these sizes make a batch of about a megabyte.

    >>> rows_per_batch(np.full(10, 2**18)), rows_per_batch(np.full(10, 2**30)), rows_per_batch(np.ones(10, np.int64))
    (4, 1, 1000)
    """
    return int(np.clip(_BATCH_BYTES * len(sizes) // max(1, sizes.sum()), 1, 1000))


def encode_shards(
    rows: Any, sides: NDArray[np.uint8], sizes: NDArray[np.int64], tokenizer: Tokenizer, folder: Path, workers: int
) -> list[Any]:
    """Return the tokens of all documents as one `datasets.Dataset` per shard, in order; finished shards are kept.

    Args:
        rows: a `datasets.Dataset` of documents in the column "text".
        sides: of the documents.
        sizes: of the documents in bytes.
        tokenizer: of the tokens.
        folder: takes one file per shard and process.
        workers: most processes to use.

    Raises:
        OSError: the disk is full, ...
        ChildProcessError: a worker process was killed.
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
    _starting, environment, threads = os.getpid(), os.environ, os.environ.get(_THREADS)
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
        os.environ = environment  # noqa: B003 (`datasets` leaves a copy, and threads off)
        os.environ.pop(_THREADS, None)
        os.environ.update({} if threads is None else {_THREADS: threads})


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
    """Write `arrays`, `count` tokens in all, as one .npy file, which appears when it is whole; return its sha256.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     digest = write_tokens(Path(folder, "a.npy"), [np.arange(3), np.arange(2)], 5, np.dtype(np.uint8))
    ...     read_tokens(Path(folder, "a.npy"), 5, digest).tolist()
    [0, 1, 2, 0, 1]
    """
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


def read_tokens(path: Path, count: int, sha256: str, *, verify: bool = True, progress: bool = True) -> TokenArray:
    """Return the tokens of a file of :func:`write_tokens`, mapped into memory and read-only.

    Args:
        path: of the file.
        count: number of tokens.
        sha256: of the tokens.
        verify: read the whole file and compare its sha256.
        progress: show a bar on a terminal where that takes more than a second or two.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of file, or a damaged one.
    """
    try:
        tokens = np.load(path, mmap_mode="r").view(np.ndarray)
        whole = tokens.shape == (count,) and not (verify and _digest(tokens, path.name, progress) != sha256)
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


def _digest(tokens: NDArray[Any], name: str, progress: bool) -> str:
    digest = hashlib.sha256()
    # disable=None: no bar where standard error is not a terminal.
    disable = None if progress and tokens.nbytes >= _BAR_FROM else True
    with tqdm(total=tokens.nbytes, desc=f"verify {name}", unit="B", unit_scale=True, disable=disable) as bar:
        for chunk in np.array_split(tokens, math.ceil(tokens.nbytes / _CHUNK) or 1):
            digest.update(chunk.data)
            bar.update(chunk.nbytes)
    return digest.hexdigest()
