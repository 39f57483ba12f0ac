import pytest

from symexplin.lab.text.dataset import check_same, claimed_dataset


def test_a_dataset_lies_outside_its_sources(tmp_path):
    for inside in (tmp_path, tmp_path / "out"):
        refused = pytest.raises(ValueError, match="out must lie outside the sources")
        with refused, claimed_dataset(inside, [str(tmp_path)]):
            pass
    assert not (tmp_path / "out").exists()


def test_models_and_texts_are_no_datasets(tmp_path):
    (tmp_path / "tokenizer.json").write_text("mine")
    refused = pytest.raises(ValueError, match=r"an earlier dataset, got .* with 'tokenizer.json'")
    with refused, claimed_dataset(tmp_path, []):
        pass
    assert (tmp_path / "tokenizer.json").read_text() == "mine"


def test_differences_are_told(tmp_path):
    check_same(tmp_path, {"a": [1]}, {"a": [1]})
    with pytest.raises(ValueError, match="a was 1, now None; b was None, now 2"):
        check_same(tmp_path, {"a": 1}, {"b": 2})
