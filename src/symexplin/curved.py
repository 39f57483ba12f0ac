"""Modules that store raw weights: their curved parameters become raw ones with scales, and effective properties.

:func:`curve_` changes the class of a module to one with the properties and back to the plain one. The module keeps its
identity, its hooks and its attributes.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from symexplin.coordinates import Coordinates
from symexplin.layout import PANELS, Layout, Slot
from symexplin.ops import Key, effective_op, key_of, pullback_op
from symexplin.starts import start_weight
from symexplin.transform import compute_dtype

__all__ = ["Curve", "CurvedModule", "Parts", "curve_", "curved_parts", "curved_type", "effective_property", "plain_"]

Parts = dict[str, nn.Parameter]  # "raw" and the scales of one curved parameter, by the names of their slots


class Curve(NamedTuple):
    """A map and, where kernels compute it, its key in the graphs of torch.compile."""

    layout: Layout
    key: Key | None

    def coordinates(self, parts: Sequence[Tensor]) -> Coordinates:
        """Return the tensor with its map, in the compute dtype."""
        dtype = compute_dtype(*parts)
        return Coordinates(self.layout, *(part.to(dtype) for part in parts))

    def effective(self, coordinates: Coordinates, dtype: torch.dtype) -> Tensor:
        """Return the effective weight in `dtype`."""
        if self.key is not None and torch.compiler.is_compiling():
            value: Tensor = effective_op(*coordinates[1:], *self.key, dtype)
            return value
        return coordinates.effective(dtype)

    def gradients(self, coordinates: Coordinates, g: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients by `parts` for a gradient `g` of the effective weight."""
        if self.key is not None and torch.compiler.is_compiling():
            pulled: Sequence[Tensor] = pullback_op(*coordinates[1:], g.contiguous(), *self.key)
        else:
            pulled = coordinates.pullback(g)[1:]
        return [grad.to(part.dtype) for grad, part in zip(pulled, parts, strict=True)]


class _EffectiveWeight(torch.autograd.Function):
    """raw, panels -> effective weight in their dtype; saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, curve: Curve, *parts: Tensor) -> Tensor:
        ctx.curve = curve
        ctx.save_for_backward(*parts)
        return curve.effective(curve.coordinates(parts), parts[0].dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.saved_tensors
        return None, *ctx.curve.gradients(ctx.curve.coordinates(parts), g, parts)


class CurvedModule(nn.Module):
    """Mixin of modules with curved parameters; :func:`curve_` gives a module a class with this one among its bases.

    A curved parameter X is a read-only property, computed on access and once per forward. The module's own parameters
    are `raw_X` and the scales `X_e_row`, `X_m_column`, ...; those of `weight` have no prefix.
    """

    sel_plain_type: type[nn.Module]
    sel_curves: dict[str, Curve]  # by the name of the plain parameter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the plain module returns with the effective weights, each computed once."""
        self.__dict__["_effective"] = {name: getattr(self, name) for name in self.sel_curves}
        try:
            return super().forward(*args, **kwargs)
        finally:
            del self.__dict__["_effective"]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; one that would replace an effective value is refused."""
        if name in self.__dict__.get("sel_curves", ()):
            raise AttributeError(f"{name} follows from raw_{name} and cannot be set: symexplin.fold the model first")
        super().register_parameter(name, param)

    def sel_roles(self) -> dict[str, tuple[Layout, Slot | None]]:
        """Return the layout of every raw weight and scale by its local name, with the slot of a scale."""
        roles: dict[str, tuple[Layout, Slot | None]] = {}
        for name, curve in self.sel_curves.items():
            roles[_local(name, "raw")] = curve.layout, None
            roles |= {_local(name, slot.name): (curve.layout, slot) for slot in curve.layout.slots}
        return roles

    def sel_parts(self, name: str = "weight") -> tuple[Tensor, ...]:
        """Return (raw, *panels) of a curved parameter; panels are packed from the scales."""
        layout = self.sel_curves[name].layout
        raw = cast(Tensor, getattr(self, _local(name, "raw")))
        panels: dict[str, list[Tensor]] = {panel: [] for panel in PANELS}
        for slot in layout.slots:
            value = getattr(self, _local(name, slot.name))
            dim = layout.axes.vectors_dim(slot.panel)
            panels[slot.panel].append(
                value if value.dim() == len(layout.panel_shape(slot.panel)) else value.unsqueeze(dim)
            )
        return raw, *(_packed(layout, panel, parts, raw) for panel, parts in panels.items())

    @torch.no_grad()
    def sel_effective(self) -> dict[str, Tensor]:
        """Return the effective values of the curved parameters by name, in the compute dtype."""
        return {name: curve.coordinates(self.sel_parts(name)).effective() for name, curve in self.sel_curves.items()}

    def reset_parameters(self) -> None:
        """Draw new weights as the plain module does, and start from them."""
        twin = copy.deepcopy(self)
        plain = plain_(twin)
        plain.reset_parameters()  # type: ignore[operator]
        layouts = {name: curve.layout for name, curve in self.sel_curves.items()}
        parts = {
            name: curved_parts(cast(nn.Parameter, plain._parameters[name]), layout, 0)
            for name, layout in layouts.items()
        }
        curve_(plain, type(self), layouts, parts)
        self.load_state_dict(plain.state_dict())

    def extra_repr(self) -> str:
        """Describe the module as the plain one does, with its map."""
        layout = next(iter(self.sel_curves.values())).layout
        found = (super().extra_repr(), f"mode={layout.config.mode!r}, beta={layout.beta:.4g}")
        return ", ".join(filter(None, found))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make a pickle that has the plain class, since the curved one has no place in a module."""
        names = tuple(self.sel_curves)
        if type(self) is curved_type(self.sel_plain_type, names):
            return _empty, (self.sel_plain_type, names), dict(self.__dict__)
        return super().__reduce_ex__(protocol)


def _local(name: str, part: str) -> str:
    """Return the local name of a part of a curved parameter.

    >>> _local("weight", "raw"), _local("weight", "e_row"), _local("bias", "raw"), _local("bias", "e_row")
    ('raw_weight', 'e_row', 'raw_bias', 'bias_e_row')
    """
    if part == "raw":
        return f"raw_{name}"
    return part if name == "weight" else f"{name}_{part}"


def _packed(layout: Layout, panel: str, parts: list[Tensor], raw: Tensor) -> Tensor:
    if not parts:
        return raw.new_empty(layout.panel_shape(panel))
    return torch.cat(parts, layout.axes.vectors_dim(panel))


@torch.no_grad()
def curved_parts(plain: nn.Parameter, layout: Layout, position: int) -> Parts:
    """Return the raw weight and scales of a parameter, which start as the layout says.

    Raises:
        ValueError: a weight is not finite or out of the map's reach.
    """
    target = start_weight(plain, layout)
    panels = layout.start_panels(compute_dtype(target), plain.device, position)
    raw = Coordinates(layout, target, **panels).matched(target)
    parts = {"raw": nn.Parameter(torch.empty_like(plain).copy_(raw), requires_grad=plain.requires_grad)}
    for slot in layout.slots:
        value = layout.view(slot, panels[slot.panel]).to(plain.dtype)
        if slot.count == 1 and slot.panel in ("panel0", "panel1") and layout.axes.columns:
            value = value.squeeze(layout.axes.vectors_dim(slot.panel))
        parts[slot.name] = nn.Parameter(value.clone())
    return parts


def effective_property(name: str) -> property:
    """Return the read-only property of a curved parameter; it returns the parameter of a module that has it plain."""

    def get(self: CurvedModule) -> Tensor | None:
        if name in self._parameters:
            return self._parameters[name]
        if "_effective" in self.__dict__:
            return cast(Tensor, self.__dict__["_effective"][name])
        parts = self.sel_parts(name)
        value: Tensor = _EffectiveWeight.apply(self.sel_curves[name], *parts)  # type: ignore[no-untyped-call]
        return value.to(parts[0].dtype)

    return property(get, doc=f"The effective {name}, in the dtype of the raw one; read-only.")


def curved_type(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return the class of modules of a `kind` with these curved parameters; equal arguments give the same class.

    >>> curved_type(nn.Conv2d, ("weight",)).__name__
    'SELConv2d'
    """
    return _curved_type(kind, names)  # type: ignore[arg-type]


@functools.cache
def _curved_type(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    members: dict[str, Any] = {name: effective_property(name) for name in names}
    members |= {"__module__": __name__, "__doc__": f"{kind.__name__} with raw weights, see :class:`CurvedModule`."}
    if not hasattr(kind, "reset_parameters"):
        members["reset_parameters"] = property()  # absent, as in the plain class
    return type(f"SEL{kind.__name__}", (CurvedModule, kind), members)


def _empty(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    made = curved_type(kind, names)
    return made.__new__(made)


def curve_(
    module: nn.Module, kind: type[nn.Module], layouts: Mapping[str, Layout], parts: Mapping[str, Parts]
) -> nn.Module:
    """Make `module` one of the curved class `kind`, with raw weights and scales, in place, and return it."""
    own: dict[str, nn.Parameter | None] = {}
    for name, parameter in module._parameters.items():
        if name in layouts:
            own |= {_local(name, part): value for part, value in parts[name].items()}
        else:
            own[name] = parameter
    module.__dict__["sel_plain_type"] = type(module)
    module.__dict__["sel_curves"] = {name: Curve(layout, key_of(layout)) for name, layout in layouts.items()}
    module.__class__ = kind
    module.__dict__["_parameters"] = own
    return module


@torch.no_grad()
def plain_(module: CurvedModule, known: dict[int, nn.Parameter] | None = None) -> nn.Module:
    """Replace the raw weights and scales of `module` by its effective weights, in place, and return it.

    `known` has the plain parameters of raw ones that were folded before, by their ids: tied ones stay tied.
    """
    known = {} if known is None else known
    roles = module.sel_roles()
    own: dict[str, nn.Parameter | None] = {}
    raw_of = {_local(name, "raw"): name for name in module.sel_curves}
    for local, parameter in module._parameters.items():
        if name := raw_of.get(local):
            raw = cast(nn.Parameter, parameter)
            if id(raw) not in known:
                value = torch.empty_like(raw).copy_(getattr(module, name))  # in the same memory format
                known[id(raw)] = nn.Parameter(value, requires_grad=raw.requires_grad)
            own[name] = known[id(raw)]
        elif local not in roles:
            own[local] = parameter
    plain = cast(nn.Module, module)
    plain.__class__ = module.sel_plain_type
    plain.__dict__["_parameters"] = own
    del plain.__dict__["sel_plain_type"], plain.__dict__["sel_curves"]
    return plain
