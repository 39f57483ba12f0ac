"""The package's public names, which are imported when first used."""

import subprocess
import sys

import pytest

import symexplin as sel


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_public_name_is_there_and_is_what_it_says():
    for name in sel.__all__:
        value = getattr(sel, name)
        assert value.__name__.rpartition(".")[2] == name
        assert name in dir(sel)


@pytest.mark.parametrize("first", ["convert", "SELAdamW"])
def test_the_order_of_use_does_not_matter(first):
    names = [name for name in sel.__all__ if name != "functional"]
    code = f"import symexplin as sel; sel.{first}; print(all(callable(getattr(sel, n)) for n in {names}))"
    assert run(code) == "True"


def test_importing_the_package_loads_no_torch():
    assert run("import sys, symexplin; print('torch' in sys.modules)") == "False"


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="module 'symexplin' has no attribute 'SLEAdamW'"):
        sel.SLEAdamW  # noqa: B018
