"""From sources of text to a folder of tokens; a preparation that was killed continues where it was.

The folder has the files that `symexplin.lab.data.batches` reads. While it is prepared, .cache/ holds all documents and
the tokens of finished shards.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from symexplin.lab.data.batches import CACHE, DATASET, SIDES, TOKENIZER, read_dataset
from symexplin.lab.data.sources import LeftOut, cut_in_two, find_sources, hash_document, split_documents
from symexplin.lab.data.tokenizer import MINIMUM_VOCAB, TokenArray, Tokenizer, pieces, token_dtype, train_bpe
from symexplin.lab.files import read_json, replacing, write_json
from symexplin.lab.folders import check_resumable, claimed
from symexplin.lab.provenance import cores
from symexplin.validation import check_fraction, check_whole

__all__ = ["PrepareConfig", "prepare", "write_tokens"]

Echo = Callable[[str], None]
Table = dict[str, Any]

_CONFIG = "config.json"
_ROWS_IN_MEMORY = 100  # documents that are held before they are written
_BATCH_BYTES = 1 << 20  # text that a thread encodes at a time
_SHARD_BYTES = 1 << 25  # text that a killed preparation encodes again, at most


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare, and how.

    Args:
        sources: where the text comes from: "stdlib" (or its "stdlib-code" or "stdlib-docs" alone), files, folders,
            "hf:NAME[:CONFIG]", "openwebtext", "fineweb".
        tokenizer: "bpe" to train one on the text, "byte", "gpt2", "hf:NAME" (of a model on the hub), or the path of a
            `tokenizers` JSON file.
        vocab_size: tokens of a BPE trained here.
        bpe_bytes: text that a BPE is trained on, in bytes, evenly spread over the training documents.
        end_token: of a tokenizer file, the token that ends documents; left out: the first usual name in its vocabulary.
        valid: sources of the documents to hold out, instead of a split of `sources`.
        valid_fraction: share of the documents to hold out; at least one is, and a lone one is cut in two.
        split: of Hugging Face datasets.
        text_key: key of JSON lines and column of datasets that holds the text.
        seed: of the split.
        workers: threads that encode text; left out: one per core. The result is the same for any number.

    """

    sources: tuple[str, ...]
    tokenizer: str = "bpe"
    vocab_size: int = 8192
    bpe_bytes: int = 100_000_000
    end_token: str | None = None
    valid: tuple[str, ...] = ()
    valid_fraction: float = 0.05
    split: str = "train"
    text_key: str = "text"
    seed: int = 0
    workers: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        if not self.sources:
            raise ValueError("sources must name at least one source of text, got none")
        for name in ("sources", "valid"):  # "text/" and "text" are one folder
            object.__setattr__(self, name, tuple(source.rstrip("/") or source for source in getattr(self, name)))
        check_whole("vocab_size", self.vocab_size, minimum=MINIMUM_VOCAB)
        check_whole("bpe_bytes", self.bpe_bytes)
        check_fraction("valid_fraction", self.valid_fraction)
        check_whole("seed", self.seed, minimum=0)
        if self.workers is not None:
            check_whole("workers", self.workers)
        if self.end_token is not None and self.tokenizer in ("bpe", "byte", "gpt2"):
            raise ValueError(f"end_token goes with a tokenizer file, got {self.end_token!r} with {self.tokenizer!r}")


def prepare(config: PrepareConfig, out: str | Path, *, echo: Echo = lambda _: None, progress: bool = True) -> Table:
    """Write the dataset of `config` into the folder `out`, and return the content of its dataset.json.

    A preparation that was interrupted at any moment continues when it is called again, with the same files in the end,
    bit for bit. A finished one stays as it is. During the work a copy of the text lies in `out`.
    """
    for source in (*config.sources, *config.valid):
        if source and Path(source).is_dir() and Path(out).resolve().is_relative_to(Path(source).resolve()):
            raise ValueError(f"out must lie outside the sources, got {str(out)!r} in {source!r}")
    # As JSON gives it back; the number of workers changes nothing.
    table = json.loads(json.dumps(dataclasses.asdict(dataclasses.replace(config, workers=None))))
    with claimed(out, "dataset", {CACHE, DATASET}) as folder:
        if (folder / DATASET).exists():
            dataset = read_dataset(folder)
            check_resumable(folder, "dataset", dataset["config"], table)
            echo(f"{folder} is finished already")
        else:
            dataset = _make(config, table, folder, echo, progress and sys.stderr.isatty())
        shutil.rmtree(folder / CACHE, ignore_errors=True)
        return dataset


def _make(config: PrepareConfig, table: Table, folder: Path, echo: Echo, bars: bool) -> Table:
    """Begin or continue a preparation, and finish it."""
    start, cache = time.perf_counter(), folder / CACHE
    continuing = (cache / _CONFIG).exists()
    if continuing:
        check_resumable(folder, "dataset", read_json(cache / _CONFIG), table)
        echo(f"{folder}: continuing")
    _quieten(bars)
    # The tokenizer first: to read the text may take hours.
    named = None if config.tokenizer == "bpe" else Tokenizer.from_name(config.tokenizer, config.end_token)
    try:
        sides, repeated, key = _read(config, cache, echo)
        made_of = repr((key, table, named and named.fingerprint))
        work = cache / hashlib.sha256(made_of.encode()).hexdigest()
        work.mkdir(exist_ok=True)
        tokenizer = named or _bpe(config, sides[0], work / TOKENIZER, echo, bars)
    except (ValueError, FileNotFoundError):  # The user will change the configuration.
        if not continuing:
            shutil.rmtree(cache, ignore_errors=True)
        raise
    write_json(cache / _CONFIG, table)
    dataset: Table = {}
    for name, side in zip(SIDES, sides, strict=True):
        dataset[name] = {"documents": len(side.sizes), "text_bytes": side.size}
        dataset[name] |= _encode(side, tokenizer, work / name, config.workers or cores(), bars, folder / f"{name}.npy")
    tokenizer.save(folder / TOKENIZER)
    tokens = [dataset[name]["tokens"] for name in SIDES]
    dataset |= {
        "repeated_documents": repeated,
        "bytes_per_token": sum(side.size for side in sides) / sum(tokens),
        "tokenizer": {
            "name": tokenizer.name,
            "end_token": tokenizer.end_token,
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": tokenizer.fingerprint,
        },
        "config": table,
        "symexplin": importlib.metadata.version("symexplin"),
    }
    write_json(folder / DATASET, dataset)
    echo(
        f"{tokenizer.name}: {tokens[0]:,} tokens to train on, {tokens[1]:,} held out, "
        f"{dataset['bytes_per_token']:.3f} bytes per token; {time.perf_counter() - start:.0f} s"
    )
    return dataset


def _quieten(bars: bool) -> None:
    """Keep `datasets` from logging, and from drawing bars that are not wanted."""
    import datasets
    from huggingface_hub.utils import logging

    for library in (logging, datasets.utils.logging):
        library.set_verbosity_error()
    (datasets.enable_progress_bars if bars else datasets.disable_progress_bars)()


# --- documents -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """The documents of one side, a `datasets.Dataset` with the column "text", and the bytes of each."""

    rows: Any
    sizes: NDArray[np.int64]

    @property
    def size(self) -> int:
        """Bytes of text."""
        return int(self.sizes.sum())

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[list[bytes]]:
        """Yield the documents of a range, about a megabyte at a time."""
        sizes = self.sizes[start:stop]
        count = np.clip(_BATCH_BYTES * len(sizes) // max(1, sizes.sum()), 1, 1000)
        for batch in self.rows.select(range(start, start + len(sizes))).iter(int(count)):
            yield batch["text"]


def _read(config: PrepareConfig, cache: Path, echo: Echo) -> tuple[tuple[_Side, _Side], int, str]:
    """Write all documents once; return both sides, the number of repeated documents, and a key of the text."""
    import pyarrow
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError
    from pyarrow.compute import binary_length

    left_out: LeftOut = {}
    found = [
        find_sources(names, config.text_key, config.split, left_out, cache / "hub")
        for names in (config.sources, config.valid)
    ]
    stamps = [[source[:2] for source in sources] for sources in found]
    key = hashlib.sha256(repr((stamps, config.text_key, config.seed)).encode()).hexdigest()
    told = cache / f"{key}.json"

    def rows() -> Iterator[Table]:
        for side, sources in enumerate(found):
            for document in chain.from_iterable(source.documents for source in sources):
                number = hash_document(document, config.seed)
                # The types that `datasets` infers hold no document of 2 GiB and no 64-bit number.
                yield {
                    "text": pyarrow.array([document], pyarrow.large_binary()),
                    "hash": pyarrow.array([number], pyarrow.uint64()),
                    "side": side,
                }
        write_json(told, left_out)

    try:
        documents = Dataset.from_generator(
            rows, cache_dir=str(cache), fingerprint=key, writer_batch_size=_ROWS_IN_MEMORY
        )
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None
    texts = documents.select_columns("text")
    hashes, sides = (documents.data.column(name).to_numpy() for name in ("hash", "side"))
    numbers = split_documents(hashes, int((sides == 0).sum()), config.valid_fraction)
    repeated = len(hashes) - sum(map(len, numbers))
    if not len(numbers[1]):
        parts = cut_in_two(texts[int(numbers[0][0])]["text"], config.valid_fraction)
        texts = Dataset.from_dict({"text": parts}, features=texts.features)
        numbers = (np.array([0]), np.array([1]))
    sizes = binary_length(texts.data.column("text")).to_numpy()
    train, valid = (_Side(texts.select(own), sizes[own]) for own in numbers)
    echo(
        f"{', '.join(config.sources)}: {len(train.sizes):,} documents to train on, {len(valid.sizes):,} held out, "
        f"{repeated:,} repeated; {train.size + valid.size:,} bytes"
    )
    for reason, paths in read_json(told).items():
        names = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
        echo(f"left out ({reason}), {len(paths):,} in all: {names}")
    return (train, valid), repeated, key


# --- tokens ----------------------------------------------------------------------------------------------------------


def _bpe(config: PrepareConfig, side: _Side, path: Path, echo: Echo, bars: bool) -> Tokenizer:
    """Return a BPE trained on one side, or the one that an interrupted preparation has trained."""
    if not path.exists():
        documents = (document for batch in side.batches() for document in batch)
        sample = _spread(documents, side.size, min(config.bpe_bytes, side.size))
        train_bpe(sample, config.vocab_size, progress=bars).save(path)
    tokenizer = Tokenizer.load(path, name="bpe")
    tokenizer.name = f"bpe-{tokenizer.vocab_size}"
    if tokenizer.vocab_size < config.vocab_size:
        echo(f"the text gives {tokenizer.vocab_size:,} tokens, not the {config.vocab_size:,} asked for")
    return tokenizer


def _spread(documents: Iterable[bytes], total: int, wanted: int) -> Iterator[bytes]:
    """Yield pieces of documents of `total` bytes, evenly spread, that make about `wanted` bytes."""
    seen = taken = 0
    for document in documents:
        for piece in pieces(document):
            if taken * total <= seen * wanted:
                taken += len(piece)
                yield piece
            seen += len(piece)


def _encode(side: _Side, tokenizer: Tokenizer, work: Path, workers: int, bars: bool, out: Path) -> Table:
    """Write the tokens of one side into the file `out`, by way of a file per shard; finished shards are kept."""
    work.mkdir(exist_ok=True)
    ends = np.cumsum(side.sizes)
    cuts = np.searchsorted(ends, np.arange(_SHARD_BYTES, ends[-1], _SHARD_BYTES)) + 1
    bounds = np.unique([0, *cuts, len(ends)]).tolist()
    shards, count = [], 0
    with (
        ThreadPoolExecutor(workers) as pool,
        tqdm(total=side.size, desc=work.name, unit="B", unit_scale=True, disable=not bars) as bar,
    ):
        for start, stop in pairwise(bounds):
            shard = work / f"{start:012}.npy"
            if not shard.exists():
                tokens = np.concatenate(list(pool.map(tokenizer.encode_documents, side.batches(start, stop))))
                write_tokens(shard, [tokens], len(tokens), tokens.dtype)
            shards.append(shard)
            count += len(np.load(shard, mmap_mode="r"))
            bar.update(int(side.sizes[start:stop].sum()))
    digest = write_tokens(out, map(np.load, shards), count, token_dtype(tokenizer.vocab_size))
    return {"tokens": count, "sha256": digest}


def write_tokens(path: Path, arrays: Iterable[TokenArray], count: int, dtype: np.dtype[Any]) -> str:
    """Write `arrays`, `count` tokens in all, as one .npy file, which appears when it is whole; return its sha256."""
    digest = hashlib.sha256()
    with replacing(path) as temporary, temporary.open("wb") as file:
        header = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, header)
        for array in arrays:
            data = np.ascontiguousarray(array, dtype=dtype).data
            file.write(data)
            digest.update(data)
    return digest.hexdigest()
