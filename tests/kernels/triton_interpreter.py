"""Runs checks, named on lines of standard input, in Triton's interpreter: which must be chosen before kernels are made.

Answers each with a line, empty where the check held, else the error as JSON. The process keeps the choice to itself.
"""

import json
import os
import sys
import traceback
import warnings

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton_checks

from symexplin.kernels.triton_launch import TritonKernels

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of the overflow that is being checked
    kernels = TritonKernels(triton_checks.SMALL)
    kernels._is_right = lambda *_: True  # the checks compare more; that of the first use makes kernels of its own
    for line in sys.stdin:
        answer = ""
        try:
            triton_checks.CHECKS[line.strip()]("cpu", kernels)
        except BaseException:
            answer = json.dumps(traceback.format_exc())
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
