import hashlib

import numpy as np
import pytest

from symexplin.lab.data.split import REPEATED, TRAIN, VALID, cut_in_two, hash_document, split_documents

DOCUMENTS = [f"document {i}: {'text ' * (i % 7)}".encode() for i in range(400)]


def sides(documents, held_out=(), fraction=0.05, seed=0):
    together = [*documents, *held_out]
    found = split_documents([hash_document(document, seed) for document in together], len(documents), fraction)
    return [[d for d, side in zip(together, found, strict=True) if side == wanted] for wanted in (TRAIN, VALID)]


def reference(documents, fraction, seed):
    """The rule in the plainest words: ranks in a dict, the smallest ones are held out."""
    unique = list(dict.fromkeys(documents))
    rank = {
        d: int.from_bytes(hashlib.blake2b(d, digest_size=8, key=str(seed).encode()).digest()) / 2**64 for d in unique
    }
    wanted = sum(r < fraction for r in rank.values())
    chosen = set(sorted(unique, key=rank.__getitem__)[: min(max(wanted, 1), len(unique) - 1)])
    return [[d for d in unique if d not in chosen], [d for d in unique if d in chosen]]


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5, 0.999])
@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 400])
def test_the_rule(count, seed, fraction):
    documents = [*DOCUMENTS[:count], *DOCUMENTS[: count // 2]]
    assert sides(documents, (), fraction, seed) == reference(documents, fraction, seed)


def test_a_new_document_does_not_move_the_others():
    _, valid = sides(DOCUMENTS)
    _, grown = sides([*DOCUMENTS, b"another"])
    assert set(valid) <= set(grown)
    assert 0 < len(valid) < 42  # 400 fair draws at 5 %: 20 +- 4.4; five deviations either side


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.999])
def test_a_lone_document_is_cut(fraction):
    train, valid = cut_in_two(DOCUMENTS[1], fraction)
    assert train + valid == DOCUMENTS[1]
    assert len(train) == max(1, round(len(DOCUMENTS[1]) * (1 - fraction)))


def test_given_documents_are_held_out():
    assert sides([b"a", b"b", b"a", b"shared"], [b"c", b"shared", b"c"]) == [[b"a", b"b"], [b"c", b"shared"]]
    with pytest.raises(ValueError, match="sources must hold a document that valid does not hold"):
        sides([b"c"], [b"c"])


def test_no_document_and_bad_fractions_are_named():
    with pytest.raises(ValueError, match="documents must hold at least one, got none"):
        split_documents([], 0, 0.05)
    with pytest.raises(ValueError, match="valid_fraction must be a number in"):
        split_documents([1], 1, 1.0)
    assert split_documents(np.array([3, 3, 5], np.uint64), 3, 0.0).tolist() == [VALID, REPEATED, TRAIN]
