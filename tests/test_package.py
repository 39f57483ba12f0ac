"""The package's public names, which are imported when first used."""

import subprocess
import sys

import pytest

import symexplin as sel


def test_every_public_name_is_there_and_is_what_it_says():
    for name in sel.__all__:
        value = getattr(sel, name)
        assert value.__name__.rpartition(".")[2] == name
        assert name in dir(sel)


def test_the_order_of_use_does_not_matter_and_a_configuration_needs_no_torch():
    names = [name for name in sel.__all__ if name != "functional"]
    code = "import sys, symexplin as sel; sel.preset('paper').resolve(64); assert 'torch' not in sys.modules; "
    code += f"[getattr(sel, name) for name in {names[::-1]}]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="module 'symexplin' has no attribute 'SLEAdamW'"):
        sel.SLEAdamW  # noqa: B018
