import resource
import subprocess
import sys

import pytest

CHURN = """
import resource, sys, torch
from symexplin.lab.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for size in (64, 64, 64, 64, 48, 32, 48, 32):  # MiB; the heap finds its size
    torch.ones(size << 18).sum()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for size in (32, 48, 48, 32) * 10:
    torch.ones(size << 18).sum()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def printed(script, how):
    return int(subprocess.run([sys.executable, "-c", script, how], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_memory_that_comes_again_costs_no_faults():
    # Ten times over: a small block that outlives its moment can spoil a hole, and one tensor then goes elsewhere, once.
    pages = 10 * (160 << 20) // resource.getpagesize()
    if printed(CHURN, "leave") < pages // 2:
        pytest.skip("malloc keeps large blocks by itself here")
    assert printed(CHURN, "keep") < pages // 10


HOLES = """
import sys, torch
from symexplin.lab.bench.memory import _high_water
from symexplin.lab.malloc import keep_freed_memory, return_freed_memory
(return_freed_memory if sys.argv[1] == "return" else keep_freed_memory)()
kept = []
before = _high_water()
for _ in range(8):  # each small tensor stays in the hole of a large one, which then has to go elsewhere
    large = torch.ones(16 << 18)
    del large
    kept.append(torch.ones(1 << 18))
print((_high_water() - before) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_peak_is_what_was_held_at_once():
    assert printed(HOLES, "return") <= 16 + 8 + 2  # MiB
