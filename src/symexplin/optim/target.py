"""What a rule updates: one tensor with its gradient, its moments and its rates."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from symexplin.layout import PANELS
from symexplin.optim.placement import Placement, local
from symexplin.optim.rates import Number

__all__ = ["COUNTS", "Moments", "Target", "kind_of", "moment_key"]

COUNTS = ("step", "scale_step")  # counters of updates in a parameter's state: of its values, of its scales

# Which moments a target of that kind and whole shape has.
Moments = Callable[[str, tuple[int, ...]], Iterable[str]]


@dataclass
class Target:
    """One tensor for a rule to update in place: a raw weight, a panel of scales or a plain parameter.

    Under FSDP2 `value`, `grad` and the moments are this process's shard; :meth:`gather` and :meth:`scatter` go to the
    whole tensor and back.
    """

    kind: str  # "raw", "plain" or the panel's name
    value: Tensor
    grad: Tensor
    lr: Number  # a number, or for a panel a tensor that broadcasts against it: one a scale
    weight_decay: Number  # likewise
    state: dict[str, Any] = field(repr=False)
    shape: Sequence[int] = field(repr=False)  # of the whole tensor
    placement: Placement = field(repr=False)
    split: bool = field(repr=False)  # other processes have other parts of it
    out_dim: int = field(default=0, repr=False)  # of a weight: which dimension counts outputs

    @property
    def step(self) -> Tensor:
        """The number of updates of this tensor, the present one included."""
        step: Tensor = self.state["step" if self.kind in ("raw", "plain") else "scale_step"]
        return step

    def moment(self, name: str) -> Tensor:
        """Return this target's moment of that name from the parameter's state."""
        return local(self.state[moment_key(self.kind, name)])

    def gather(self, part: Tensor) -> Tensor:
        """Return the whole tensor of which `part`, as large as `value`, is this process's; all processes must call."""
        return self.placement.gather(part, self.shape) if self.split else part

    def scatter(self, whole: Tensor) -> Tensor:
        """Return this process's part of a `whole` tensor of the parameter's shape."""
        return self.placement.cut(whole, self.placement.dim) if self.split else whole


def kind_of(key: str) -> str:
    """Return which tensor one of a parameter's state is or belongs to: "raw" (or plain), or the panel's name."""
    return next((panel for panel in PANELS if key.startswith(panel)), "raw")


def moment_key(kind: str, moment: str) -> str:
    """Return the name in a parameter's state of a moment: "exp_avg", "panel0_exp_avg"."""
    return moment if kind in ("raw", "plain") else f"{kind}_{moment}"
