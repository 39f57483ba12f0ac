"""What figures read: the comparisons, runs and files that their sources name, and the weights of a run by role."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from symexplin.experiments.tables import TABLE, read_table
from symexplin.lab.build import Built, build
from symexplin.lab.checkpoint import STATE, newest
from symexplin.lab.compare.comparison import Comparison
from symexplin.lab.compare.grid import COMPARISON
from symexplin.lab.config import RunConfig
from symexplin.lab.files import read_json
from symexplin.lab.folders import CONFIG, FACTS, saved_config
from symexplin.lab.maps import map_in_words, map_of
from symexplin.lab.model import ModelConfig
from symexplin.lab.report.charts import Floats
from symexplin.lab.weights import find_weights, load_optimizer, load_weights
from symexplin.modes import Scales
from symexplin.modules import SELLinear
from symexplin.optim import RawSpaceOptimizer
from symexplin.presets import IDENTITY
from symexplin.spec import CurvedWeight, Spec
from symexplin.transform import forward

__all__ = [
    *("LIMIT", "Probe", "RoleWeights", "comparisons", "is_run"),
    *("map_words", "probe", "run_config", "run_of", "weights_of"),
]

# At most about as many positions are looked at: enough for the tails of a histogram.
LIMIT = 1_000_000


def comparisons(sources: Sequence[Path]) -> list[Comparison]:
    """Return the comparisons of folders: of comparisons, or of tables with their finished panels in order."""
    compared: list[Comparison] = []
    for source in sources:
        if (source / TABLE).exists():
            compared += [panel.comparison for panel in read_table(source).panels if panel.comparison]
        elif (source / COMPARISON).exists():
            compared.append(Comparison.load(source))
        else:
            wanted = "a comparison or a table, or a run if the figure is of one"
            raise FileNotFoundError(f"sources must be {wanted}, got {str(source)!r}")
    if not compared:
        raise ValueError(f"sources must have a finished comparison, got {', '.join(map(str, sources))}")
    return compared


def is_run(source: Path) -> bool:
    """Whether a folder has a run: is one, or a comparison or table."""
    return any((source / name).exists() for name in (CONFIG, COMPARISON, TABLE))


def run_of(source: Path, curved: bool) -> Path:
    """Return the folder of a run: `source` itself, or of a comparison or a table's first panel a run that counts.

    Of a comparison that is the baseline's first one, or with `curved` that of the curved variant with the lowest loss,
    one with learned scales if there is any. Both are at their own best learning rate.
    """
    if (source / CONFIG).exists():
        return source
    compared = comparisons([source])[0]
    maps = {variant: config for variant in compared.variants if (config := compared.map_of(variant)) is not None}
    learned = [variant for variant, config in maps.items() if config.learned_roles]
    row = compared.leader((learned or list(maps)) if curved else compared.variants[:1])
    if row is None:
        kind = "curved variant" if curved else "baseline"
        raise ValueError(f"sources must have a {kind} that did not diverge, got {str(source)!r}")
    return compared.folder_of(next(iter(compared.finite(row.variant, row.lr).values())))


def run_config(folder: Path) -> RunConfig:
    """Return the configuration of a run with the model as it was built."""
    model = ModelConfig(**read_json(folder / FACTS)["model"])
    return dataclasses.replace(saved_config(RunConfig, folder / CONFIG), model=model)


def map_words(config: RunConfig) -> str:
    """Return the preset and the map of a run in a line, "" for ordinary weights."""
    curve = map_of(config.sel, config.model.width)
    return "" if curve is None else f"preset {config.sel.preset}: {map_in_words(curve, config.sel.start_in_words)}"


def weights_of(source: Path) -> Path:
    """Return the file or folder of plain weights that a source names."""
    return find_weights(run_of(source, curved=False)) if is_run(source) else source


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
    """The weights of a run at a step, by role: "q", "down", ..."""

    step: int
    roles: dict[str, RoleWeights]

    def pooled(self, name: str) -> Floats:
        """Return all "initial", "effective" or "raw" weights."""
        return torch.cat([getattr(role, name) for role in self.roles.values()]).double().numpy()


@torch.no_grad()
def probe(folder: Path) -> Probe:
    """Return the weights of a run at its newest checkpoint, and as its configuration initializes them.

    They are the curved matrices of a curved model, and the matrices of the blocks of another one. The run may go on
    meanwhile.
    """
    config = run_config(folder)
    built = build(dataclasses.replace(config, compute=dataclasses.replace(config.compute, device="cpu")))
    layers = {name: layer for name, layer in built.model.named_modules() if isinstance(layer, nn.Linear | SELLinear)}
    initial = {name: layer.weight.clone() for name, layer in layers.items()}
    path = next(iter(newest(folder)), None)
    if path is None:
        raise ValueError(f"sources must be runs with a checkpoint, got {str(folder)!r}, which has none")
    state = read_json(path / STATE)
    load_weights(built.model, path)
    load_optimizer(built.optimizer, path, state["optimizer"])
    curved = _curved(built) or {
        name: CurvedWeight(Spec.of(layer.weight.shape, "oi", IDENTITY), layer.weight, {})
        for name, layer in layers.items()
        if name.startswith("blocks.")
    }
    stride = -(-sum(each.raw.numel() for each in curved.values()) // LIMIT) | 1  # odd: no column is left out
    matrices: dict[str, list[tuple[Tensor, Tensor, CurvedWeight]]] = {}
    for name, each in curved.items():
        matrices.setdefault(name.rpartition(".")[2], []).append((initial[name], layers[name].weight, each))
    return Probe(int(state["step"]), {role: _role(parts, stride) for role, parts in matrices.items()})


def _curved(built: Built) -> dict[str, CurvedWeight]:
    """Return the maps of the curved matrices by layer."""
    if isinstance(built.optimizer, RawSpaceOptimizer):
        in_optimizer = built.optimizer.curved()
        return {name.removesuffix(".weight"): each for name, each in in_optimizer if each.raw.dim() == 2}
    layers = ((name, layer) for name, layer in built.model.named_modules() if isinstance(layer, SELLinear))
    return {name: layer.curved() for name, layer in layers}


def _role(matrices: list[tuple[Tensor, Tensor, CurvedWeight]], stride: int) -> RoleWeights:
    """Return every `stride`-th position of matrices (initial, effective, curved) of one shape and one mode."""
    initial, effective, curved = zip(*matrices, strict=True)
    shape, like = initial[0].shape, curved[0].raw

    def pick(values: Iterable[Tensor | float]) -> Tensor:
        whole = (torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(shape) for value in values)
        return torch.cat([value.reshape(-1)[::stride] for value in whole])

    normalizers, *scales = zip(*(each.scales() for each in curved), strict=True)
    picked = (None if value[0] is None else pick(value) for value in scales)
    return RoleWeights(
        mode=curved[0].spec.config.mode,
        initial=pick(initial),
        effective=pick(effective),
        raw=pick(each.raw for each in curved),
        scales=Scales(normalizers[0], *picked),  # type: ignore[arg-type]
    )
