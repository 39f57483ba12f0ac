import pytest
from markupsafe import Markup

from corpora import prepared


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small prepared text, the same in every module."""
    return prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the charts of reports empty, for tests of other things: to draw takes longer than to train."""
    from symexplin.lab.report import figures

    for name in ("chart", "histogram"):
        monkeypatch.setattr(figures, name, lambda *_, **__: Markup("<svg></svg>"))
