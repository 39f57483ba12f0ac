import os
from pathlib import Path

import pytest
import torch
from markupsafe import Markup

from corpora import prepared

# Triton reads this when it is imported: its interpreter runs the kernels for GPUs on a CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    """Put files with slow tests first: what is left for the end is short, and no worker waits long for the other."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small prepared text, the same in every module."""
    return prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def text(data):
    """The file of text that the data were prepared from."""
    return str(Path(data).with_name("text"))


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the charts of reports empty, for tests of other things: to draw takes longer than to train."""
    from symexplin.lab.report import figures

    monkeypatch.setattr(figures, "chart", lambda *_, **__: Markup("<svg></svg>"))
