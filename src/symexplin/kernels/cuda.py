"""Kernels for CUDA, where Triton is there to compile them."""

import importlib.util
import logging

import torch

from symexplin.kernels.part import Backend

__all__ = ["load"]

_log = logging.getLogger("symexplin")


def load() -> Backend | None:
    """Return the kernels for CUDA; None, and why in the log, where they cannot run.

    They need Triton, an NVIDIA device of compute capability 8.0 (bfloat16 arithmetic) and nothing else.
    """
    reason = None
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    elif torch.version.hip is not None or not torch.cuda.is_available():
        reason = "there is no NVIDIA device"
    elif torch.cuda.get_device_capability() < (8, 0):
        reason = f"the device has compute capability {torch.cuda.get_device_capability()}, not (8, 0)"
    if reason is not None:
        _log.info("no kernels for CUDA: %s", reason)
        return None
    from symexplin.kernels.triton_backend import CudaKernels

    return CudaKernels()
