import http.server
import logging
import sys
import threading

import pytest

from symexplin.lab.text import hub
from symexplin.lab.text.documents import load_documents
from symexplin.lab.text.hub import hub_dataset, hub_file

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.usefixtures("offline")
def test_a_file_out_of_reach_is_one_line(caplog, capfd, monkeypatch):
    download, asked = huggingface_hub.hf_hub_download, []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: asked.append(k) or download(*a, **k))
    with pytest.raises(ValueError, match=r"tokenizer.json of 'some/model' would be fetched .* hub.*: give a path") as e:
        hub_file("some/model", "tokenizer.json", "give a path")
    assert "\n" not in str(e.value)
    assert asked == [{"local_files_only": True}]  # the client's own retries take 23 seconds
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("offline")
def test_a_cached_file_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_reachable", lambda: pytest.fail("asked the network"))
    model = tmp_path / "cache" / "models--some--model"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "snapshots" / "abc" / "tokenizer.json").write_text("cached")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    assert hub_file("some/model", "tokenizer.json", "").read_text() == "cached"


def test_a_hub_that_answers_is_reachable(monkeypatch):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert hub._reachable()
        server.shutdown()


@pytest.mark.usefixtures("offline")
def test_a_dataset_out_of_reach_is_one_line(capfd, monkeypatch):
    datasets = pytest.importorskip("datasets")
    load, offline = datasets.load_dataset, []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: offline.append(datasets.config.HF_HUB_OFFLINE) or load(*a, **k)
    )
    settings = (datasets.config.HF_HUB_OFFLINE, datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity())
    with pytest.raises(ValueError, match=r"dataset 'some/data' \(small\) would be fetched from the .* local file") as e:
        hub_dataset("some/data", "small", "train")
    assert "\n" not in str(e.value)
    assert capfd.readouterr() == ("", "")
    after = (datasets.config.HF_HUB_OFFLINE, datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity())
    assert after == settings
    assert offline == [True]  # or the client would retry for 23 seconds


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"source 'hf:x' needs the package 'datasets': pip install 'symexplin\[hf\]'"):
        hub_dataset("x", None, "train")


def test_local_folders_of_datasets(tmp_path, monkeypatch, capfd):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(hub, "_reachable", lambda: pytest.fail("asked the network"))
    rows = datasets.Dataset.from_dict({"text": ["one", "two\0three", None]})
    expected = [b"one", b"two", b"three"]
    rows.save_to_disk(tmp_path / "lone")
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path / "splits")
    rows.to_parquet(tmp_path / "files" / "data.parquet")
    capfd.readouterr()
    for name in ("lone", "splits", "files"):
        assert load_documents(f"hf:{tmp_path / name}") == expected
    assert len(hub_dataset(str(tmp_path / "splits"), None, "test")) == 1
    for name in ("splits", "files"):
        with pytest.raises(ValueError, match=r"valid.*train|train.*valid"):
            hub_dataset(str(tmp_path / name), None, "valid")
    with pytest.raises(FileNotFoundError, match=r"existing folders after 'hf:', got './nowhere'"):
        hub_dataset("./nowhere", None, "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        hub_dataset(str(tmp_path / "empty"), None, "train")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
