import pytest

from corpora import prepared


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small prepared text, the same in every module."""
    return prepared(tmp_path_factory.mktemp("data"))
