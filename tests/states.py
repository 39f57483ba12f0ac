"""States of a process that other code may set, and copies of tests that call the library in some at once.

In a copy, every public function, method and property of the core first enters the state. The test's own tensors are
made outside of it, and what it asserts is unchanged.
"""

import contextlib
import contextvars
import functools
import inspect
import sys
from pathlib import Path

import pytest
import torch

import symexplin

__all__ = ["STATES", "copies", "enter", "entered"]


@contextlib.contextmanager
def _setting(get, change, value):
    """Have a setting of the process at `value`."""
    before = get()
    change(value)
    try:
        yield
    finally:
        change(before)


STATES = {
    "bfloat16": functools.partial(_setting, torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    "float64": functools.partial(_setting, torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "meta": functools.partial(torch.device, "meta"),
    "inference": torch.inference_mode,
    "deterministic": functools.partial(
        _setting, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "medium": functools.partial(
        _setting, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16),
    "threads": functools.partial(_setting, torch.get_num_threads, torch.set_num_threads, 3),
    "denormals": functools.partial(_setting, lambda: False, torch.set_flush_denormal, True),
}
# What copies meet at once. A state that hides what another shows stands apart from it.
_TOGETHER = (("bfloat16", "meta", "medium", "deterministic", "threads"), ("inference", "autocast"))
_OUTSIDE = tuple(f"symexplin.{name}" for name in ("__main__", "cli", "experiments", "lab"))
_SPECIAL = ("__init__", "__repr__", "__setstate__")  # methods that enter the state besides the public ones
_USUAL_ONLY = ("usual_state", "slow", "distributed", "gpu")  # marks of tests that are not copied
_TESTS = str(Path(__file__).parent)


@contextlib.contextmanager
def entered(names):
    """Enter several states."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(STATES[name]())
        yield


def copies(item):
    """Return copies of a test in other states, marked with their names, unless the test belongs to the usual one."""
    made = []
    for states in () if any(map(item.get_closest_marker, _USUAL_ONLY)) else _TOGETHER:
        name = f"{item.originalname}-{'-'.join(states)}"
        copy = pytest.Function.from_parent(
            item.parent,
            name=name + item.name.removeprefix(item.originalname),
            callspec=getattr(item, "callspec", None),
            callobj=item.obj,
            fixtureinfo=item._fixtureinfo,
            originalname=name,  # of which pytest makes the identity of the copy
        )
        copy.add_marker(pytest.mark.process_state(states))
        made.append(copy)
    return made


@contextlib.contextmanager
def enter(states):
    """Replace the public functions, methods and properties of the core by ones that enter the states."""
    loaded = list(sys.modules.items())
    core = [module for name, module in loaded if name.split(".")[0] == "symexplin" and not name.startswith(_OUTSIDE)]
    tests = [module for _, module in loaded if (getattr(module, "__file__", None) or "").startswith(_TESTS)]
    public = [getattr(module, name) for module in core for name in getattr(module, "__all__", ())]
    functions = {value for value in public if inspect.isfunction(value) and _is_asked(value, states)}
    classes = {value for value in public if inspect.isclass(value) and _is_asked(value, states)}
    with pytest.MonkeyPatch.context() as patch:
        for kind in classes:
            for name, member in _wrapped_members(kind, states):
                patch.setattr(kind, name, member)
        for module in [*core, *tests]:
            for name, value in list(vars(module).items()):
                if inspect.isfunction(value) and value in functions:
                    patch.setattr(module, name, _wrapped(value, states))
        yield


def _is_asked(value, states):
    """Whether a function or class is called in the states: one without gradients is no place for a forward pass."""
    if not value.__module__.startswith("symexplin."):
        return False
    if "inference" not in states:
        return True
    return issubclass(value, torch.optim.Optimizer) if inspect.isclass(value) else value.__name__ in symexplin.__all__


_inside = contextvars.ContextVar("inside", default=False)


@functools.cache
def _wrapped(function, states):
    """Return a function that enters the states, unless it is called by one that has: the library may leave a state."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if _inside.get():
            return function(*args, **kwargs)
        token = _inside.set(True)
        try:
            with entered(states):
                return function(*args, **kwargs)
        finally:
            _inside.reset(token)

    return call


def _wrapped_members(kind, states):
    for name, value in list(vars(kind).items()):
        # A module is made with the default dtype and device, as nn.Linear is.
        if name.startswith("_") and (name not in _SPECIAL or issubclass(kind, torch.nn.Module)):
            continue
        if inspect.isfunction(value) and not inspect.isgeneratorfunction(value):
            yield name, _wrapped(value, states)
        elif isinstance(value, staticmethod):
            yield name, staticmethod(_wrapped(value.__func__, states))
        elif isinstance(value, property):
            yield name, property(_wrapped(value.fget, states), value.fset, value.fdel, value.__doc__)
