import pytest

from symexplin.lab.extras import extra


def test_a_missing_library_is_named_with_the_key_and_the_remedy():
    with pytest.raises(ModuleNotFoundError, match=r"compress needs nowhere: pip install 'symexplin\[evidence\]'"):
        extra("nowhere.part", "compress")


def test_a_module_missing_inside_a_library_is_its_own_error():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'json\.nowhere'"):
        extra("json.nowhere", "compress")
