"""The compiled kernels' loops are vector instructions on every processor, whatever its compiler would make of loops."""

import re
import shutil
import subprocess

import pytest

from cpu_targets import TARGETS, build
from symexplin.kernels.compiler import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")

# Arithmetic on one float or double: mulss, vaddsd, vfmadd231ss, vsqrtss, vcvtss2sd.
SCALAR = re.compile(r"\bv?(?:add|sub|mul|div|sqrt|min|max|cvt|fn?m(?:add|sub)\d+)\w*(?:ss|sd)\b")
PACKED = re.compile(r"\bv?(?:add|sub|mul|div|sqrt|min|max|fn?m(?:add|sub)\d+)p[sd]\b")
LINE = re.compile(r"^\s*([0-9a-f]+):\t(\S+)(.*)$")
FUNCTION = re.compile(r"^[0-9a-f]+ <(\w+)(?:\.\w+)*>:$")
# Where a step's time goes, and how many loops each has: one per kind of map and of numbers.
HOT = {"pull_pair": 10, "update_one": 6, "convert_one": 4}


def functions(library):
    """The instructions of each function: (address, name, operands)."""
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump (binutils)")
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True
    )
    found, name = {}, None
    for line in listing.stdout.splitlines():
        if start := FUNCTION.match(line):
            name = start[1]
        elif name and (code := LINE.match(line)):
            found.setdefault(name, []).append((int(code[1], 16), code[2], code[3]))
    return found


def loops(code):
    """The bodies of the innermost loops: from where a backward jump leads to the jump."""
    spans = []
    for at, name, operands in code:
        target = re.match(r"\s*([0-9a-f]+)\b", operands)
        if name.startswith("j") and target and code[0][0] <= int(target[1], 16) <= at:
            spans.append((int(target[1], 16), at))
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    return [[name for at, name, _ in code if first <= at <= last] for first, last in inner]


@pytest.mark.parametrize("target", TARGETS)
def test_the_hot_loops_have_no_scalar_arithmetic(target):
    found = functions(build(target))
    if not any(re.match(r"v?mov[ua]ps", name) for code in found.values() for _, name, _ in code):
        pytest.skip("not an x86 processor: the patterns are those of its instructions")
    for name, least in HOT.items():
        hot = [body for body in loops(found[name]) if sum(bool(PACKED.match(code)) for code in body) >= 20]
        assert len(hot) >= least, (name, len(hot))
        assert not [code for body in hot for code in body if SCALAR.match(code) or code.startswith("call")], name
