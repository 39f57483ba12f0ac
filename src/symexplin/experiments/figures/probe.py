"""The raw and effective weights of a run by role ("q", "down", ...), at its start and at its newest checkpoint."""

import dataclasses
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from symexplin.curve import Curved, Map
from symexplin.experiments.figures.common import run_config
from symexplin.lab.build import Built, build
from symexplin.lab.checkpoint import load_optimizer, newest_intact
from symexplin.lab.report.charts import Floats
from symexplin.lab.weights import MODEL, load_weights
from symexplin.modes import Scales
from symexplin.modules import SELLinear
from symexplin.optim import RawSpaceOptimizer
from symexplin.presets import IDENTITY
from symexplin.transform import forward

__all__ = ["LIMIT", "Probe", "RoleWeights", "probe"]

# At most about as many positions are looked at: enough for the tails of a histogram.
LIMIT = 1_000_000


@dataclass(frozen=True)
class RoleWeights:
    """The weights of one role of all blocks: 1-D tensors over the same positions."""

    mode: str
    initial: Tensor
    effective: Tensor
    raw: Tensor
    scales: Scales

    def curves(self, raw: Tensor, places: Tensor) -> Tensor:
        """Return the map at `raw`, one row for the scales of each of the positions `places`."""
        scales = (v[places, None].double() if isinstance(v, Tensor) else v for v in self.scales)
        return forward(self.mode, raw.expand(len(places), -1), Scales(*scales))  # type: ignore[arg-type]


class Probe(NamedTuple):
    """The weights of a run at a step, by role."""

    step: int
    roles: dict[str, RoleWeights]

    def pooled(self, name: str) -> Floats:
        """Return all "initial", "effective" or "raw" weights."""
        return torch.cat([getattr(role, name) for role in self.roles.values()]).double().numpy()


@torch.no_grad()
def probe(folder: Path) -> Probe:
    """Return the weights of a run, which may go on meanwhile. The start is drawn again from the configuration.

    They are the curved matrices of a curved model, and the matrices of the blocks of another one.
    """
    config = run_config(folder)
    built = build(dataclasses.replace(config, compute=dataclasses.replace(config.compute, device="cpu")))
    layers = {name: layer for name, layer in built.model.named_modules() if isinstance(layer, nn.Linear)}
    initial = {name: layer.weight.clone() for name, layer in layers.items()}
    found = newest_intact(folder, warnings.warn)
    if found is None:
        raise ValueError(f"sources must name a run with a checkpoint, got {str(folder)!r}, which has none")
    path, state = found
    load_weights(built.model, path / MODEL)
    load_optimizer(built.optimizer, path, state["optimizer"])
    curved = _curved(built) or {
        name: Curved(Map.of(layer.weight.shape, "oi", IDENTITY), layer.weight, {})
        for name, layer in layers.items()
        if name.startswith("blocks.")
    }
    stride = -(-sum(each.raw.numel() for each in curved.values()) // LIMIT) | 1  # odd: no column is left out
    parts: dict[str, list[tuple[Tensor, Tensor, Curved]]] = {}
    for name, each in curved.items():
        parts.setdefault(name.rpartition(".")[2], []).append((initial[name], layers[name].weight, each))
    return Probe(int(state["step"]), {role: _role(matrices, stride) for role, matrices in parts.items()})


def _curved(built: Built) -> dict[str, Curved]:
    """Return the maps of the curved matrices by layer."""
    if isinstance(built.optimizer, RawSpaceOptimizer):
        found = built.optimizer.curved()
        return {name.removesuffix(".weight"): each for name, each in found if each.raw.dim() == 2}
    layers = ((name, layer) for name, layer in built.model.named_modules() if isinstance(layer, SELLinear))
    return {name: layer.sel_curved("weight") for name, layer in layers}


def _role(matrices: list[tuple[Tensor, Tensor, Curved]], stride: int) -> RoleWeights:
    """Return every `stride`-th position of matrices (initial, effective, curved) of one shape and one mode."""
    initial, effective, curved = zip(*matrices, strict=True)
    shape, like = initial[0].shape, curved[0].raw

    def pick(values: Iterable[Tensor | float]) -> Tensor:
        whole = (torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(shape) for value in values)
        return torch.cat([value.reshape(-1)[::stride] for value in whole])

    normalizers, *scales = zip(*(each.scales() for each in curved), strict=True)
    return RoleWeights(
        curved[0].map.config.mode,
        pick(initial),
        pick(effective),
        pick(each.raw for each in curved),
        Scales(normalizers[0], *(None if value[0] is None else pick(value) for value in scales)),  # type: ignore[arg-type]
    )
