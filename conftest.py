"""What pytest leaves alone on a machine without Triton: modules that are imported only where it is."""

import importlib.util

__all__ = ["collect_ignore_glob"]

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["src/symexplin/kernels/triton_*.py"]
