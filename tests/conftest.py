import contextlib
import gc
import os
from pathlib import Path

import pytest
import torch
from markupsafe import Markup

import states
from corpora import prepared

# Triton reads this when it is imported: its interpreter runs the kernels for GPUs on a CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Scripts that tests start in other processes: collecting them imports large libraries.
collect_ignore = ["accelerate_cpu.py", "lightning_sharded.py", "preloaded.py"]

# Whose tests are also run in other states of the process, with the first case of each.
_IN_STATES = (
    *("test_closed", "test_spec", "test_functional", "test_init", "test_inverse", "test_modules"),
    *("test_products", "test_routing", "test_transform", "test_adamw", "test_annealing", "test_checks", "test_entry"),
    *("test_packs", "test_groups", "test_optimizer", "test_own_rule", "test_state"),
    *("test_stats", "test_writes"),
)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Disable the garbage collector while tests are imported, and exempt these objects: they live to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Exit a worker of pytest-xdist at once: shutting down its interpreter takes seconds."""
    if hasattr(config, "workerinput"):
        os._exit(0)
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector):
    """Add the copies of a test in other states of the process."""
    items = yield
    if not isinstance(items, list) or collector.path.stem not in _IN_STATES:
        return items
    return [*items, *states.copies(items[0])] if items else items


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run such a copy."""
    mark = pyfuncitem.get_closest_marker("process_state")
    with states.enter(*mark.args) if mark else contextlib.nullcontext():
        return (yield)


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
    from symexplin.lab.report import charts

    monkeypatch.setattr(charts, "chart", lambda *_, **__: Markup("<svg></svg>"))
