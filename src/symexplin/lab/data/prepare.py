"""From sources of text to a folder of tokens, whose files `symexplin.lab.data.batches` reads."""

import dataclasses
import hashlib
import importlib.metadata
import json
import shutil
import time
from array import array as numbers_of
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from symexplin.lab.config import PrepareConfig
from symexplin.lab.data.batches import DATASET, SIDES, TOKENIZER, read_dataset
from symexplin.lab.data.sources import Reader, find_source, hash_document, split_documents
from symexplin.lab.data.tokenizer import TokenArray, Tokenizer, pieces, train_bpe
from symexplin.lab.files import write_json
from symexplin.lab.folders import claimed
from symexplin.lab.identity import check_config

__all__ = ["PrepareConfig", "prepare", "write_tokens"]

Echo = Callable[[str], None]
Table = dict[str, Any]

_UNFINISHED = ".unfinished"  # holds the files until all are written
_BPE_BYTES = 100_000_000  # text that a BPE is trained on, evenly spread over the training documents


def prepare(config: PrepareConfig, out: str | Path, *, echo: Echo = lambda _: None) -> Table:
    """Write the dataset of `config` into the folder `out`, and return the content of its dataset.json.

    A finished dataset stays as it is. A preparation that was killed leaves a folder that the next call begins anew.
    """
    for source in (*config.sources, *config.valid):
        if source and Path(source).is_dir() and Path(out).resolve().is_relative_to(Path(source).resolve()):
            raise ValueError(f"out must lie outside the sources, got {str(out)!r} in {source!r}")
    table = json.loads(json.dumps(dataclasses.asdict(config)))  # as the file gives it back
    with claimed(out, "dataset", {_UNFINISHED, DATASET}) as folder:
        if (folder / DATASET).exists():
            dataset = read_dataset(folder)
            check_config(folder, "dataset", dataset["config"], table)
            echo(f"{folder} is already prepared; if the text has changed, choose a new --out")
            return dataset
        work = folder / _UNFINISHED
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            dataset = _make(config, work, echo) | {"config": table}
            write_json(work / DATASET, dataset)
            for name in (*(f"{side}.npy" for side in SIDES), TOKENIZER, DATASET):
                (work / name).replace(folder / name)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return dataset


def _make(config: PrepareConfig, work: Path, echo: Echo) -> Table:
    """Write the tokens and the tokenizer into the folder `work`, and return the facts about them."""
    start = time.perf_counter()
    # The tokenizer first: to read the text may take hours.
    named = None if config.tokenizer == "bpe" else Tokenizer.from_name(config.tokenizer, config.end_token)
    text = _read(config, echo)
    tokenizer = named or _bpe(config, text, echo)
    tokenizer.save(work / TOKENIZER)
    dataset: Table = {}
    for side, name in enumerate(SIDES):
        own = text.sizes[text.sides == side]
        documents = tqdm(text.documents(side), name, len(own), unit=" documents", disable=None)
        arrays = tokenizer.encode_documents(documents)
        count, digest = write_tokens(work / f"{name}.npy", arrays, tokenizer.dtype)
        dataset[name] = {"documents": len(own), "text_bytes": int(own.sum()), "tokens": count, "sha256": digest}
    tokens, sizes = ([dataset[name][key] for name in SIDES] for key in ("tokens", "text_bytes"))
    rate = sum(sizes) / sum(tokens)
    echo(
        f"{tokenizer.name}: {tokens[0]:,} tokens to train on, {tokens[1]:,} held out, {rate:.3f} bytes per token; "
        f"{time.perf_counter() - start:.0f} s"
    )
    return dataset | {
        "tokenizer": {key: getattr(tokenizer, key) for key in ("name", "end_token", "vocab_size", "fingerprint")},
        "symexplin": importlib.metadata.version("symexplin"),
    }


# --- documents -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    """All documents, as a stream, with the size of each and its place in :data:`SIDES`; a repeated one has none, -1."""

    readers: Sequence[Reader]
    sides: NDArray[np.int8]
    sizes: NDArray[np.int64]
    repeated: int

    def documents(self, side: int) -> Iterator[bytes]:
        """Yield the documents of one side."""
        return (document for document, own in zip(_every(self.readers), self.sides, strict=True) if own == side)


def _every(readers: Iterable[Reader]) -> Iterator[bytes]:
    return chain.from_iterable(reader() for reader in readers)


def _read(config: PrepareConfig, echo: Echo) -> _Text:
    """Read all documents once, and return them with their sides."""
    left_out: list[str] = []
    sources, held_out = (
        [find_source(name, config.text_key, config.split, left_out) for name in names]
        for names in (config.sources, config.valid)
    )
    hashes, sizes, ends = numbers_of("Q"), numbers_of("q"), []
    for group in (sources, held_out):
        for document in tqdm(_every(group), "reading", unit=" documents", disable=None):
            hashes.append(hash_document(document, config.seed))
            sizes.append(len(document))
        ends.append(len(hashes))
    sides = split_documents(np.array(hashes), ends[0], config.valid_fraction)
    repeated = int((sides == -1).sum())
    text = _Text([*sources, *held_out], sides, np.array(sizes), repeated)
    if not (sides == 1).any():
        lone = next(text.documents(0))
        place = max(1, round(len(lone) * (1 - config.valid_fraction)))
        parts = lone[:place], lone[place:]
        text = _Text([lambda: iter(parts)], np.array([0, 1], np.int8), np.array([*map(len, parts)]), repeated)
    train, valid = ((text.sides == side).sum() for side in range(2))
    echo(
        f"{', '.join(config.sources)}: {train:,} documents to train on, {valid:,} held out, {repeated:,} repeated; "
        f"{text.sizes[text.sides >= 0].sum():,} bytes"
    )
    share = text.sizes[text.sides == 1].sum() / text.sizes[text.sides >= 0].sum()
    if not config.valid and not config.valid_fraction / 2 <= share <= 2 * config.valid_fraction:
        asked = f"{share:.1%} of the text is held out, not {config.valid_fraction:.1%}"
        echo(f"{asked}: whole documents are held out, and there are few, or some are long")
    if left_out:
        names = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        echo(f"skipped {len(left_out):,} files that are unreadable or not UTF-8 text: {names}")
    return text


# --- tokens ----------------------------------------------------------------------------------------------------------


def _bpe(config: PrepareConfig, text: _Text, echo: Echo) -> Tokenizer:
    """Return a BPE trained on the training side."""
    size = int(text.sizes[text.sides == 0].sum())
    sample = _spread(text.documents(0), size, min(_BPE_BYTES, size))
    tokenizer = train_bpe(sample, config.vocab_size)
    if tokenizer.vocab_size < config.vocab_size:
        found = f"a vocabulary of {tokenizer.vocab_size:,} tokens"
        echo(f"the text yields {found}, not the {config.vocab_size:,} asked for")
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


def write_tokens(path: Path, arrays: Iterable[TokenArray], dtype: np.dtype[Any]) -> tuple[int, str]:
    """Write `arrays` as one .npy file; return the number of their tokens and their sha256."""
    count, digest = 0, hashlib.sha256()
    with path.open("wb") as file:
        _write_header(file, 0, dtype)
        for array in arrays:
            data = np.ascontiguousarray(array, dtype=dtype)
            file.write(data.data)
            digest.update(data.data)
            count += len(data)
        file.seek(0)
        _write_header(file, count, dtype)  # of the same length: numpy leaves room for any count
    return count, digest.hexdigest()


def _write_header(file: BinaryIO, count: int, dtype: np.dtype[Any]) -> None:
    header = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
