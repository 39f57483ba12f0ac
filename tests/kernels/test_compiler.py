"""The compiled libraries' cache: private, told apart by all that matters, and absent without a fuss."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from symexplin.kernels import compiler, cpu

SOURCE = "int answer(void) { return 42; }\n"

pytestmark = pytest.mark.skipif(compiler.find_compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "symexplin"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "answer.c"
    path.write_text('#include "extra.h"\n' + SOURCE)
    (tmp_path / "code" / "extra.h").write_text("\n")
    return path


def answer(source: Path) -> int | str:
    found = compiler.load_library(source)
    return found if isinstance(found, str) else found[0].answer()


def test_compiles_once_and_keeps_the_library(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(source) == 42
    (library,) = cache.glob("*.so")
    assert cache.stat().st_mode & 0o777 == 0o700
    assert not library.stat().st_mode & 0o022
    monkeypatch.setattr(compiler, "_run", lambda command: pytest.fail(f"compiled again: {command}"))
    assert answer(source) == 42


def test_source_headers_flags_compiler_and_processor_are_told_apart(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(source) == 42
    source.write_text(source.read_text() + "int more;\n")
    answer(source)
    (source.parent / "extra.h").write_text("int still_more;\n")
    answer(source)
    found = compiler.find_compiler()
    assert found is not None
    monkeypatch.setattr(
        compiler, "find_compiler", lambda: found._replace(macros=found.macros + "#define __AVX99__ 1\n")
    )
    answer(source)
    assert len(list(cache.glob("*.so"))) == 4


def test_the_macros_name_what_the_processor_has() -> None:
    """A library for other features must not be taken from a home that machines share."""
    found = compiler.find_compiler()
    assert found is not None
    assert "-march=native" not in found.flags or "__GNUC__" in found.macros
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
        assert ("__AVX2__" in found.macros) == ("avx2" in flags.split())


def test_an_unwritable_cache_is_done_without(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert answer(source) == 42


@pytest.fixture
def planted(source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that cannot be loaded, under the very name looked for, in a cache not used before."""
    assert answer(source) == 42
    (library,) = cache.glob("*.so")
    folder = tmp_path / "other" / "symexplin"
    folder.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    (folder / library.name).write_bytes(b"not a library")
    (folder / library.name).chmod(0o600)
    return folder / library.name


def test_a_broken_library_is_replaced(source: Path, planted: Path) -> None:
    assert answer(source) == 42
    assert planted.stat().st_size > 100


def test_a_library_that_was_cut_off_is_replaced(source: Path, cache: Path) -> None:
    """Loaded, it would end the process at first use (SIGBUS)."""
    assert answer(source) == 42
    (library,) = cache.glob("*.so")
    whole = library.read_bytes()
    copy = library.with_name("cut")
    copy.write_bytes(whole[: len(whole) // 2])
    copy.chmod(0o600)
    copy.replace(library)  # not in place: this process has the other one loaded
    assert answer(source) == 42
    assert library.stat().st_size == len(whole)


def test_a_library_that_others_can_write_is_replaced(source: Path, planted: Path) -> None:
    planted.chmod(0o666)
    assert answer(source) == 42
    assert not planted.stat().st_mode & 0o022


def test_a_folder_that_others_can_write_is_not_used(source: Path, planted: Path) -> None:
    planted.parent.chmod(0o777)
    assert answer(source) == 42  # from a temporary folder
    assert planted.read_bytes() == b"not a library"


def test_what_another_user_owns_is_not_used(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    real = compiler._check_private
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: owner + 1)
        with pytest.raises(PermissionError, match="another user"):
            real(planted)
    real(planted)


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


def test_one_process_compiles_while_others_wait(source: Path, cache: Path, tmp_path: Path) -> None:
    """The compiler, a script around it, counts how often it makes a library."""
    found = compiler.find_compiler()
    assert found is not None
    count, script = tmp_path / "count", tmp_path / "slow-cc"
    real = shutil.which(found.command[0])
    script.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo >> {count}; sleep 1;; esac\nexec {real} "$@"\n')
    script.chmod(0o700)
    environment = os.environ | {"CC": str(script), "XDG_CACHE_HOME": str(cache.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOAD, compiler.__file__, str(source)]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in running] == ["42"] * 3
    assert count.read_text() == "\n"
    assert len(list(cache.glob("*.so"))) == 1


def test_a_compile_that_fails_says_what_the_compiler_says(source: Path) -> None:
    source.write_text("this is not C\n")
    assert "error: unknown type name" in str(answer(source))


FIRST_USE = """
from symexplin import kernels
for _ in range(3):
    print(kernels.describe("cpu"))
"""


def first_use(**variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SYMEXPLIN_KERNELS": "auto"} | variables
    command = [sys.executable, "-c", FIRST_USE]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def test_without_a_compiler_one_warning_says_what_that_costs(tmp_path: Path) -> None:
    ran = first_use(PATH=str(tmp_path), CC="")
    assert ran.stdout.split("\n")[:3] == ["readable formulas"] * 3
    assert ran.stderr.count("no C compiler found") == 1
    assert "ten times as long" in ran.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the targets are x86 processors")
def test_another_processor_can_be_named() -> None:
    ran = first_use(SYMEXPLIN_CPU_TARGET="x86-64-v2")
    assert ran.stdout.split("\n")[0].endswith(", SSE2)")
    assert not ran.stderr


def test_an_unknown_processor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMEXPLIN_CPU_TARGET", "no-such-cpu")
    with pytest.warns(UserWarning, match="no C compiler found that knows SYMEXPLIN_CPU_TARGET=no-such-cpu"):
        assert cpu.load.__wrapped__() is None


def test_a_library_that_computes_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check at load: a build with another coefficient passes for a miscompiled one."""
    real = compiler.load_library
    wrong = Path(cpu.__file__).parent

    def spoilt(source: Path) -> object:
        folder = compiler.cache_folder() / "wrong"
        folder.mkdir(parents=True, exist_ok=True)
        for file in wrong.glob("*.[ch]"):
            (folder / file.name).write_text(file.read_text().replace("0.055503674f", "0.056f"))
        return real(folder / source.name)

    monkeypatch.setattr(cpu, "load_library", spoilt)
    with pytest.warns(UserWarning, match="wrong results"):
        assert cpu.load.__wrapped__() is None


def test_the_chosen_compiler_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiler.find_compiler()
    assert found is not None
    monkeypatch.setenv("CC", " ".join([*found.command, "-DSPECIAL=1"]))
    again = compiler.find_compiler()
    assert again is not None
    assert "#define SPECIAL 1" in again.macros
    assert again.name == found.name
