import gzip
import json
import lzma

import pytest

from symexplin.lab.text import documents as module
from symexplin.lab.text.documents import iter_documents, load_documents, stdlib_documents


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_stdlib_is_python_sources_without_tests():
    documents = list(stdlib_documents())
    assert documents == load_documents("stdlib")
    assert len(documents) > 100
    for document in documents:
        document.decode("utf-8")
    text = b"\0".join(documents)
    assert b"class OrderedDict(dict)" in text  # collections
    assert b"def _parse_isoformat_date" in text  # datetime
    assert b"class TestCaseWithALongName" not in text
    assert not any(b"from test import support" in document[:2000] for document in documents)


def test_file_is_split_at_nul(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"one\0two\0\0 \n\0three")
    assert load_documents(path) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_chunks_do_not_show(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    text = "ä\0zwei\0\0drei 日本\0".encode()
    (tmp_path / "text").write_bytes(text)
    assert load_documents(tmp_path / "text") == [d for d in text.split(b"\0") if d]
    assert load_documents(tmp_path) == [d for d in text.split(b"\0") if d]


def test_a_long_file_is_read_as_a_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 100)
    (tmp_path / "text").write_bytes(b"document\0" * 1000)
    read = []
    chunks = module._chunks
    monkeypatch.setattr(module, "_chunks", lambda path: (read.append(c) or c for c in chunks(path)))
    documents = iter_documents([tmp_path / "text"])
    assert [next(documents) for _ in range(5)] == [b"document"] * 5
    assert len(read) == 1


def test_folder_in_order_of_paths_without_binary_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "0.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "cut").write_bytes("ends inside ä".encode()[:-1])
    assert load_documents(tmp_path) == [b"first", b"second"]


@pytest.mark.parametrize(("suffix", "opener"), [(".xz", lzma.open), (".gz", gzip.open)])
def test_compressed_files_read_like_plain_ones(tmp_path, suffix, opener):
    for name, content in (("a.txt", b"one\0two"), ("b.jsonl", lines({"text": "three"})), ("c.bin", b"\xff\xfe")):
        with opener(tmp_path / (name + suffix), "wb") as file:
            file.write(content)
    assert load_documents(tmp_path / f"a.txt{suffix}") == [b"one", b"two"]
    assert load_documents(tmp_path / f"b.jsonl{suffix}") == [b"three"]
    assert load_documents(tmp_path) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("suffix", [".xz", ".gz"])
def test_damaged_compressed_files_are_named(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    packed = (lzma if suffix == ".xz" else gzip).compress(bytes(range(1, 200)) * 99)
    for content in (b"no such thing", packed[:-9]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"text{suffix}' is damaged, or not {suffix}"):
            load_documents(path)


def test_json_lines(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + lines({"text": "naïve", "id": 1}) + b"\n" + lines({"text": "a\0b"}, {"text": " "})
    )
    assert load_documents(path) == ["naïve".encode(), b"a", b"b"]
    path.write_bytes(lines({"body": "x"}, {"body": None}))
    assert list(iter_documents([path], text_key="body")) == [b"x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json}", r"text.jsonl:2 is not JSON: .*line 1 column 2"),
        (b'{"text": "\xff"}', r"text.jsonl:2 is not UTF-8: invalid start byte at byte 10"),
        (b'"text"', r"text.jsonl:2 must be a JSON object with the key 'text', got str"),
        (b"[" * 100_000, r"text.jsonl:2 is not JSON"),
        (b'{"txt": "x", "n": 1}', r"text_key must be .*text.jsonl:2: 'txt', 'n'; got 'text'; did you mean 'txt'\?"),
        (b'{"text": 3}', r"text.jsonl:2: 'text' must be a text, got int"),
        (b'{"text": "\\ud800"}', r"text.jsonl:2: 'text' is not Unicode text: surrogates not allowed"),
    ],
)
def test_bad_json_lines_are_named(tmp_path, line, message):
    (tmp_path / "text.jsonl").write_bytes(lines({"text": "fine"}) + line + b"\n")
    with pytest.raises(ValueError, match=message) as caught:
        load_documents(tmp_path / "text.jsonl")
    assert "\n" not in str(caught.value)


def test_sources_follow_one_another_and_can_be_read_again(tmp_path):
    (tmp_path / "a").write_text("first")
    (tmp_path / "b").write_text("second")
    for _ in range(2):
        assert list(iter_documents([tmp_path / "b", tmp_path / "a"])) == [b"second", b"first"]


def test_missing_and_empty_sources_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"sources must be 'stdlib', an existing file or folder.*nowhere"):
        load_documents(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"got 'stdlb'; did you mean 'stdlib'\?"):
        load_documents("stdlb")
    with pytest.raises(ValueError, match="got ''"):
        load_documents("")
    (tmp_path / "blank").write_text(" \n")
    for path in (tmp_path, tmp_path / "blank"):
        with pytest.raises(ValueError, match=f"at least one document, got '{path}' without"):
            load_documents(path)


def test_names_are_checked_before_anything_is_read(tmp_path):
    (tmp_path / "a").write_text("first")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        iter_documents([tmp_path / "a", tmp_path / "nowhere"])


def test_shorthands_and_names_of_datasets(monkeypatch):
    asked = []
    monkeypatch.setattr(
        module, "hub_dataset", lambda *arguments: asked.append(arguments) or Rows("text", ["a", "b\0c"])
    )
    for source in ("openwebtext", "fineweb", "hf:some/name", "hf:some/name:config"):
        assert list(iter_documents([source], split="test")) == [b"a", b"b", b"c"]
    assert asked == [
        ("Skylion007/openwebtext", None, "test"),
        ("HuggingFaceFW/fineweb", "sample-10BT", "test"),
        ("some/name", None, "test"),
        ("some/name", "config", "test"),
    ]


def test_a_missing_column_is_named(monkeypatch):
    monkeypatch.setattr(module, "hub_dataset", lambda *_: Rows("texts", ["a"]))
    with pytest.raises(ValueError, match=r"text_key must be a key of dataset 'x': 'texts'; got 'text'; did you mean"):
        load_documents("hf:x")


class Rows:
    """As much of a dataset as is read."""

    def __init__(self, column, texts):
        self.column_names, self.texts = [column], texts

    def select_columns(self, names):
        assert names == self.column_names
        return self

    def iter(self, batch_size):
        assert batch_size > 1
        return iter([{self.column_names[0]: self.texts[:1]}, {self.column_names[0]: self.texts[1:]}])


def test_files_of_a_folder_that_are_not_utf8_are_told(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes("größer".encode("latin1"))
    (tmp_path / "c.txt").write_bytes("wide".encode("utf-16"))
    skipped = []
    assert list(iter_documents([tmp_path], skipped=skipped)) == [b"text"]
    assert [path.name for path in skipped] == ["b.txt", "c.txt"]


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_source_that_is_not_utf8_is_refused_with_its_first_bad_byte(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    path = tmp_path / "a.txt"
    path.write_bytes("größe ".encode() + b"gr\xf6\xdfer")
    with pytest.raises(ValueError, match=r"a.txt' is not UTF-8 text at byte 10: convert it first"):
        load_documents(path)
    path.write_bytes("größe".encode() + "ü".encode()[:1])
    with pytest.raises(ValueError, match="is not UTF-8 text at byte 7"):
        load_documents(path)
