"""Small texts that several tests train on: prepared, or as byte tokens in memory."""

import hashlib

import numpy as np

from symexplin.lab.data import tokenizer
from symexplin.lab.data.batches import Corpus
from symexplin.lab.data.prepare import PrepareConfig, prepare
from symexplin.lab.data.tokenizer import Tokenizer

__all__ = ["TEXTS", "in_memory", "prepare_slowly", "prepared", "split"]

TEXTS = [f"document {i} says {i * i} and {i % 5}, which is all there is to say" for i in range(80)]


def prepared(folder, texts=TEXTS, **options):
    """Write `texts` into `folder` and prepare them there, with byte tokens if nothing else is said."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "text"
    source.write_bytes("\0".join(texts).encode())
    config = PrepareConfig(sources=(str(source),), **{"tokenizer": "byte", **options})
    prepare(config, folder / "data")
    return str(folder / "data")


def prepare_slowly(config, folder):
    """Prepare in pieces so small that a kill finds files half-written."""
    tokenizer._PIECE = 100
    prepare(config, folder)


def split(documents, fraction=0.05, seed=0):
    """The rule in the plainest words: ranks in a dict, the smallest ones are held out."""
    unique = list(dict.fromkeys(documents))
    rank = {
        d: int.from_bytes(hashlib.blake2b(d, digest_size=8, key=str(seed).encode()).digest()) / 2**64 for d in unique
    }
    wanted = sum(r < fraction for r in rank.values())
    chosen = set(sorted(unique, key=rank.__getitem__)[: min(max(wanted, 1), len(unique) - 1)])
    return [[d for d in unique if d not in chosen], [d for d in unique if d in chosen]]


def in_memory(documents):
    """The byte tokens of documents, split by the rule."""
    sides = split(documents)
    arrays = [np.frombuffer(b"".join(d + b"\0" for d in side), np.uint8) for side in sides]
    byte = Tokenizer.from_name("byte")
    facts = (byte.fingerprint, *(hashlib.sha256(array).hexdigest() for array in arrays))
    return Corpus(*arrays, byte, *map(len, sides), hashlib.sha256(" ".join(facts).encode()).hexdigest())
