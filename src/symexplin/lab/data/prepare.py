"""From sources of text to a folder of tokens; a preparation that was killed continues where it was."""

import contextlib
import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from symexplin.lab.data.hub import quiet_datasets
from symexplin.lab.data.sources import LeftOut, Source, find_sources
from symexplin.lab.data.split import REPEATED, SIDES, TRAIN, VALID, cut_in_two, hash_document, split_documents
from symexplin.lab.data.tokenizer import MINIMUM_VOCAB, TokenArray, Tokenizer, pieces, token_dtype, train_bpe
from symexplin.lab.data.tokens import (
    CACHE,
    DATASET,
    TOKENIZER,
    encode_shards,
    read_dataset,
    rows_per_batch,
    shard_tokens,
    token_file,
    write_tokens,
)
from symexplin.lab.files import read_json, write_json
from symexplin.lab.folders import claimed
from symexplin.lab.provenance import cores
from symexplin.validation import check_fraction, check_whole

__all__ = ["PrepareConfig", "prepare"]

Echo = Callable[[str], None]

_CONFIG = "config.json"
_ROWS_IN_MEMORY = 100  # documents that are held before they are written
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare, and how.

    Args:
        sources: where the text comes from: "stdlib", files, folders, "hf:NAME[:CONFIG]", "openwebtext", "fineweb".
        tokenizer: "bpe" to train one on the text, "byte", "gpt2", "hf:NAME" (a model of the Hugging Face hub), or the path of
            a `tokenizers` JSON file.
        vocab_size: tokens of a BPE trained here.
        bpe_bytes: text that a BPE is trained on, in bytes, evenly spread over the training documents.
        end_token: of a tokenizer file, the token that ends documents; left out: the first usual name in its vocabulary.
        valid: sources of the documents to hold out, instead of a split of `sources`.
        valid_fraction: share of the documents to hold out; at least one is, and a lone one is cut in two.
        split: of Hugging Face datasets.
        text_key: key of JSON lines and column of datasets that holds the text.
        seed: of the split.
        workers: processes; left out: one per core. The result is the same for any number.

    Raises:
        ValueError: a value out of range.

    >>> PrepareConfig(("stdlib",), vocab_size=100)
    Traceback (most recent call last):
    ValueError: vocab_size must be a whole number >= 257, got 100
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
        for name in ("tokenizer", "split", "text_key"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        check_whole("vocab_size", self.vocab_size, minimum=MINIMUM_VOCAB)
        check_whole("bpe_bytes", self.bpe_bytes)
        check_fraction("valid_fraction", self.valid_fraction)
        check_whole("seed", self.seed, minimum=0)
        if self.workers is not None:
            check_whole("workers", self.workers)
        if self.end_token is not None and self.tokenizer in ("bpe", "byte", "gpt2"):
            raise ValueError(f"end_token goes with a tokenizer file, got {self.end_token!r} with {self.tokenizer!r}")


def prepare(
    config: PrepareConfig, out: str | Path, *, echo: Echo = lambda _: None, progress: bool = True
) -> dict[str, Any]:
    """Write the dataset of `config` into the folder `out`, and return the content of its dataset.json.

    A preparation that was interrupted at any moment continues when it is called again, with the same files in the end,
    bit for bit. A finished one stays as it is. While it works, a copy of the text lies in `out`.

    Args:
        config: what to prepare. Where processes are spawned (macOS, Windows), a script that calls this with more than
            one worker needs the guard `if __name__ == "__main__"`.
        out: a new folder, or that of the preparation to continue.
        echo: takes each line for a log.
        progress: show bars on a terminal.

    Raises:
        FileNotFoundError: a source that does not exist.
        ValueError: a folder with other files or of another configuration, a folder in which another process works,
            text that cannot be read.
        OSError: the disk is full, ...: finished shards stay.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "text").write_bytes(b"one" + bytes(1) + b"two")
    ...     dataset = prepare(PrepareConfig((f"{folder}/text",), tokenizer="byte"), Path(folder, "tokens"))
    >>> dataset["train"]["tokens"], dataset["valid"]["tokens"], dataset["tokenizer"]["name"]
    (4, 4, 'byte')
    """
    for source in (*config.sources, *config.valid):
        if source and Path(source).is_dir() and Path(out).resolve().is_relative_to(Path(source).resolve()):
            raise ValueError(f"out must lie outside the sources, got {str(out)!r} in {source!r}")
    with claimed(out, "dataset", {CACHE, DATASET}) as folder, quiet_datasets(progress), _threads(config.workers):
        try:
            return _Preparation(config, folder, echo, progress).run()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            stays = f"{error.strerror}; finished shards stay, and the same command continues"
            raise OSError(error.errno, stays, str(folder)) from None


@contextlib.contextmanager
def _threads(workers: int | None) -> Iterator[None]:
    """Keep the tokenizers library to one thread if one worker is asked for, and restore what `datasets` sets."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    if workers == 1:
        os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


class _Texts:
    """The documents of a corpus, on the disk, and the side of each."""

    def __init__(self, rows: Any, given: int, valid_fraction: float) -> None:
        from datasets import Dataset
        from pyarrow.compute import binary_length

        self.rows = rows
        self.sides = split_documents(rows.data.column("hash").to_numpy(), given, valid_fraction)
        self.repeated = self.documents(REPEATED)
        counted = np.flatnonzero(self.sides != REPEATED)
        if len(counted) == 1:
            parts = cut_in_two(rows[int(counted[0])]["text"], valid_fraction)
            self.rows = Dataset.from_dict({"text": parts}, features=rows.select_columns("text").features)
            self.sides = np.array([TRAIN, VALID], np.uint8)
        self.sizes: NDArray[np.int64] = binary_length(self.rows.data.column("text")).to_numpy()

    def documents(self, side: int) -> int:
        return int((self.sides == side).sum())

    def size(self, side: int) -> int:
        return int(self.sizes[self.sides == side].sum())

    def batches(self, side: int) -> Iterator[list[bytes]]:
        """Yield the documents of a side, some at a time."""
        start, count = 0, rows_per_batch(self.sizes)
        for batch in self.rows.select_columns("text").iter(count):
            pairs = zip(self.sides[start : start + count], batch["text"], strict=True)
            yield [document for found, document in pairs if found == side]
            start += count


class _Preparation:
    """The preparation of one folder."""

    def __init__(self, config: PrepareConfig, folder: Path, echo: Echo, progress: bool) -> None:
        self.config, self.folder, self.echo, self.progress = config, folder, echo, progress
        self.cache = folder / CACHE
        table = dataclasses.asdict(dataclasses.replace(config, workers=None))
        self.table = json.loads(json.dumps({key: value for key, value in table.items() if value is not None}))

    def run(self) -> dict[str, Any]:
        if (self.folder / DATASET).exists():
            dataset = read_dataset(self.folder)
            self._check_same(dataset.get("config", {}))
            shutil.rmtree(self.cache, ignore_errors=True)
            self.echo(f"{self.folder} is finished already")
            return dataset
        start, earlier = time.perf_counter(), (self.cache / _CONFIG).exists()
        if earlier:
            self._check_same(read_json(self.cache / _CONFIG))
            self.echo(f"{self.folder}: continuing")
        # The tokenizer first: to read the text may take hours.
        named = None if self.config.tokenizer == "bpe" else self._named()
        try:
            texts, key = self._read()
            work = self.cache / hashlib.sha256(f"{key} {named and named.fingerprint}".encode()).hexdigest()
            work.mkdir(exist_ok=True)
            tokenizer = named or self._bpe(texts, work)
            write_json(self.cache / _CONFIG, self.table)
        except (ValueError, FileNotFoundError):  # of a text or a setting that the user will change
            if not earlier:
                shutil.rmtree(self.cache, ignore_errors=True)
            raise
        if self.config.tokenizer == "bpe" and tokenizer.vocab_size < self.config.vocab_size:
            self.echo(f"the text gives {tokenizer.vocab_size:,} tokens, not the {self.config.vocab_size:,} asked for")
        dataset = self._write(texts, tokenizer, work)
        shutil.rmtree(self.cache, ignore_errors=True)
        self.echo(
            f"{tokenizer.name}: {dataset['train']['tokens']:,} tokens to train on, {dataset['valid']['tokens']:,} held "
            f"out, {dataset['bytes_per_token']:.3f} bytes per token; {time.perf_counter() - start:.0f} s"
        )
        return dataset

    def _check_same(self, old: dict[str, Any]) -> None:
        new = self.table
        different = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        if different:
            changes = "; ".join(f"{key} was {old.get(key)!r}, now {new.get(key)!r}" for key in different)
            raise ValueError(
                f"out must be a new folder, got {str(self.folder)!r}, prepared otherwise: {changes} (give another "
                "folder, or delete this one)"
            )

    def _named(self) -> Tokenizer:
        return Tokenizer.from_name(self.config.tokenizer, self.config.end_token)

    def _read(self) -> tuple[_Texts, str]:
        """Return all documents, and a key that changes with the text."""
        from datasets import concatenate_datasets

        config = self.config
        parts, keys, all_left_out = [], [], list[LeftOut]()
        groups = [self._find(names) for names in (config.sources, config.valid) if names]
        for found, left_out in groups:
            part, key, left_out = self._documents(found, left_out)
            parts.append(part)
            keys.append(key)
            all_left_out.append(left_out)
        texts = _Texts(concatenate_datasets(parts), len(parts[0]), config.valid_fraction)
        self.echo(
            f"{', '.join(config.sources)}: {texts.documents(TRAIN):,} documents to train on, "
            f"{texts.documents(VALID):,} held out, {texts.repeated:,} repeated; "
            f"{texts.size(TRAIN) + texts.size(VALID):,} bytes"
        )
        for reason in sorted({reason for left_out in all_left_out for reason in left_out}):
            paths = [path for left_out in all_left_out for path in left_out.get(reason, [])]
            names = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
            self.echo(f"left out ({reason}), {len(paths):,} in all: {names}")
        return texts, " ".join(keys)

    def _find(self, names: Iterable[str]) -> tuple[list[Source], LeftOut]:
        left_out: LeftOut = {}
        keys = {"text_key": self.config.text_key, "split": self.config.split, "cache": self.cache}
        return find_sources(names, left_out=left_out, **keys), left_out

    def _documents(self, found: list[Source], left_out: LeftOut) -> tuple[Any, str, LeftOut]:
        """Return the documents of some sources, written once, with their key and with what was left out."""
        import pyarrow
        from datasets import Dataset
        from datasets.exceptions import DatasetGenerationError

        config = self.config
        stamps = repr([[(source.name, source.stamp) for source in found], config.text_key, config.seed])
        key = hashlib.sha256(stamps.encode()).hexdigest()
        told = self.cache / f"{key}.json"

        def rows() -> Iterator[dict[str, Any]]:
            for source in found:
                for document in source.documents:
                    # Arrays of their own types: the inferred ones hold no document of 2 GiB and no number of 64 bits.
                    number = hash_document(document, config.seed)
                    yield {
                        "text": pyarrow.array([document], pyarrow.large_binary()),
                        "hash": pyarrow.array([number], pyarrow.uint64()),
                    }
            write_json(told, left_out)

        try:
            documents = Dataset.from_generator(
                rows,
                cache_dir=str(self.cache),
                fingerprint=key,
                writer_batch_size=_ROWS_IN_MEMORY,
            )
        except DatasetGenerationError as error:
            raise (error.__cause__ or error) from None
        return documents, key, read_json(told)

    def _bpe(self, texts: _Texts, work: Path) -> Tokenizer:
        path, name = work / TOKENIZER, "bpe"
        if not path.exists():
            total = texts.size(TRAIN)
            documents = (document for batch in texts.batches(TRAIN) for document in batch)
            sample = _spread(documents, total, min(self.config.bpe_bytes, total))
            train_bpe(sample, self.config.vocab_size, progress=self.progress).save(path)
        tokenizer = Tokenizer.load(path, name=name)
        tokenizer.name = f"{name}-{tokenizer.vocab_size}"
        return tokenizer

    def _write(self, texts: _Texts, tokenizer: Tokenizer, work: Path) -> dict[str, Any]:
        shards = []
        if not tokenizer.is_bytes:
            workers = self.config.workers or cores()
            shards = encode_shards(texts.rows, texts.sides, texts.sizes, tokenizer, work, workers)
        sides: dict[str, Any] = {}
        for side, name in SIDES.items():
            counts = {"documents": texts.documents(side), "text_bytes": texts.size(side)}
            if tokenizer.is_bytes:
                arrays: Iterable[TokenArray] = map(tokenizer.encode_documents, texts.batches(side))
                tokens = sum(counts.values())
            else:
                arrays = shard_tokens(shards, side)
                tokens = sum(map(len, shard_tokens(shards, side)))
            digest = write_tokens(token_file(self.folder, name), arrays, tokens, token_dtype(tokenizer.vocab_size))
            sides[name] = {**counts, "tokens": tokens, "sha256": digest}
        tokenizer.save(self.folder / TOKENIZER)
        total = texts.size(TRAIN) + texts.size(VALID)
        dataset = {
            **sides,
            "repeated_documents": texts.repeated,
            "bytes_per_token": total / sum(side["tokens"] for side in sides.values()),
            "tokenizer": {
                "name": tokenizer.name,
                "end_token": tokenizer.end_token,
                "vocab_size": tokenizer.vocab_size,
                "fingerprint": tokenizer.fingerprint,
            },
            "config": self.table,
            "symexplin": importlib.metadata.version("symexplin"),
        }
        write_json(self.folder / DATASET, dataset)
        return dataset


def _spread(documents: Iterable[bytes], total: int, wanted: int) -> Iterator[bytes]:
    """Yield pieces of documents of `total` bytes, evenly spread, that make about `wanted` bytes."""
    seen = taken = 0
    for document in documents:
        for piece in pieces(document):
            if taken * total <= seen * wanted:
                taken += len(piece)
                yield piece
            seen += len(piece)
