"""The hot loops of the built libraries are vector instructions: nothing in the source forces the compiler."""

import platform
import re
import shutil
import subprocess

import pytest

from builds import BUILDS, library

# Arithmetic on whole registers and on one float: vfmadd231ps, mulps; vaddss, mulss. On VARIANT: fmla v0.4s; fmadd s0.
PACKED = re.compile(
    r"\tv?(?:add|sub|mul|div|sqrt|fn?m(?:add|sub)\d+)p[sd]\b|\tf(?:add|sub|mul|div|sqrt|ml[as])\tv\d+\.[24][sd]"
)
SCALAR = re.compile(r"\tv?(?:add|sub|mul|div|sqrt|fn?m(?:add|sub)\d+)s[sd]\b|\tfn?m?(?:add|sub|mul|div|sqrt)\t[sd]\d+")
LINE = re.compile(r"^\s*([0-9a-f]+):\t(.*)$")
JUMP = re.compile(r"^(?:j|b\.|cb|tb)\w*\s.*?\b([0-9a-f]+) <")
# How many loops a step spends its time in; those of factored_tile are one per kind of map and of numbers.
HOT = {"norm_block": 1, "step_plain": 1, "find_exponents": 1, "move_near": 1, "move_far": 1, "factored_tile": 8}


def loops(path):
    """Return the innermost loops of each function: from where a backward jump leads to the jump."""
    if shutil.which("objdump") is None:
        pytest.skip("no objdump (binutils)")
    command = ["objdump", "-d", "--no-show-raw-insn", path]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for text in re.split(r"\n\n(?=[0-9a-f]+ <)", listing):
        name = re.search(r"^[0-9a-f]+ <(\w+)(?:\.\w+)*>:$", text, re.MULTILINE)
        code = [(int(line[1], 16), line[2]) for line in map(LINE.match, text.splitlines()) if line]
        spans = [(int(jump[1], 16), at) for at, body in code if (jump := JUMP.match(body))]
        spans = [(to, at) for to, at in spans if code[0][0] <= to <= at]
        inner = [one for one in spans if not any(one[0] <= a and b <= one[1] and one != (a, b) for a, b in spans)]
        for first, last in inner if name else ():
            yield name[1], ["\t" + body for at, body in code if first <= at <= last]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: "-".join(filter(None, build)))
def test_hot_loops_are_vector_code(build):
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip(f"instructions of {platform.machine()} are not known here")
    found = dict.fromkeys(HOT, 0)
    for name, body in loops(library(*build)):
        packed, scalar = (sum(bool(kind.search(line)) for line in body) for kind in (PACKED, SCALAR))
        # A hot loop of factored_tile is longer than those that reset or add up its sums.
        if name in HOT and not scalar and not any("call" in line for line in body):
            found[name] += packed >= (10 if name == "factored_tile" else 2)
    assert all(found[name] >= least for name, least in HOT.items()), found
