"""The compiled libraries' cache: private, told apart by all that matters, and absent without a fuss."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from symexplin.kernels import compiler, cpu

SOURCE = "int answer(void) { return ANSWER; }\n"

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


def answer(source: Path, value: int = 42) -> int | None:
    library = compiler.load_library(source, (f"-DANSWER={value}",))
    return None if library is None else library.answer()


def test_compiles_once_and_keeps_the_library(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(source) == 42
    (library,) = cache.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700
    assert not library.stat().st_mode & 0o022
    monkeypatch.setattr(compiler, "_run", lambda command: pytest.fail(f"compiled again: {command}"))
    assert answer(source) == 42


def test_source_headers_flags_compiler_and_processor_are_told_apart(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(source) == 42
    assert answer(source, 43) == 43
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
    assert len(list(cache.iterdir())) == 5


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
    (library,) = cache.iterdir()
    folder = tmp_path / "other" / "symexplin"
    folder.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    (folder / library.name).write_bytes(b"not a library")
    (folder / library.name).chmod(0o600)
    return folder / library.name


def test_a_broken_library_is_replaced(source: Path, planted: Path) -> None:
    assert answer(source) == 42
    assert planted.stat().st_size > 100


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


def test_several_at_once_compile_without_harm(source: Path, cache: Path) -> None:
    answers: list[int | None] = []
    threads = [threading.Thread(target=lambda: answers.append(answer(source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [42] * 4
    assert len(list(cache.iterdir())) == 1


def test_a_failing_compile_is_quiet_and_logged(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.write_text("this is not C\n")
    with caplog.at_level(logging.INFO, logger="symexplin"):
        assert answer(source) is None
    assert "readable formulas" in caplog.text


FIRST_USE = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
from symexplin import kernels
for _ in range(3):
    print(kernels.describe("cpu"))
"""


def test_without_a_compiler_the_readable_formulas_serve(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_USE],
        env=os.environ | {"PATH": str(tmp_path), "CC": "", "OMP_NUM_THREADS": "1", "SYMEXPLIN_KERNELS": "auto"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split("\n")[:3] == ["readable formulas"] * 3
    assert ran.stderr.count("INFO symexplin no C compiler") == 1


def test_a_library_that_computes_wrongly_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The self-check at load: fma without its product passes for a miscompiled library."""
    monkeypatch.setitem(cpu._DEFINES, torch.float32, ("-O0", "-D__builtin_fmaf(a,b,c)=((void)(a),(void)(b),(c))"))
    with caplog.at_level(logging.INFO, logger="symexplin"):
        assert cpu._library.__wrapped__(torch.float32) is None
    assert caplog.text.count("compute wrongly") == 1


def test_the_chosen_compiler_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiler.find_compiler()
    assert found is not None
    monkeypatch.setenv("CC", " ".join([*found.command, "-DSPECIAL=1"]))
    compiler.find_compiler.cache_clear()
    try:
        again = compiler.find_compiler()
    finally:
        compiler.find_compiler.cache_clear()
    assert again is not None
    assert "#define SPECIAL 1" in again.macros
    assert again.name == found.name
