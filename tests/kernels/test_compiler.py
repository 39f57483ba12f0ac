"""The compiled libraries' cache: private, told apart by all that matters, and absent without a fuss."""

import os
import shutil
import subprocess
import sys

import pytest

from symexplin.kernels import compiler, cpu

pytestmark = pytest.mark.skipif(compiler.find_compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "symexplin"


@pytest.fixture
def source(tmp_path):
    (tmp_path / "answer.c").write_text("int answer(void) { return 42; }\n")
    return tmp_path / "answer.c"


def answer(source):
    found = compiler.load_library(source)
    return found if isinstance(found, str) else found[0].answer()


def test_compiles_once_for_each_source_compiler_and_processor(source, cache, monkeypatch):
    assert answer(source) == 42
    assert cache.stat().st_mode & 0o777 == 0o700
    found = compiler.find_compiler()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_run", lambda command, _: pytest.fail(f"compiled again: {command}"))
        assert answer(source) == 42
    monkeypatch.setattr(compiler, "find_compiler", lambda: found._replace(macros=found.macros + "#define __AVX99__\n"))
    answer(source)
    source.write_text(source.read_text() + "int more;\n")
    answer(source)
    assert len(list(cache.glob("*.so"))) == 3


@pytest.mark.parametrize("harm", ["broken", "writable folder", "no folder"])
def test_a_library_that_cannot_be_trusted_is_not_loaded(source, cache, tmp_path, monkeypatch, harm):
    assert answer(source) == 42
    (library,) = cache.glob("*.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))  # its libraries are not loaded yet by this process
    planted = tmp_path / "other" / "symexplin" / library.name
    planted.parent.mkdir(mode=0o700, parents=True)
    planted.write_bytes(b"not a library")
    if harm == "writable folder":
        planted.parent.chmod(0o777)
    elif harm == "no folder":
        shutil.rmtree(planted.parent)
        planted.parent.write_text("")
    assert answer(source) == 42
    if harm == "broken":
        assert planted.read_bytes() == library.read_bytes()
    elif harm == "writable folder":
        assert planted.read_bytes() == b"not a library"  # a temporary folder served


def test_what_another_user_owns_is_refused(source, monkeypatch):
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="another user"):
        compiler._check_private(source)


# By its path: the package around it would import torch.
LOAD = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
spec = spec_from_file_location("compiler", sys.argv[1])
compiler = module_from_spec(spec)
spec.loader.exec_module(compiler)
print(compiler.load_library(Path(sys.argv[2]))[0].answer())
"""


def test_one_process_compiles_while_others_wait(source, cache, tmp_path):
    """The compiler, a script around it, counts how often it makes a library."""
    count, script = tmp_path / "count", tmp_path / "slow-cc"
    real = shutil.which(compiler.find_compiler().command[0])
    script.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo >> {count}; sleep 1;; esac\nexec {real} "$@"\n')
    script.chmod(0o700)
    environment = os.environ | {"CC": str(script), "XDG_CACHE_HOME": str(cache.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOAD, compiler.__file__, str(source)]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in running] == ["42"] * 3
    assert count.read_text() == "\n"


def test_a_compile_that_fails_says_what_the_compiler_says(source):
    source.write_text("this is not C\n")
    assert "error: unknown type name" in str(answer(source))


def test_without_a_compiler_or_with_a_wrong_one_a_warning_says_what_that_costs(tmp_path, monkeypatch):
    monkeypatch.setenv("SYMEXPLIN_CPU_TARGET", "no-such-cpu")
    with pytest.warns(UserWarning, match=r"knows SYMEXPLIN_CPU_TARGET=no-such-cpu.*7 to 40 times as long"):
        assert cpu.load.__wrapped__() is None
    monkeypatch.delenv("SYMEXPLIN_CPU_TARGET")
    text = cpu._SOURCE.read_text()
    assert text.count("0.1666657719f") == 1
    (tmp_path / "cpu.c").write_text(text.replace("0.1666657719f", "0.17f"))  # as if miscompiled
    monkeypatch.setattr(cpu, "_SOURCE", tmp_path / "cpu.c")
    with pytest.warns(UserWarning, match="wrong results"):
        assert cpu.load.__wrapped__() is None
