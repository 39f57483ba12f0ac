import hashlib

import numpy as np
import pytest

from symexplin.lab.text.split import TRAIN, VALID, Split

DOCUMENTS = [f"document {i}: {'text ' * (i % 7)}".encode() for i in range(400)]


def sides(documents, held_out=(), **options):
    split = Split.scan(documents, held_out, **options)
    pairs = list(split.sided([*documents, *held_out]))
    found = [[document for side, document in pairs if side == wanted] for wanted in (TRAIN, VALID)]
    for side, side_documents in zip((TRAIN, VALID), found, strict=True):
        assert split.documents(side) == len(side_documents)
        assert split.size(side) == sum(map(len, side_documents))
    return found


def reference(documents, fraction, seed):
    """The rule in the plainest words: ranks in a dict, the smallest ones are held out."""
    unique = list(dict.fromkeys(documents))
    rank = {
        d: int.from_bytes(hashlib.blake2b(d, digest_size=8, key=str(seed).encode()).digest()) / 2**64 for d in unique
    }
    wanted = sum(r < fraction for r in rank.values())
    chosen = set(sorted(unique, key=rank.__getitem__)[: min(max(wanted, 1), len(unique) - 1)])
    return [d for d in unique if d not in chosen], [d for d in unique if d in chosen]


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5, 0.999])
@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("count", [2, 3, 20, 400])
def test_the_rule(count, seed, fraction):
    documents = [*DOCUMENTS[:count], *DOCUMENTS[: count // 2]]
    assert sides(documents, valid_fraction=fraction, seed=seed) == list(reference(documents, fraction, seed))


def test_a_new_document_does_not_move_the_others():
    _, valid = sides(DOCUMENTS)
    _, grown = sides([*DOCUMENTS, b"another"])
    assert set(valid) <= set(grown)
    assert 0 < len(valid) < 42  # 400 fair draws at 5 %: 20 +- 4.4; five deviations either side


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.999])
def test_a_lone_document_is_cut(fraction):
    train, valid = sides([DOCUMENTS[0]] * 3, valid_fraction=fraction)
    assert train[0] + valid[0] == DOCUMENTS[0]
    assert len(train[0]) == max(1, round(len(DOCUMENTS[0]) * (1 - fraction)))


def test_given_documents_are_held_out():
    train, valid = sides([b"a", b"b", b"a", b"shared"], [b"c", b"shared", b"c"])
    assert (train, valid) == ([b"a", b"b"], [b"c", b"shared"])
    assert sides([b"long document"], [b"c"]) == [[b"long document"], [b"c"]]
    with pytest.raises(ValueError, match="sources must hold a document that valid does not hold"):
        sides([b"c"], [b"c"])


def test_the_digest_tells_texts_and_splits_apart():
    digests = [
        Split.scan(documents, held_out, **options).digest
        for documents, held_out, options in [
            (DOCUMENTS, (), {}),
            (DOCUMENTS[1:], (), {}),
            (DOCUMENTS[::-1], (), {}),
            (DOCUMENTS, (), {"seed": 1}),
            (DOCUMENTS, (), {"valid_fraction": 0.5}),
            (DOCUMENTS[:200], DOCUMENTS[200:], {}),
        ]
    ]
    assert len(set(digests)) == len(digests)
    assert Split.scan(iter(DOCUMENTS)).digest == digests[0]


@pytest.mark.parametrize("second", [DOCUMENTS[:-1], [*DOCUMENTS, b"new"], [b"new", *DOCUMENTS[1:]], []])
def test_text_that_changes_between_readings_is_noticed(second):
    split = Split.scan(DOCUMENTS)
    with pytest.raises(ValueError, match="sources must not change while they are read"):
        list(split.sided(second))


def test_no_document_and_bad_fractions_are_named():
    with pytest.raises(ValueError, match="documents must hold at least one, got none"):
        Split.scan([])
    with pytest.raises(ValueError, match="valid_fraction must be a number in"):
        Split.scan(DOCUMENTS, valid_fraction=1.0)


def test_sizes_are_reported():
    seen = []
    split = Split.scan([b"abc", b"abc", b""], [b"four"], update=seen.append)
    assert seen == [3, 3, 0, 4]
    assert split.repeated == 1
    assert split.hashes.dtype == np.uint64
