"""Effective weights of modules: as functions of raw weights that autograd knows, and as tensors that refuse writes."""

import contextlib
import functools
import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from symexplin.curve import Curved, Map
from symexplin.transform import compute_dtype

__all__ = ["READ_ONLY", "curved_linear", "curved_of", "effective", "read_only"]

READ_ONLY = (
    "an effective weight follows from its raw weight, so that a write into it would be lost: use symexplin.fold first, "
    "or clone() for a tensor of your own"
)

# What writes into its first argument: `add_`, `_foreach_add_`, `+=`, `[...] =`, and setters of attributes.
_WRITES = re.compile(r"\w*[^_]_|__i(?!nt__|ndex__|nvert__)\w+__|__setitem__|__set__")


def curved_of(spec: Map, parts: Sequence[Tensor]) -> Curved:
    """Return the map at `parts`, a raw weight and the tensors of its scales, in the compute dtype."""
    dtype = compute_dtype(*parts)
    raw, *tensors = (part.to(dtype) for part in parts)
    return Curved(spec, raw, dict(zip((tensor.name for tensor in spec.tensors), tensors, strict=True)))


def effective(spec: Map, parts: Sequence[Tensor]) -> Tensor:
    """Return the effective weight in the dtype of the raw one, differentiable."""
    return _apply(_Effective, _ForwardEffective, spec, *parts)


def read_only(spec: Map, parts: Sequence[Tensor]) -> Tensor:
    """Return the effective weight as a tensor that refuses writes, under torch.compile as a usual one."""
    if torch.compiler.is_compiling():
        return effective(spec, parts)
    grad_mode = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad_mode):  # inference tensors do not know their views
        return _protect(effective(spec, parts))


def curved_linear(spec: Map, dtype: torch.dtype, x: Tensor, bias: Tensor | None, parts: Sequence[Tensor]) -> Tensor:
    """Return x w_eff^T + bias with the effective weight rounded to `dtype`; backward computes the weight again."""
    return _apply(_Linear, _ForwardLinear, spec, dtype, x, bias, *parts)


def _apply(traced: Any, eager: Any, *args: Any) -> Tensor:
    """Call an autograd function, under torch.compile the one that it can trace."""
    value: Tensor
    if not torch.compiler.is_compiling():
        value = eager.apply(*args)
    elif torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        value = traced.apply(*args)
    else:  # torch 2.13 would pass `forward` a context in front of the arguments
        value = traced.forward(*args)
    return value


def _pull(curved: Curved, g: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients by `parts` for a gradient `g` of the effective weight."""
    raw, tensors = curved.pullback(g)
    return [grad.to(part.dtype) for grad, part in zip((raw, *tensors.values()), parts, strict=True)]


def _push(curved: Curved, tangents: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the derivative of the effective weight along `tangents` of its parts: the transpose of the pullback."""
    vjp: Any = torch.func.vjp(lambda g: _pull(curved, g, tangents), torch.zeros_like(curved.raw))
    pushed: Tensor = vjp[1](list(tangents))[0]
    return pushed.to(dtype)


class _Effective(torch.autograd.Function):
    """raw, scales -> effective weight in the dtype of raw; saves only its inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(spec: Map, *parts: Tensor) -> Tensor:
        return curved_of(spec, parts).effective(parts[0].dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _: Any) -> None:
        ctx.spec, *parts = inputs
        ctx.save_for_backward(*parts)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.saved_tensors
        return None, *_pull(curved_of(ctx.spec, parts), g, parts)


class _Linear(torch.autograd.Function):
    """x, bias, raw, scales -> x w_eff^T + bias; computes w_eff again in backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(spec: Map, dtype: torch.dtype, x: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
        return F.linear(x, curved_of(spec, parts).effective(dtype), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _: Any) -> None:
        ctx.spec, ctx.dtype, x, _, *parts = inputs
        ctx.save_for_backward(x, *parts)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, *parts = ctx.saved_tensors
        curved = curved_of(ctx.spec, parts)
        rows = g.reshape(-1, g.shape[-1])
        g_x = g @ curved.effective(g.dtype) if ctx.needs_input_grad[2] else None
        g_bias = rows.sum(0) if ctx.needs_input_grad[3] else None
        return None, None, g_x, g_bias, *_pull(curved, rows.mT @ x.reshape(-1, x.shape[-1]), parts)


# torch computes a signature at each call unless it is stored: an eighth of the time of a small layer.
for _function in (_Effective.forward, _Linear.forward):
    setattr(_function, "__signature__", inspect.signature(_function))  # noqa: B010, mypy knows no such attribute


# torch.compile refuses functions that define `jvp`, so these are apart.
class _ForwardEffective(_Effective):
    """With forward-mode derivatives."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _: Any) -> None:
        _Effective.setup_context(ctx, inputs, _)
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Tensor:
        parts = ctx.saved_tensors
        return _push(curved_of(ctx.spec, parts), tangents, parts[0].dtype)


class _ForwardLinear(_Linear):
    """With forward-mode derivatives."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _: Any) -> None:
        _Linear.setup_context(ctx, inputs, _)
        ctx.save_for_forward(inputs[2], *inputs[4:])

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, x_t: Tensor, bias_t: Tensor | None, *tangents: Tensor) -> Tensor:
        x, *parts = ctx.saved_tensors
        curved = curved_of(ctx.spec, parts)
        return F.linear(x_t, curved.effective(ctx.dtype), bias_t) + F.linear(x, _push(curved, tangents, ctx.dtype))


class _ReadOnly:
    """Mixin of classes of effective values: a write into one, or into what shares its memory, is refused.

    Writes are known by their names or, after they are done, by the version that torch counts.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            written = [kwargs.get("out")]
            if _WRITES.fullmatch(func.__name__) or kwargs.get("inplace"):
                written += args[:1] or list(kwargs.values())[:1]
            given = _read_only_of([*args, *kwargs.values()])
            if _read_only_of(written):
                raise RuntimeError(READ_ONLY)
            before = [value._version for value in given]
            result = func(*args, **kwargs)
            if [value._version for value in given] != before:
                raise RuntimeError(READ_ONLY)
            for value in _each([result]):
                if isinstance(value, Tensor) and (isinstance(value._base, _ReadOnly) or _shares_memory(value, given)):
                    _protect(value)
            if func in (Tensor.numpy, Tensor.__array__):
                result.flags.writeable &= result.ctypes.data != args[0].data_ptr()  # a copy belongs to the user
        return result

    def __format__(self: Any, spec: str) -> str:
        return format(self.clone(), spec)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # saved and copied as a plain tensor

    def __deepcopy__(self: Any, memo: Any) -> Any:
        return self.clone().__deepcopy__(memo)


def _each(values: Sequence[Any]) -> list[Any]:
    """Return `values` and what the lists among them have."""
    return [item for value in values for item in (value if isinstance(value, list | tuple) else (value,))]


def _read_only_of(values: Sequence[Any]) -> list[Any]:
    return [value for value in _each(values) if isinstance(value, _ReadOnly)]


def _shares_memory(value: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether a tensor has the memory of one of the others; wrappers without memory of their own do not say."""
    with contextlib.suppress(RuntimeError):  # NotImplementedError is one
        return any(value.untyped_storage()._cdata == other.untyped_storage()._cdata for other in others)
    return False


def _protect(value: Tensor) -> Tensor:
    """Make `value` read-only, in place."""
    if not isinstance(value, _ReadOnly):
        value.__class__ = _read_only_class(type(value))
    return value


@functools.cache
def _read_only_class(kind: type[Tensor]) -> Any:
    return type(f"Effective{kind.__name__}", (_ReadOnly, kind), {})
