"""Compiling, caching and loading: whatever goes wrong, there are kernels or one warning that says what to do."""

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest

import builds
from states import STATES
from symexplin.kernels import compiler, cpu

pytestmark = pytest.mark.skipif(compiler.find_compiler() is None, reason="no C compiler")

SOURCE = Path(compiler.__file__).with_name("cpu.c")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the macros of a compiler and files that it could write, good and bad ones."""
    folder, real = tmp_path_factory.mktemp("made"), compiler.find_compiler()
    (folder / "macros").write_text(real.macros)
    (folder / "every").write_text(real.macros + "#define __XOP__ 1\n#define __AVX512F__ 1\n")  # no processor has both
    (folder / "answer.c").write_text("int answer(void) { return 42; }\n")
    compiler.compile_library(real, folder / "answer.c", folder / "strange")
    source = SOURCE.read_text()
    assert source.count("0.1666657719f") == 1
    (folder / "wrong.c").write_text(source.replace("0.1666657719f", "0.17f"))
    compiler.compile_library(real, folder / "wrong.c", folder / "wrong")
    good = builds.library("gcc" if shutil.which("gcc") else "clang", "").read_bytes()
    (folder / "good").write_bytes(good)
    (folder / "empty").touch()
    (folder / "cut").write_bytes(good[: len(good) // 2])
    (folder / "header").write_bytes(good[:40])
    (folder / "other").write_bytes(good[:18] + bytes([good[18] ^ 0x7F]) + good[19:])  # of another processor
    (folder / "zeros").write_bytes(good[:4096] + bytes(len(good) - 4096))  # as after a power failure
    return folder


class Place:
    """Where a test's compiler, its cache and its temporary files are."""

    def __init__(self, folder, made, monkeypatch):
        self.made, self.cache, self.temporary = made, folder / "cache" / "symexplin", folder / "tmp"
        self.script = folder / "bin" / "cc"
        for path in (self.temporary, self.script.parent):
            path.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        for name, value in (("PATH", self.script.parent), ("XDG_CACHE_HOME", self.cache.parent), ("CC", "")):
            monkeypatch.setenv(name, str(value))

    def write(self, name):
        return f'/bin/cp {self.made / name} "$2"'

    def compiler(self, probe="", build=""):
        """Write a compiler that runs one shell command to print macros, and one to write the library "$2"."""
        probe, build = probe or f"/bin/cat {self.made / 'macros'}", build or self.write("good")
        case = f'case "$*" in *-dM*)\n{probe}\n;; *) while [ "$1" != -o ]; do shift; done\n{build}\n;; esac'
        self.script.write_text(f"#!/bin/sh\n{case}\n")
        self.script.chmod(0o700)

    def load(self):
        """Return the name of the kernels that a new process would use, and its warnings."""
        compiler._find.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernels = cpu.load.__wrapped__()
        assert not list(self.temporary.iterdir())
        assert not list(self.cache.glob("symexplin-*"))  # nothing is left of a draft
        return kernels and kernels.name, [str(warning.message) for warning in caught]


@pytest.fixture
def place(tmp_path, made, monkeypatch):
    yield Place(tmp_path, made, monkeypatch)
    compiler._find.cache_clear()


def assert_compiled(place):
    name, said = place.load()
    assert name.startswith("compiled C")
    assert said == []


def assert_plain(place, reason):
    name, (warning,) = place.load()
    assert name is None
    assert reason in warning
    assert "Install a C compiler" in warning


ENDINGS = {  # of the processes that run the compiler: what to do instead of its work, and what the warning says
    "fails in Latin-1": ("printf 'd\\351j\\340' >&2; exit 1", "d\ufffdj\ufffd"),
    "writes nothing": ("exit 0", "No such file"),
    "is killed": ("kill -9 $$", "SIGKILL"),
    "is stopped": ("kill -STOP $$", "timed out"),
}


@pytest.mark.parametrize("stage", ["probe", "build"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_compiler_that_prints_no_macros_or_writes_no_library(place, ending, stage, monkeypatch):
    does, says = ENDINGS[ending]
    for limit in ("_SECONDS", "_PROBE_SECONDS") if ending == "is stopped" else ():
        monkeypatch.setattr(compiler, limit, 0.5)
    place.compiler(**{stage: does})
    assert_plain(place, says if stage == "build" else "no C compiler found")


def test_no_compiler_at_all(place):
    assert_plain(place, "no C compiler found")


OUTPUTS = {
    "empty": "file too short",
    "cut": "cut short",
    "header": "cut short",
    "other": "",
    "strange": "sel_run",
    "wrong": "wrong results",
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_compiler_that_writes_something_else(place, output):
    place.compiler(build=place.write(output))
    assert_plain(place, OUTPUTS[output])
    assert not list(place.cache.glob("*"))
    place.compiler()
    assert_compiled(place)


# Whatever the content, its digest is not that in the name; the same under the name of the content is loaded.
DAMAGED = [("zeros", False), ("cut", False), *((content, True) for content in ("empty", "other", "strange", "wrong"))]


@pytest.mark.parametrize(("content", "is_named"), DAMAGED)
def test_a_library_in_the_cache_that_is_not_right_is_compiled_again(place, content, is_named):
    place.compiler()
    assert_compiled(place)
    (library,) = place.cache.glob("*.so")
    good, bad = library.read_bytes(), (place.made / content).read_bytes()
    library.unlink()  # which this process has open
    name = f"{library.stem.rpartition('-')[0]}-{compiler._digest(bad if is_named else good)}.so"
    library.with_name(name).write_bytes(bad)
    assert_compiled(place)
    assert good in [path.read_bytes() for path in place.cache.glob("*.so")]


def test_a_library_in_the_cache_is_used_again(place):
    place.compiler()
    with STATES["bfloat16"]():  # the check of the kernels does not depend on the default dtype
        assert_compiled(place)
    assert place.cache.stat().st_mode & 0o777 == 0o700
    place.compiler(build="exit 1")
    assert_compiled(place)


FOLDERS = {  # what is wrong with the cache
    "a file": lambda cache: (cache.parent.mkdir(), cache.write_text("")),
    "under a file": lambda cache: cache.parent.write_text(""),
    "writable by others": lambda cache: (cache.mkdir(parents=True), cache.chmod(0o777)),
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_another_folder_serves_where_the_cache_cannot(place, fault):
    FOLDERS[fault](place.cache)
    place.compiler()
    assert_compiled(place)
    assert not list(place.cache.glob("*"))


FULL = "echo No space left on device >&2; exit 1"


@pytest.mark.parametrize("full", ["cache", "tmp", "cache tmp"])
def test_a_full_disk(place, full):
    """As compilers say it, which write their temporary files there, too."""
    folders = {"cache": place.cache, "tmp": place.temporary}
    cases = " ".join(f'case "$TMPDIR" in {folders[name]}/*) {FULL};; esac;' for name in full.split())
    place.compiler(build=cases + place.write("good"))
    if full == "cache tmp":
        assert_plain(place, "No space left on device")
    else:
        assert_compiled(place)
    assert bool(list(place.cache.glob("*.so"))) == (full == "tmp")


def test_what_a_signal_handler_raises_passes_and_the_next_step_works(place):
    place.compiler(build=f"/bin/sleep 1; {place.write('good')}")

    def handler(*_):
        raise RuntimeError("from the handler")

    before = signal.signal(signal.SIGUSR1, handler)
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGUSR1]).start()
    try:
        with pytest.raises(RuntimeError, match="from the handler"):
            place.load()
        assert not list(place.cache.glob("*.so"))  # it did not wait for the compiler
    finally:
        signal.signal(signal.SIGUSR1, before)
    while not list(place.cache.glob("*.so")):
        time.sleep(0.02)
    assert_compiled(place)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the processor's instructions are not known"
)
def test_a_target_with_instructions_that_the_processor_lacks(place, monkeypatch):
    monkeypatch.setenv("SYMEXPLIN_CPU_TARGET", "imaginary")
    place.compiler(probe=f"/bin/cat {place.made / 'every'}")
    assert_plain(place, "of SYMEXPLIN_CPU_TARGET=imaginary")
    place.compiler(probe="exit 1")
    assert_plain(place, "no C compiler found that knows SYMEXPLIN_CPU_TARGET=imaginary")


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "answer.c").write_text("int answer(void) { return 42; }\n")
    return tmp_path / "answer.c"


def answer(source):
    return compiler.load_library(source, lambda library, _: library.answer())


def test_each_source_target_and_compiler_has_its_library(source, monkeypatch):
    cache = compiler.cache_folder()
    assert answer(source) == 42
    assert answer(source) == 42
    assert len(list(cache.glob("*.so"))) == 1
    source.write_text("int answer(void) { return 43; }\n")
    assert answer(source) == 43
    assert len(list(cache.glob("*.so"))) == 2
    real = compiler.find_compiler()
    monkeypatch.setenv("CC", f"{shutil.which(real.command[0])} -DMORE=1")
    assert answer(source) == 43
    assert len(list(cache.glob("*.so"))) == 3


def test_what_another_user_owns_is_not_used(source, monkeypatch):
    owner = os.getuid()
    assert answer(source) == 42
    (library,) = compiler.cache_folder().glob("*.so")
    library.unlink()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert answer(source) == 42
    assert not list(compiler.cache_folder().iterdir())


# By its path: the package around it would import torch.
LOAD = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
spec = spec_from_file_location("compiler", sys.argv[1])
compiler = module_from_spec(spec)
spec.loader.exec_module(compiler)
print(compiler.load_library(Path(sys.argv[2]), lambda library, _: library.answer()))
"""


def loading(source):
    """Start a process that compiles and loads a source."""
    command = [sys.executable, "-c", LOAD, compiler.__file__, str(source)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_that_compile_at_once_end_with_one_library(source):
    running = [loading(source) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in running] == ["42"] * 3
    (library,) = compiler.cache_folder().iterdir()
    assert library.suffix == ".so"


def test_a_process_that_is_stopped_while_it_compiles_holds_up_no_other(place):
    begun = place.temporary.with_name("begun")
    place.compiler(build=f"[ -e {begun} ] || {{ : > {begun}; exec /bin/sleep 9; }}\n{place.write('good')}")
    with loading(SOURCE) as other:
        while not begun.exists():
            time.sleep(0.02)
        other.send_signal(signal.SIGSTOP)
        compiler._find.cache_clear()
        assert cpu.load.__wrapped__().name.startswith("compiled C")
        other.kill()
