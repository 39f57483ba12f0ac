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
import triton_cases
import triton_checks

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of the overflow that is being checked
    for line in sys.stdin:
        answer = ""
        try:
            triton_checks.CHECKS[line.strip()]("cpu", triton_cases.SMALL)
        except BaseException:
            answer = json.dumps(traceback.format_exc())
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
