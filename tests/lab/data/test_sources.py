import gzip
import json
import lzma

import numpy as np
import pytest

from corpora import split
from symexplin.lab.data import sources as module
from symexplin.lab.data.sources import find_source, hash_document, split_documents

datasets = pytest.importorskip("datasets")


def load(name, text_key="text", split="train", left_out=None):
    """The documents of a source, which can be read again."""
    read = find_source(str(name), text_key, split, [] if left_out is None else left_out)
    documents = list(read())
    assert list(read()) == documents
    return documents


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_stdlib_is_python_sources_without_tests():
    documents = load("stdlib")
    assert len(documents) > 100
    text = b"\0".join(documents)
    text.decode()
    assert b"class OrderedDict(dict)" in text  # collections
    assert not any(b"from test import support" in document[:2000] for document in documents)


@pytest.mark.parametrize("chunk", [1, 100])
def test_a_file_is_split_at_nul_whatever_its_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    (tmp_path / "text").write_bytes("ä\0zwei\0\0 \n\0drei 日本\0".encode())
    expected = ["ä".encode(), b"zwei", "drei 日本".encode()]
    assert load(tmp_path / "text") == load(tmp_path) == expected
    (tmp_path / "text").write_bytes(b"document\0" * 1000 + b"\xff")  # the error lies far behind
    documents = find_source(str(tmp_path / "text"), "text", "train", [])()
    assert next(documents) == b"document"
    with pytest.raises(ValueError, match=r"text' is not UTF-8 text: convert it first"):
        list(documents)


def test_a_folder_is_read_in_the_order_of_paths_and_the_rest_is_told(tmp_path):
    root = tmp_path / "root"
    (root / "b").mkdir(parents=True)
    (root / "b" / "0.txt").write_text("second")
    (root / "b.txt").write_text("first")  # "." comes before "/"
    (root / "c.txt").write_text("")
    (root / "link.txt").symlink_to(root / "b.txt")  # a file like others
    (root / "cut").write_bytes("ends inside ä".encode()[:-1])
    (root / "packed.gz").write_bytes(gzip.compress(b"packed " * 99)[:-9])
    (root / "nothing").symlink_to(tmp_path / "nowhere")
    (root / "folder").symlink_to(root / "b")
    left_out = []
    assert load(root, left_out=left_out) == [b"first", b"second", b"first"]
    assert left_out == [str(root / name) for name in ("cut", "packed.gz")]


@pytest.mark.parametrize(("suffix", "opener"), [(".xz", lzma), (".gz", gzip)])
def test_compressed_files_read_like_plain_ones(tmp_path, suffix, opener):
    for name, content in (("a.txt", b"one\0two"), ("b.jsonl", lines({"text": "three"})), ("c.bin", b"\xff\xfe")):
        (tmp_path / (name + suffix)).write_bytes(opener.compress(content))
    assert load(tmp_path) == [b"one", b"two", b"three"]
    (tmp_path / f"a.txt{suffix}").write_bytes(opener.compress(bytes(range(1, 120)) * 99)[:-9])
    with pytest.raises(ValueError, match=f"a.txt{suffix}' is damaged, or not {suffix}"):
        load(tmp_path / f"a.txt{suffix}")


def test_json_lines(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + lines({"text": "naïve", "id": 1}) + b"\n" + lines({"text": "a\0b"}, {"text": " "})
    )
    assert load(path) == ["naïve".encode(), b"a", b"b"]
    path.write_bytes(lines({"body": "x"}, {"body": None}))
    assert load(path, text_key="body") == [b"x"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "fine"}\n{not json}\n', "JSON"),
        (b'{"text": "fine"}\n{"text": 3}\n', "text_key must name a column with text, got 'text'"),
        (b'{"body": "fine"}\n', "text_key must name a column with text, got 'text'"),
        (b'{"text": "\\ud800"}\n', "surrogate"),
        (b"", "it has no rows"),
    ],
)
def test_bad_json_lines_are_named(tmp_path, content, words):
    (tmp_path / "text.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=rf"text.jsonl: .*{words}"):
        load(tmp_path / "text.jsonl")


def test_missing_and_empty_sources_are_named(tmp_path):
    (tmp_path / "blank").write_text(" \n")
    for name in (tmp_path / "nowhere", "stdlb", "", "hf:", "hf::small"):
        with pytest.raises(FileNotFoundError, match=rf"source of text must be 'stdlib', .*got '{name}'"):
            load(name)
    for path in (tmp_path, tmp_path / "blank"):
        with pytest.raises(ValueError, match=f"at least one document, got '{path}' without"):
            load(path)


# --- datasets and the hub --------------------------------------------------------------------------------------------


def test_names_of_datasets(monkeypatch):
    asked = []
    rows = datasets.Dataset.from_dict({"text": ["a", "b\0c", None], "id": [1, 2, 3]})
    monkeypatch.setattr(module, "_CORPUS_DOCUMENTS", 3)

    def fake(*words, split, revision):
        asked.append((*words, split, revision))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", fake)
    for name in ("openwebtext", "hf:some/name", "hf:some/name:small@v1.0"):
        assert load(name, split="test") == [b"a", b"b", b"c"]
    assert asked == [
        ("Skylion007/openwebtext", None, "test", "refs/convert/parquet"),
        ("some/name", None, "test", None),
        ("some/name", "small", "test", "v1.0"),
    ]
    monkeypatch.setattr(module, "_CORPUS_DOCUMENTS", 4)
    with pytest.raises(ValueError, match="'openwebtext' has 3 documents on the hub, not 4: give a folder with"):
        load("openwebtext")
    for key in ("body", "id"):
        with pytest.raises(ValueError, match=f"hf:x: text_key must name a column with text, got '{key}'"):
            load("hf:x", key)


def test_parquet_files_and_folders_of_them(tmp_path):
    rows = {"text": ["one", None, "two\0three"], "id": [1, 2, 3]}
    for name in ("a", "b"):
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "root" / f"{name}.parquet")
    (tmp_path / "root" / "c.txt").write_text("four")
    assert load(tmp_path / "root" / "a.parquet") == [b"one", b"two", b"three"]
    assert load(tmp_path / "root") == [b"one", b"two", b"three"] * 2 + [b"four"]
    for key in ("body", "id"):
        with pytest.raises(ValueError, match=rf"a.parquet: text_key must name a column with text, got '{key}'"):
            load(tmp_path / "root", text_key=key)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"bad.parquet: Parquet file size is 7 bytes"):
        load(tmp_path / "bad.parquet")


# --- the split -------------------------------------------------------------------------------------------------------


def sides(documents, held_out=(), fraction=0.05, seed=0):
    together = [*documents, *held_out]
    hashes = np.array([hash_document(document, seed) for document in together], np.uint64)
    found = split_documents(hashes, len(documents), fraction)
    return [[document for document, own in zip(together, found, strict=True) if own == side] for side in (0, 1)]


@pytest.mark.parametrize(("count", "fraction", "seed"), [(1, 0.5, 0), (2, 0.0, 7), (3, 0.999, 0), (400, 0.05, 7)])
def test_the_rule_of_the_split(count, fraction, seed):
    documents = [f"document {i}".encode() for i in range(count)]
    expected = split(documents, fraction, seed)
    assert sides([*documents, *documents[: count // 2]], (), fraction, seed) == expected
    _, grown = sides([*documents, b"another"], (), fraction, seed)
    assert count < 400 or set(expected[1]) <= set(grown)  # a new document does not move the others


def test_given_documents_are_held_out():
    assert sides([b"a", b"b", b"a", b"shared"], [b"c", b"shared", b"c"]) == [[b"a", b"b"], [b"c", b"shared"]]
    with pytest.raises(ValueError, match="sources must hold a document that valid does not hold"):
        sides([b"c"], [b"c"])
