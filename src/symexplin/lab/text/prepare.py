"""From documents to a folder of tokens: the split by content, the tokenizer, and work that survives a kill."""

import contextlib
import errno
import importlib.metadata
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from symexplin.lab.files import read_json, write_json
from symexplin.lab.provenance import cores
from symexplin.lab.settings import to_table
from symexplin.lab.text.dataset import DATASET, PARTS, TOKENIZER, check_same, claimed_dataset, side_file
from symexplin.lab.text.documents import iter_documents
from symexplin.lab.text.shards import cut_shards, encode_shards, read_shard
from symexplin.lab.text.split import SIDES, TRAIN, VALID, Split
from symexplin.lab.text.tokenizer import MINIMUM_VOCAB, Tokenizer, pieces, train_bpe
from symexplin.lab.text.tokens import write_tokens
from symexplin.validation import check_fraction, check_whole

__all__ = ["PrepareConfig", "prepare"]

Echo = Callable[[str], None]

_PLAN = "plan.json"
_SHARD_BYTES = 1 << 24
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare, and how.

    Args:
        sources: where the text comes from: "stdlib", files, folders, "hf:NAME[:CONFIG]", "openwebtext", "fineweb".
        tokenizer: "bpe" to train one on the text, "byte", "gpt2", or the path of a `tokenizers` JSON file.
        vocab_size: tokens of a BPE trained here.
        bpe_bytes: text that a BPE is trained on, in bytes, evenly spread over the training documents.
        end_token: of a tokenizer file, the token that ends documents; left out: the first usual name that it knows.
        valid: sources of the documents to hold out, instead of a split of `sources`.
        valid_fraction: share of the documents to hold out; at least one is, and a lone one is cut in two.
        split: of Hugging Face datasets.
        text_key: key of JSON lines and column of datasets that holds the text.
        seed: of the split.
        workers: processes; left out: one a core. The result is the same for any number.

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

    def documents(self, sources: Iterable[str], skipped: list[Path] | None = None) -> Iterator[bytes]:
        """Yield the documents of some of the sources, read as the configuration says."""
        return iter_documents(sources, text_key=self.text_key, split=self.split, skipped=skipped)


def prepare(
    config: PrepareConfig, out: str | Path, *, echo: Echo = lambda _: None, progress: bool = True
) -> dict[str, Any]:
    """Write the dataset that `config` says into the folder `out`, and return what its dataset.json holds.

    A preparation that was interrupted at any moment goes on when it is called again, with the same files in the end,
    bit for bit; a finished one is left as it is. The text is read twice, or three times to train a BPE.

    Args:
        config: with more than one worker, a script that calls this needs the guard `if __name__ == "__main__"`.
        out: a new folder, or that of the preparation to go on with.
        echo: takes each line that a log should have.
        progress: show bars on a terminal.

    Raises:
        FileNotFoundError: a source that does not exist.
        ValueError: a folder with other files, another configuration or other text than the folder's, a folder that
            another process works in, text that cannot be read.
        OSError: the disk is full, ...: what is finished stays.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "text").write_bytes(b"one" + bytes(1) + b"two")
    ...     dataset = prepare(PrepareConfig((f"{folder}/text",), tokenizer="byte"), Path(folder, "tokens"))
    >>> dataset["train"]["tokens"], dataset["valid"]["tokens"], dataset["tokenizer"]["name"]
    (4, 4, 'byte')
    """
    table = {key: value for key, value in to_table(config).items() if key != "workers"}
    with claimed_dataset(out, (*config.sources, *config.valid)) as folder, _one_thread(config.workers == 1):
        if (folder / DATASET).exists():
            dataset = read_json(folder / DATASET)
            check_same(folder, dataset.get("config", {}), table)
            shutil.rmtree(folder / PARTS, ignore_errors=True)
            echo(f"{folder} is finished already")
            return dataset
        try:
            return _Preparation(config, table, folder, echo, progress).go()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            stays = f"{error.strerror}; what is finished stays, and the same command goes on"
            raise OSError(error.errno, stays, str(folder)) from None


@contextlib.contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """Keep the tokenizers library from using all cores."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    if wanted:
        os.environ[name] = "false"
    try:
        yield
    finally:
        if wanted:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


class _Preparation:
    """The making of one dataset."""

    def __init__(self, config: PrepareConfig, table: dict[str, Any], folder: Path, echo: Echo, progress: bool) -> None:
        self.config, self.table, self.folder, self.echo, self.progress = config, table, folder, echo, progress
        self.plan = folder / PARTS / _PLAN

    def go(self) -> dict[str, Any]:
        start = time.perf_counter()
        plan = read_json(self.plan) if self.plan.exists() else None
        if plan is not None:
            check_same(self.folder, plan.get("config", {}), self.table)
            self.echo(f"{self.folder}: going on")
        trained = self.config.tokenizer == "bpe"
        # Before the text is read, which may take hours.
        named = None if trained else Tokenizer.from_name(self.config.tokenizer, self.config.end_token)
        split = self._scan()
        tokenizer = named or self._bpe(split, plan)
        made = {
            "name": tokenizer.name,
            "text_digest": split.digest,
            "tokenizer_digest": tokenizer.fingerprint,
            "shard_bytes": _SHARD_BYTES,
        }
        if plan is None:
            self.plan.parent.mkdir(exist_ok=True)
            tokenizer.save(self.folder / TOKENIZER)
            write_json(self.plan, {"config": self.table, **made})
        else:
            check_same(self.folder, {key: plan.get(key) for key in made}, made)
        if trained and tokenizer.vocab_size < self.config.vocab_size:
            self.echo(f"the text gives {tokenizer.vocab_size:,} tokens, not the {self.config.vocab_size:,} asked for")
        dataset = self._write(split, tokenizer)
        self.echo(
            f"{tokenizer.name}: {dataset['train']['tokens']:,} tokens to train on, {dataset['valid']['tokens']:,} held "
            f"out, {dataset['bytes_per_token']:.3f} bytes a token; {time.perf_counter() - start:.0f} s"
        )
        return dataset

    def _scan(self) -> Split:
        config, skipped = self.config, list[Path]()
        with self._bar("read", None) as bar:
            split = Split.scan(
                config.documents(config.sources, skipped),
                config.documents(config.valid, skipped),
                valid_fraction=config.valid_fraction,
                seed=config.seed,
                update=bar.update,
            )
        self.echo(
            f"{', '.join(config.sources)}: {split.documents(TRAIN):,} documents to train on, "
            f"{split.documents(VALID):,} held out, {split.repeated:,} repeated; "
            f"{split.size(TRAIN) + split.size(VALID):,} bytes"
        )
        if skipped:
            names = ", ".join(str(path) for path in skipped[:3]) + (", ..." if len(skipped) > 3 else "")
            self.echo(f"left out as not UTF-8 text, {len(skipped):,} in all: {names}")
        return split

    def _again(self, split: Split) -> Iterator[tuple[int, bytes]]:
        return split.sided(chain(self.config.documents(self.config.sources), self.config.documents(self.config.valid)))

    def _bpe(self, split: Split, plan: Mapping[str, Any] | None) -> Tokenizer:
        if plan is not None:
            return Tokenizer.load(self.folder / TOKENIZER, name=plan.get("name"))
        total = split.size(TRAIN)
        documents = (document for side, document in self._again(split) if side == TRAIN)
        texts = _spread(documents, total, min(self.config.bpe_bytes, total))
        return train_bpe(texts, self.config.vocab_size, progress=self.progress)

    def _write(self, split: Split, tokenizer: Tokenizer) -> dict[str, Any]:
        total = split.size(TRAIN) + split.size(VALID)
        workers = 1 if tokenizer.is_bytes else min(self.config.workers or cores(), math.ceil(total / _SHARD_BYTES))
        with self._bar("tokens", total) as bar:
            shards = cut_shards(self._again(split), self.plan.parent, _SHARD_BYTES)
            paths = encode_shards(shards, tokenizer, workers, bar.update)
        sides: dict[str, Any] = {}
        for side, name in SIDES.items():
            counts = {"documents": split.documents(side), "text_bytes": split.size(side)}
            arrays = (read_shard(path, side) for path in paths)
            header = write_tokens(self.folder / side_file(name), arrays, tokenizer, **counts)
            sides[name] = {**counts, "tokens": header.tokens, "sha256": header.sha256}
        dataset = {
            **sides,
            "repeated_documents": split.repeated,
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
        shutil.rmtree(self.plan.parent, ignore_errors=True)
        return dataset

    def _bar(self, what: str, total: int | None) -> Any:
        # disable=None: no bar where standard error is not a terminal.
        disable = None if self.progress else True
        return tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False, disable=disable)


def _spread(documents: Iterable[bytes], total: int, wanted: int) -> Iterator[bytes]:
    """Yield pieces of documents of `total` bytes, evenly spread, that make about `wanted` bytes."""
    seen = taken = 0
    for document in documents:
        for piece in pieces(document):
            if taken * total <= seen * wanted:
                taken += len(piece)
                yield piece
            seen += len(piece)
