"""From sources of text to a folder of tokens; a preparation that was killed continues where it was."""

import dataclasses
import hashlib
import importlib.metadata
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from symexplin.lab.data.sources import LeftOut, Source, find_sources
from symexplin.lab.data.tokenizer import MINIMUM_VOCAB, TokenArray, Tokenizer, pieces, token_dtype, train_bpe
from symexplin.lab.data.tokens import (
    CACHE,
    DATASET,
    REPEATED,
    SIDES,
    TOKENIZER,
    TRAIN,
    VALID,
    cut_in_two,
    encode_shards,
    hash_document,
    read_dataset,
    rows_per_batch,
    shard_tokens,
    split_documents,
    write_tokens,
)
from symexplin.lab.files import read_json, write_json
from symexplin.lab.folders import check_resumable, claimed
from symexplin.lab.provenance import cores
from symexplin.validation import check_fraction, check_whole

__all__ = ["PrepareConfig", "prepare"]

Echo = Callable[[str], None]

_CONFIG = "config.json"
_ROWS_IN_MEMORY = 100  # documents that are held before they are written


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare, and how.

    Args:
        sources: where the text comes from: "stdlib", files, folders, "hf:NAME[:CONFIG]", "openwebtext", "fineweb".
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
        workers: processes; left out: one per core. The result is the same for any number.

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
    bit for bit. A finished one stays as it is. During the work a copy of the text lies in `out`. Where Python spawns
    processes (macOS, Windows), a script that calls this needs the guard `if __name__ == "__main__"`.
    """
    for source in (*config.sources, *config.valid):
        if source and Path(source).is_dir() and Path(out).resolve().is_relative_to(Path(source).resolve()):
            raise ValueError(f"out must lie outside the sources, got {str(out)!r} in {source!r}")
    with claimed(out, "dataset", {CACHE, DATASET}) as folder:
        _quieten(progress and sys.stderr.isatty())
        preparation = _Preparation(config, folder, echo, progress)
        return preparation.finished() if (folder / DATASET).exists() else preparation.run()


def _quieten(bars: bool) -> None:
    """Keep `datasets` from logging, and from drawing bars that are not wanted."""
    import datasets
    from huggingface_hub.utils import logging

    for library in (logging, datasets.utils.logging):
        library.set_verbosity_error()
    (datasets.enable_progress_bars if bars else datasets.disable_progress_bars)()


class _Texts:
    """The documents of a corpus, on the disk, and the side of each."""

    def __init__(self, rows: Any, given: int, valid_fraction: float) -> None:
        from datasets import Dataset
        from pyarrow.compute import binary_length

        self.rows = rows.select_columns("text")
        self.sides = split_documents(rows.data.column("hash").to_numpy(), given, valid_fraction)
        self.repeated = self.documents(REPEATED)
        counted = np.flatnonzero(self.sides != REPEATED)
        if len(counted) == 1:
            parts = cut_in_two(rows[int(counted[0])]["text"], valid_fraction)
            self.rows = Dataset.from_dict({"text": parts}, features=self.rows.features)
            self.sides = np.array([TRAIN, VALID], np.uint8)
        self.sizes: NDArray[np.int64] = binary_length(self.rows.data.column("text")).to_numpy()

    def documents(self, side: int) -> int:
        return int((self.sides == side).sum())

    def size(self, side: int) -> int:
        return int(self.sizes[self.sides == side].sum())

    def batches(self, side: int) -> Iterator[list[bytes]]:
        """Yield the documents of a side, some at a time."""
        start, count = 0, rows_per_batch(self.sizes)
        for batch in self.rows.iter(count):
            pairs = zip(self.sides[start : start + count], batch["text"], strict=True)
            yield [document for found, document in pairs if found == side]
            start += count


class _Preparation:
    """The preparation of one folder."""

    def __init__(self, config: PrepareConfig, folder: Path, echo: Echo, progress: bool) -> None:
        self.config, self.folder, self.echo, self.progress = config, folder, echo, progress
        self.cache = folder / CACHE
        # As JSON gives it back; the number of workers changes nothing.
        self.table = json.loads(json.dumps(dataclasses.asdict(dataclasses.replace(config, workers=None))))

    def finished(self) -> dict[str, Any]:
        dataset = read_dataset(self.folder)
        check_resumable(self.folder, "dataset", dataset["config"], self.table)
        shutil.rmtree(self.cache, ignore_errors=True)
        self.echo(f"{self.folder} is finished already")
        return dataset

    def run(self) -> dict[str, Any]:
        start, continuing = time.perf_counter(), (self.cache / _CONFIG).exists()
        if continuing:
            check_resumable(self.folder, "dataset", read_json(self.cache / _CONFIG), self.table)
            self.echo(f"{self.folder}: continuing")
        config = self.config
        # The tokenizer first: to read the text may take hours.
        named = None if config.tokenizer == "bpe" else Tokenizer.from_name(config.tokenizer, config.end_token)
        try:
            texts, key = self.read()
            made_of = repr((key, self.table, named and named.fingerprint))
            work = self.cache / hashlib.sha256(made_of.encode()).hexdigest()
            work.mkdir(exist_ok=True)
            tokenizer = named or self.bpe(texts, work / TOKENIZER)
        except (ValueError, FileNotFoundError):  # The user will change the configuration.
            if not continuing:
                shutil.rmtree(self.cache, ignore_errors=True)
            raise
        write_json(self.cache / _CONFIG, self.table)
        dataset = self.write(texts, tokenizer, work)
        shutil.rmtree(self.cache, ignore_errors=True)
        self.echo(
            f"{tokenizer.name}: {dataset['train']['tokens']:,} tokens to train on, {dataset['valid']['tokens']:,} held "
            f"out, {dataset['bytes_per_token']:.3f} bytes per token; {time.perf_counter() - start:.0f} s"
        )
        return dataset

    def read(self) -> tuple[_Texts, str]:
        """Return all documents, written once, and a key that changes with the text."""
        from datasets import Dataset
        from datasets.exceptions import DatasetGenerationError

        config, left_out = self.config, LeftOut()
        given, held_out = (
            find_sources(names, config.text_key, config.split, left_out, self.cache / "hub")
            for names in (config.sources, config.valid)
        )
        stamps = [[source[:2] for source in sources] for sources in (given, held_out)]
        key = hashlib.sha256(repr((stamps, config.text_key, config.seed)).encode()).hexdigest()
        told = self.cache / f"{key}.json"

        def rows() -> Iterator[dict[str, Any]]:
            counts = []
            for sources in (given, held_out):
                counts.append(0)
                for row in self.rows(sources):
                    counts[-1] += 1
                    yield row
            write_json(told, {"given": counts[0], "left_out": left_out})

        try:
            documents = Dataset.from_generator(
                rows, cache_dir=str(self.cache), fingerprint=key, writer_batch_size=_ROWS_IN_MEMORY
            )
        except DatasetGenerationError as error:
            raise (error.__cause__ or error) from None
        facts = read_json(told)
        texts = _Texts(documents, facts["given"], config.valid_fraction)
        self.tell(texts, facts["left_out"])
        return texts, key

    def rows(self, sources: Iterable[Source]) -> Iterator[dict[str, Any]]:
        # Arrays of their own types: the types that `datasets` infers hold no document of 2 GiB and no 64-bit number.
        import pyarrow

        for source in sources:
            for document in source.documents:
                number = hash_document(document, self.config.seed)
                yield {
                    "text": pyarrow.array([document], pyarrow.large_binary()),
                    "hash": pyarrow.array([number], pyarrow.uint64()),
                }

    def tell(self, texts: _Texts, left_out: LeftOut) -> None:
        self.echo(
            f"{', '.join(self.config.sources)}: {texts.documents(TRAIN):,} documents to train on, "
            f"{texts.documents(VALID):,} held out, {texts.repeated:,} repeated; "
            f"{texts.size(TRAIN) + texts.size(VALID):,} bytes"
        )
        for reason, paths in left_out.items():
            names = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
            self.echo(f"left out ({reason}), {len(paths):,} in all: {names}")

    def bpe(self, texts: _Texts, path: Path) -> Tokenizer:
        wanted, total = self.config.vocab_size, texts.size(TRAIN)
        if not path.exists():
            documents = (document for batch in texts.batches(TRAIN) for document in batch)
            sample = _spread(documents, total, min(self.config.bpe_bytes, total))
            train_bpe(sample, wanted, progress=self.progress).save(path)
        tokenizer = Tokenizer.load(path, name="bpe")
        tokenizer.name = f"bpe-{tokenizer.vocab_size}"
        if tokenizer.vocab_size < wanted:
            self.echo(f"the text gives {tokenizer.vocab_size:,} tokens, not the {wanted:,} asked for")
        return tokenizer

    def write(self, texts: _Texts, tokenizer: Tokenizer, work: Path) -> dict[str, Any]:
        shards: list[Any] = []
        if not tokenizer.is_bytes:
            workers = self.config.workers or cores()
            shards = encode_shards(texts.rows, texts.sides, texts.sizes, tokenizer, work, workers)
        dataset: dict[str, Any] = {}
        for side, name in SIDES.items():
            counts = {"documents": texts.documents(side), "text_bytes": texts.size(side)}
            arrays: Iterable[TokenArray] = shard_tokens(shards, side)
            tokens = sum(map(len, shard_tokens(shards, side)))
            if tokenizer.is_bytes:
                arrays, tokens = map(tokenizer.encode_documents, texts.batches(side)), sum(counts.values())
            digest = write_tokens(self.folder / f"{name}.npy", arrays, tokens, token_dtype(tokenizer.vocab_size))
            dataset[name] = {**counts, "tokens": tokens, "sha256": digest}
        tokenizer.save(self.folder / TOKENIZER)
        dataset |= {
            "repeated_documents": texts.repeated,
            "bytes_per_token": sum(map(texts.size, SIDES)) / sum(dataset[name]["tokens"] for name in SIDES.values()),
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
