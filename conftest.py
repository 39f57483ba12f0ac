"""What pytest does not collect: programs for other processes in tests/kernels, and Triton's side without Triton."""

import importlib.util

__all__ = ["collect_ignore_glob"]

collect_ignore_glob = ["tests/kernels/triton_*.py"]
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob.append("src/symexplin/kernels/triton_*.py")
