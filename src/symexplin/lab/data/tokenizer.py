"""Text as tokens: tokenizers of the `tokenizers` library, and the training of a BPE."""

import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from symexplin.checks import naming
from symexplin.lab.files import replace_file
from symexplin.lab.provenance import cores

__all__ = ["Tokenizer", "TokenArray", "pieces", "train_bpe"]

TokenArray = NDArray[np.unsignedinteger[Any]]

_END = "<|endoftext|>"
# Names of the token between documents in tokenizer files, the usual one first; the last stands for a NUL byte.
_END_NAMES = (_END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|end|>", "[EOS]", "[SEP]", chr(256))

# Longer documents are encoded in pieces: an encoding takes some hundred times the memory of its text.
_PIECE = 1 << 20
_SAFE_CUT = re.compile(rb"(?<=[A-Za-z]) ")


def pieces(document: bytes, size: int = _PIECE) -> Iterator[bytes]:
    """Yield a document in pieces of `size` bytes or little more, cut between a letter and a space.

    No word of the usual pre-tokenizers spans such a place, so the pieces have the tokens of the whole document.
    """
    start = 0
    while cut := _SAFE_CUT.search(document, start + size):
        yield document[start : cut.start()]
        start = cut.start()
    yield document[start:]


def _batches(documents: Iterable[bytes]) -> Iterator[list[bytes | None]]:
    """Yield the pieces of documents, about a megabyte for each core at a time; None ends a document."""
    batch: list[bytes | None] = []
    size = 0
    for document in documents:
        for piece in chain(pieces(document), (None,)):
            batch.append(piece)
            size += len(piece or b"")
            if size >= _PIECE * cores():
                yield batch
                batch, size = [], 0
    yield batch


class Tokenizer:
    """A tokenizer and its token between documents, `end_token`; no text has that token.

    `text` is a JSON file of the `tokenizers` library. Without `end_token` its first token of a usual name ends
    documents.
    """

    def __init__(self, text: str, name: str, end_token: str | None = None) -> None:
        try:
            self.backend = Backend.from_str(text)
        except Exception as error:  # the library raises bare exceptions
            raise ValueError(f"tokenizer {name!r} is not a file of the tokenizers library: {error}") from None
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.post_processor = None  # it may add tokens
        self.backend.encode_special_tokens = True  # read "<|endoftext|>" in a text as text
        self._text = text
        self.name = name
        vocab = self.backend.get_vocab(with_added_tokens=True)
        known = _END_NAMES if end_token is None else (end_token,)
        ends = [vocab[token] for token in known if token in vocab]
        if not ends:
            raise ValueError(f"tokenizer {name!r} has none of {', '.join(known)}: name a token of it with end_token")
        self.end = ends[0]
        self.vocab_size = max(vocab.values()) + 1
        self.dtype = np.min_scalar_type(max(vocab.values()))  # the smallest unsigned one

    @classmethod
    def from_name(cls, spec: str, end_token: str | None = None) -> Self:
        """Return a tokenizer by its name: "byte", "gpt2", "hf:NAME", or the path of a `tokenizers` file."""
        if spec == "byte":
            return cls(_byte_tokenizer(), "byte")
        if spec == "gpt2" or spec.startswith("hf:"):
            from huggingface_hub import hf_hub_download

            repository = "openai-community/gpt2" if spec == "gpt2" else spec.removeprefix("hf:")
            return cls.load(hf_hub_download(repository, "tokenizer.json"), name=spec, end_token=end_token)
        return cls.load(spec, end_token=end_token)

    @classmethod
    def load(cls, path: str | Path, *, name: str | None = None, end_token: str | None = None) -> Self:
        """Return the tokenizer of a file; without `name` it is called by its path."""
        if not Path(path).is_file():
            right = "'byte', 'gpt2', 'bpe', 'hf:NAME' or an existing file"
            raise FileNotFoundError(f"tokenizer must be {right}, got {str(path)!r}")
        with naming(str(path)):
            return cls(Path(path).read_text(encoding="utf-8", errors="replace"), name or str(path), end_token)

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as a JSON file of the `tokenizers` library."""
        replace_file(path, self._text)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The sha256 of the tokenizer's JSON, whatever its spaces and the order of its keys."""
        canonical = json.dumps(json.loads(self._text), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def end_token(self) -> str:
        """The name of the token that ends a document."""
        return str(self.backend.id_to_token(self.end))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end."""
        return list(self.backend.encode(text).ids)

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[TokenArray]:
        """Yield the tokens of UTF-8 documents, each followed by the end, in arrays of the smallest dtype.

        Bytes that are not UTF-8 become the replacement character. All cores encode; the tokens do not depend on them.
        """
        end = np.array([self.end], self.dtype)
        for batch in _batches(documents):
            texts = [piece.decode("utf-8", errors="replace") for piece in batch if piece is not None]
            encoded = iter(self.backend.encode_batch_fast(texts))
            yield np.concatenate([end if piece is None else np.array(next(encoded).ids, self.dtype) for piece in batch])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens, with ends; bytes that are not UTF-8 become the replacement character."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=False))


def train_bpe(documents: Iterable[bytes], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE like GPT-2's, trained on `documents`; its token 0 ends documents.

    The same documents give the same tokenizer. Short texts give fewer tokens than `vocab_size`.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator((text.decode("utf-8", errors="replace") for text in documents), trainer)
    return Tokenizer(backend.to_str(), f"bpe-{backend.get_vocab_size()}")


def _byte_tokenizer() -> str:
    """Return the tokenizer of bytes: the characters that stand for them in byte-level tokenizers are its tokens."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    others = [byte for byte in range(256) if chr(byte) not in alphabet]  # chr(256), chr(257), ... stand for these
    vocab = {chr(256 + others.index(byte)) if byte in others else chr(byte): byte for byte in range(256)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend.to_str()
