import dataclasses
import json
import os
import resource
import signal

import pytest
import safetensors
import safetensors.torch
import torch

from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.weights.files import (
    TensorSpec,
    iter_tensors,
    load_model,
    read_specs,
    read_tensors,
    save_model,
    write_tensors,
)

TINY = ModelConfig(width=16, depth=2, heads=2, vocab_size=40, context=8)


@pytest.mark.parametrize(
    ("dtype", "tie_head"),
    [(torch.float64, True), (torch.bfloat16, False)],
)
def test_round_trip_is_bit_equal(tmp_path, tie_head, dtype):
    model = Transformer(dataclasses.replace(TINY, tie_head=tie_head)).to(dtype)
    path = tmp_path / "model.safetensors"
    save_model(model, path)
    copy = load_model(path)
    assert copy.config == model.config
    state, loaded = model.state_dict(), copy.state_dict()
    assert list(state) == list(loaded)
    assert all(torch.equal(state[name], loaded[name]) and loaded[name].dtype == dtype for name in state)
    assert (copy.head.weight is copy.embedding.weight) == tie_head


def test_the_file_is_plain(tmp_path):
    """Any safetensors reader finds ordinary names and shapes, and the shape of the model as JSON."""
    model = Transformer(TINY)
    save_model(model, tmp_path / "m")
    with safetensors.safe_open(tmp_path / "m", framework="np") as file:
        assert json.loads(file.metadata()["config"]) == dataclasses.asdict(TINY)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_a_file_without_config_is_refused(tmp_path):
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "m")
    with pytest.raises(ValueError, match="without a config"):
        load_model(tmp_path / "m")


STATE = {"b.weight": torch.ones(3, 4), "a": torch.arange(5, dtype=torch.bfloat16), "c": torch.tensor(2.0)}


def test_any_file_is_read_in_its_order(tmp_path):
    safetensors.torch.save_file(STATE, tmp_path / "m", {"by": "me"})
    specs, metadata = read_specs(tmp_path / "m")
    assert list(specs) == ["b.weight", "c", "a"]  # wide types first, as safetensors writes
    assert specs["a"] == TensorSpec((5,), "BF16")
    assert metadata == {"by": "me"}
    tensors, metadata = read_tensors(str(tmp_path / "m"))
    assert list(tensors) == list(specs) == [name for name, _ in iter_tensors(tmp_path / "m")]
    assert metadata == {"by": "me"}
    assert all(
        torch.equal(tensors[name], value) and tensors[name].dtype == value.dtype for name, value in STATE.items()
    )


def sharded(folder):
    folder.mkdir()
    safetensors.torch.save_file({"b.weight": STATE["b.weight"]}, folder / "1.safetensors", {"format": "pt"})
    safetensors.torch.save_file({"a": STATE["a"], "c": STATE["c"]}, folder / "2.safetensors")
    weight_map = {"c": "2.safetensors", "b.weight": "1.safetensors", "a": "2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_folders(tmp_path):
    tensors, metadata = read_tensors(sharded(tmp_path / "shards"))
    assert list(tensors) == ["b.weight", "c", "a"]
    assert metadata == {"format": "pt"}
    assert all(torch.equal(tensors[name], value) for name, value in STATE.items())
    write_tensors(tmp_path / "shards" / "model.safetensors", {"one": torch.ones(1)})
    assert list(read_specs(tmp_path / "shards")[0]) == ["one"]  # the whole file before the shards


def test_pickles_are_never_opened(tmp_path):
    torch.save(STATE, tmp_path / "new")
    torch.save(STATE, tmp_path / "old", _use_new_zipfile_serialization=False)
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=f"'{path}' is not .* may run code .* safetensors.torch.save_file"):
            read_tensors(path)


def test_damaged_files(tmp_path):
    write_tensors(tmp_path / "good", STATE)
    good = (tmp_path / "good").read_bytes()
    cut = {f"cut{n}": good[:n] for n in (0, 1, 20, len(good) - 1)}
    for name, content in {**cut, "long": good + b"x", "text": b"version https://git-lfs", "nul": bytes(99)}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"'{tmp_path / name}' is not a complete safetensors file"):
            read_tensors(tmp_path / name)


def test_paths_that_lead_nowhere(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        read_tensors(tmp_path / "none")
    with pytest.raises(ValueError, match=f"model.safetensors.index.json, got '{tmp_path}'"):
        read_tensors(tmp_path)


def test_a_full_disk_leaves_the_old_file(tmp_path):
    write_tensors(tmp_path / "m", STATE)
    before, limit = (tmp_path / "m").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write '.*m': .*too large"):
            write_tensors(tmp_path / "m", {"a": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "m").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_files_have_the_mode_of_any_new_file(tmp_path):
    (tmp_path / "m.tmp").touch(0o600)  # of a run that was killed
    before = os.umask(0o077)
    try:
        write_tensors(tmp_path / "m", STATE, {"by": "me"})
        (tmp_path / "other").touch()
    finally:
        os.umask(before)
    assert (tmp_path / "m").stat().st_mode == (tmp_path / "other").stat().st_mode == 0o100600


def test_the_same_content_gives_the_same_bytes(tmp_path):
    entries = {f'{letter}é\n\x01\x7f\u2028"\\': f"{letter} → 𝄞\t\b\f/" for letter in "fbdace"}
    found = set()
    for number in range(6):
        write_tensors(tmp_path / str(number), STATE, dict(sorted(entries.items(), reverse=bool(number % 2))))
        found.add((tmp_path / str(number)).read_bytes())
    assert len(found) == 1
    tensors, metadata = read_tensors(tmp_path / "0")
    assert metadata == entries
    assert all(torch.equal(tensors[name], value) for name, value in STATE.items())


def test_views_and_strides_are_written_as_values(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    write_tensors(tmp_path / "m", {"t": whole.mT, "part": whole[1]})
    tensors, _ = read_tensors(tmp_path / "m")
    assert torch.equal(tensors["t"], whole.mT)
    assert torch.equal(tensors["part"], whole[1])


def rewritten(path, header=None, change=None):
    """Write a tiny model's file with another header or other tensors."""
    state = dict(Transformer(TINY).state_dict())
    if change is not None:
        change(state)
    safetensors.torch.save_file(state, path, {"config": header or json.dumps(dataclasses.asdict(TINY))})
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"widht": 1}', "header of '.*m': config: is of another version .*'widht'"),
        ('{"width": "16"}', "header of '.*m': config: width must be a whole number"),
    ],
)
def test_headers_that_are_no_config(tmp_path, header, message):
    with pytest.raises(ValueError, match=message):
        load_model(rewritten(tmp_path / "m", header))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("norm.weight"), r"'.*m' does not fit its model: .*norm.weight"),
        (lambda s: s.update({"norm.weight": torch.ones(4)}), "'.*m' does not fit its model: .*norm.weight"),
    ],
)
def test_tensors_that_do_not_fit_the_config(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as found:
        load_model(rewritten(tmp_path / "m", change=change))
    assert "\n" not in str(found.value)
