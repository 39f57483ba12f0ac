import hashlib
import json
import resource

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from symexplin.lab.text import tokens as module
from symexplin.lab.text.tokenizer import Tokenizer, train_bpe
from symexplin.lab.text.tokens import open_tokens, write_tokens

BYTE = Tokenizer.from_name("byte")


class Sized:
    """A tokenizer of a given size, as far as a file asks."""

    def __init__(self, vocab_size):
        self.name, self.fingerprint, self.vocab_size = f"tokenizer ä-{vocab_size}", f"{vocab_size:064}", vocab_size


def write(path, arrays, tokenizer=BYTE):
    return write_tokens(path, arrays, tokenizer, documents=3, text_bytes=7)


@pytest.mark.parametrize(("vocab", "dtype"), [(256, np.uint8), (50_257, np.uint16), (100_000, np.uint32)])
@pytest.mark.parametrize("count", [0, 1, 999])
def test_other_readers_find_the_tokens(tmp_path, vocab, dtype, count):
    """The library's own reader is the reference."""
    path, tokenizer = tmp_path / "t", Sized(vocab)
    expected = np.random.default_rng(0).integers(0, vocab, count).astype(dtype)
    header = write(path, np.array_split(expected, 7), tokenizer)
    with safetensors.safe_open(path, framework="np") as file:
        assert list(file.keys()) == ["tokens"]
        stock, metadata = file.get_tensor("tokens"), file.metadata()
    found = open_tokens(path, tokenizer=tokenizer)
    for tokens in (stock, found.tokens):
        assert tokens.dtype == dtype
        np.testing.assert_array_equal(tokens, expected)
    assert found.header == header
    assert header.sha256 == hashlib.sha256(expected.tobytes()).hexdigest()
    assert {"tokenizer": tokenizer.name, "documents": "3", "text_bytes": "7", "tokens": str(count)}.items() <= (
        metadata.items()
    )
    start = int.from_bytes(path.read_bytes()[:8], "little") + 8
    assert start % 8 == 0
    assert list(tmp_path.iterdir()) == [path]


def test_the_tokens_stay_on_the_disk(tmp_path):
    write(tmp_path / "t", [np.arange(100, dtype=np.uint8)])
    tokens = open_tokens(tmp_path / "t").tokens
    assert type(tokens) is np.ndarray
    assert isinstance(tokens.base, np.memmap)
    assert not tokens.flags.writeable


def test_every_flipped_bit_of_the_tokens_is_found(tmp_path):
    path = tmp_path / "t"
    write(path, [np.arange(20, dtype=np.uint8)])
    whole = path.read_bytes()
    for place in range(len(whole) - 20, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="is damaged: its tokens are not those that were written"):
            open_tokens(path)
        assert len(open_tokens(path, verify=False).tokens) == 20


def test_every_flipped_bit_of_the_header_is_one_line_or_harmless(tmp_path):
    path = tmp_path / "t"
    header = write(path, [np.arange(20, dtype=np.uint8)])
    whole = path.read_bytes()
    for place in range(len(whole) - 20):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = open_tokens(path, tokenizer=BYTE)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017 (either is right)
        else:
            assert found.tokens.tolist() == list(range(20))
            assert found.header.sha256 == header.sha256


@pytest.mark.parametrize("keep", [0, 3, 8, 50, -1])
def test_truncated_files_are_named(tmp_path, keep):
    path = tmp_path / "t"
    write(path, [np.arange(20, dtype=np.uint8)])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"is damaged|is not a token file"):
        open_tokens(path, verify=False)


def test_a_longer_file_is_named(tmp_path):
    write(tmp_path / "t", [np.arange(20, dtype=np.uint8)])
    with (tmp_path / "t").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="bytes long, where its header says"):
        open_tokens(tmp_path / "t")


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "t"
    for content in (b"", b"text " * 99, bytes(100), b"\x02" + bytes(7) + b"[]"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a token file"):
            open_tokens(path)
    safetensors.numpy.save_file({"tokens": np.zeros(3)}, path)
    with pytest.raises(ValueError, match="is not a token file: a safetensors file without the format"):
        open_tokens(path)
    with pytest.raises(FileNotFoundError, match=r"no token file at .*nowhere"):
        open_tokens(tmp_path / "nowhere")


def test_a_newer_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_VERSION", 2)
    write(tmp_path / "t", [np.arange(20, dtype=np.uint8)])
    monkeypatch.undo()
    with pytest.raises(ValueError, match="is of version '2' of the format, and this program reads 1"):
        open_tokens(tmp_path / "t")


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    other = train_bpe([b"abc"], 257)
    write(tmp_path / "t", [np.arange(20, dtype=np.uint8)])
    with pytest.raises(ValueError, match=rf"another tokenizer: 'byte' \({BYTE.fingerprint[:12]}\), not 'bpe-257'"):
        open_tokens(tmp_path / "t", tokenizer=other)


def test_a_header_that_lies_is_refused(tmp_path):
    path = tmp_path / "t"
    write(path, [np.arange(20, dtype=np.uint8)])
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    for key, value in (("dtype", "U16"), ("dtype", "F32"), ("shape", [19]), ("data_offsets", [1, 21])):
        changed = {**table, "tokens": {**table["tokens"], key: value}}
        text = json.dumps(changed).encode().ljust(length)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        with pytest.raises(ValueError, match="its header does not fit together"):
            open_tokens(path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "t"
    write(path, [np.arange(20, dtype=np.uint8)])
    before = path.read_bytes()

    def broken():
        yield np.zeros(9, dtype=np.uint8)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write(path, broken())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(path, [np.zeros(200_000, dtype=np.uint8)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
