"""What pytest does not collect: programs for other processes in tests/kernels, Triton's side without Triton, timm's."""

import importlib.util

__all__ = ["collect_ignore_glob"]

# tests/test_timm.py runs the examples of symexplin.timm: it can import timm without torchvision.
collect_ignore_glob = ["tests/kernels/triton_*.py", "src/symexplin/timm.py"]
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob.append("src/symexplin/kernels/triton_*.py")
