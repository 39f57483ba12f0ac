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
for size in (32, 48, 48, 32):
    torch.ones(size << 18).sum()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    return int(subprocess.run([sys.executable, "-c", CHURN, how], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_memory_that_comes_again_costs_no_faults():
    pages = (160 << 20) // resource.getpagesize()
    if faults("leave") < pages // 2:
        pytest.skip("malloc keeps large blocks by itself here")
    assert faults("keep") < pages // 10
