"""timm for the tests, also without torchvision, which timm imports but neither its models nor its optimizers use.

torchvision must be of the same build as torch: one for CUDA beside a torch for CPUs breaks Lightning and transformers
too. Therefore it is not in the extra `dev`, and timm gets stand-ins while it is imported.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from unittest.mock import MagicMock

import pytest
from torch import nn

__all__ = ["import_timm"]

_MODULES = [
    "torchvision",
    *(f"torchvision.{name}" for name in ("datasets", "ops", "ops.misc", "transforms", "transforms.functional")),
]


def import_timm():
    """Return timm; skip without it."""
    if find_spec("timm") is None:
        pytest.skip("timm is not installed: pip install --no-deps timm", allow_module_level=True)
    if "timm" not in sys.modules and find_spec("torchvision") is None:
        stand_ins = {name: MagicMock(__spec__=ModuleSpec(name, None)) for name in _MODULES}
        for name in _MODULES[1:]:
            parent, _, local = name.rpartition(".")
            setattr(stand_ins[parent], local, stand_ins[name])
        stand_ins["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (nn.Module,), {})
        sys.modules |= stand_ins
        try:
            import timm.optim
            import timm.scheduler
        finally:
            for name in _MODULES:
                del sys.modules[name]
    import timm.optim
    import timm.scheduler

    return timm
