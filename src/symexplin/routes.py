"""Which parameters are curved: by the type of the module that owns them, never by their number of dimensions."""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from symexplin.config import SELConfig, check_config
from symexplin.layout import Layout

__all__ = ["HEAD_NAMES", "ROUTER_NAMES", "Route", "Routing", "check_patterns", "routing"]

# Names of output heads that neither the model nor a vocabulary gives away; of a stack of layers the last is meant.
HEAD_NAMES = frozenset(
    (
        *("lm_head", "audio_lm_head", "text_lm_head", "codec_head", "ctc_head", "ctc_proj", "unembed", "unembedding"),
        *("head", "output_head", "score", "qa_outputs", "logits_proj", "summary", "seq_relationship", "sop_classifier"),
        *("classifier", "classification_head", "cls_classifier", "distillation_classifier", "classifier_distill"),
        *("dist_head", "dense_prediction", "itm_head", "mim_head", "mmm_image_head", "class_labels_classifier"),
        *("class_embed", "class_predictor", "bbox_embed", "bbox_predictor", "enc_score_head"),
    )
)
ROUTER_NAMES = frozenset({"router", "gate", "shared_expert_gate"})


@dataclass(frozen=True)
class Route:
    """One parameter and the decision about it."""

    name: str
    parameter: nn.Parameter = field(repr=False, compare=False)
    position: int  # in named_parameters order: seeds LoRA's A
    curved: bool
    reason: str
    out_dim: int = 0
    beta: float | None = None

    def layout(self, config: SELConfig) -> Layout:
        """Return the layout of a curved parameter."""
        assert self.beta is not None
        return Layout(tuple(self.parameter.shape), self.out_dim, self.beta, config)


@dataclass(frozen=True)
class Routing:
    """The decision for every parameter of a model; prints as a table."""

    routes: tuple[Route, ...]

    def __iter__(self) -> Iterator[Route]:
        return iter(self.routes)

    def __len__(self) -> int:
        return len(self.routes)

    @property
    def curved(self) -> tuple[Route, ...]:
        """The curved parameters, in named_parameters order."""
        return tuple(route for route in self.routes if route.curved)

    def __str__(self) -> str:
        head = ("parameter", "shape", "", "beta", "reason")
        rows = [head] + [
            (
                r.name,
                "x".join(map(str, r.parameter.shape)) or "scalar",
                "curved" if r.curved else "plain",
                f"{r.beta:.4g}" if r.beta is not None and r.curved else "-",
                r.reason,
            )
            for r in self.routes
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = sum(r.parameter.numel() for r in self.routes)
        inside = sum(r.parameter.numel() for r in self.curved)
        share = 100.0 * inside / total if total else 0.0
        lines.append(f"curved: {len(self.curved)} of {len(self.routes)} tensors, {inside:,} of {total:,} numbers")
        lines[-1] += f" ({share:.1f} %)"
        return "\n".join(lines)


@dataclass(frozen=True)
class _Candidate:
    """What a module makes of one of its parameters, before the patterns have their say."""

    reason: str
    curved: bool = False
    out_dim: int = 0
    matrix: nn.Parameter | None = None  # the weight that gives a bias its beta


def routing(model: nn.Module, config: SELConfig | None = None) -> Routing:
    """Decide for every parameter of `model` whether it is curved, and say why.

    Curved are the weights and biases of `nn.Linear`, transformers' `Conv1D` and the input projections of
    `nn.MultiheadAttention`. Plain are embeddings and what is tied to them, output heads, routers of mixtures of
    experts, norms, convolutions, frozen and non-floating parameters. A head is what the model names, what maps to a
    vocabulary, or has one of :data:`HEAD_NAMES`. `config.include` and `config.exclude` are patterns of qualified names
    against these rules. Weights of several experts in one 3-D tensor are plain; experts that are layers of their own
    are curved. LoRA's factors under PEFT are linear layers, hence curved.

    Raises:
        ValueError: a pattern that matches nothing, or asks to curve something that is neither a 2-D weight nor
            the bias of a linear layer.

    >>> model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    >>> print(routing(model))
    parameter  shape          beta  reason
    0.weight   4x8    curved  7.5   linear weight
    0.bias     4      curved  7.5   linear bias
    1.weight   4      plain   -     LayerNorm
    1.bias     4      plain   -     LayerNorm
    curved: 2 of 4 tensors, 36 of 44 numbers (81.8 %)
    """
    config = check_config(config)
    candidates = _candidates(model)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    known = [name for aliases in names.values() for name in aliases]
    check_patterns("include", config.include, known)
    check_patterns("exclude", config.exclude, known)
    routes = []
    for position, (name, parameter) in enumerate(model.named_parameters()):
        candidate = candidates.get(id(parameter), _Candidate("not in a linear layer"))
        routes.append(_decide(name, names[id(parameter)], parameter, position, candidate, config))
    return Routing(tuple(routes))


def _decide(
    name: str,
    aliases: list[str],
    parameter: nn.Parameter,
    position: int,
    candidate: _Candidate,
    config: SELConfig,
) -> Route:
    included, excluded = (_matches(aliases, patterns) for patterns in (config.include, config.exclude))
    if not parameter.requires_grad or not parameter.is_floating_point():
        reason = "frozen" if parameter.is_floating_point() else "not floating point"
        return Route(name, parameter, position, False, reason)
    if excluded is not None:
        return Route(name, parameter, position, False, f"excluded by {excluded!r}")
    if included is None and not candidate.curved:
        return Route(name, parameter, position, False, candidate.reason)
    reason = candidate.reason if included is None else f"included by {included!r}"
    out_dim, matrix = candidate.out_dim, parameter if candidate.matrix is None else candidate.matrix
    if matrix.dim() != 2 or parameter.dim() not in (1, 2):
        raise ValueError(
            f"{name} ({reason}) has shape {tuple(parameter.shape)}: only 2-D weights and biases of linear layers "
            "can be curved; exclude it, or unflatten the parameters of the model"
        )
    if parameter.numel() == 0 or matrix.numel() == 0:
        return Route(name, parameter, position, False, "empty")
    beta = config.beta_of(matrix.shape[out_dim], matrix.shape[1 - out_dim])
    return Route(name, parameter, position, True, reason, out_dim if parameter.dim() == 2 else 0, beta)


def _matches(names: list[str], patterns: tuple[str, ...]) -> str | None:
    """Return the first pattern that matches any of the names."""
    return next((p for p in patterns for name in names if fnmatch.fnmatchcase(name, p)), None)


def check_patterns(argument: str, patterns: Sequence[str], names: list[str]) -> None:
    """Refuse a pattern of `argument` that matches none of the parameters' `names`."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"{argument} pattern {pattern!r} matches no parameter, such as {names[:3]}")


def _candidates(model: nn.Module) -> dict[int, _Candidate]:
    """Say of every parameter what its module makes of it; what is tied to an embedding is plain."""
    heads = _heads(model)
    found: dict[int, _Candidate] = {}
    embeddings: set[int] = set()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        plain = _plain_reason(name, modules, heads)
        for local, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                embeddings.add(id(parameter))
                continue
            candidate = _candidate(module, local, parameter)
            if plain is not None:
                candidate = replace(candidate, reason=plain, curved=False)
            if plain is not None or id(parameter) not in found:
                found[id(parameter)] = candidate
    for key in embeddings:
        found[key] = _Candidate("tied to an embedding" if key in found else "embedding")
    return found


def _candidate(module: nn.Module, local: str, parameter: nn.Parameter) -> _Candidate:
    if isinstance(module, nn.Linear) or _is_conv1d(module):
        label, out_dim = ("Conv1D", 1) if _is_conv1d(module) else ("linear", 0)
        weight = module._parameters.get("weight")
        if local in ("weight", "bias") and weight is not None:
            return _Candidate(f"{label} {local}", True, out_dim, weight)
    if isinstance(module, nn.MultiheadAttention) and local.endswith(("proj_weight", "proj_bias")):
        weight = module.in_proj_weight if module.in_proj_weight is not None else module.q_proj_weight
        return _Candidate("attention input projection", True, 0, parameter if parameter.dim() == 2 else weight)
    if hasattr(module, "sel_roles"):
        return _Candidate("curved in its module")
    if parameter.dim() == 3 and "Experts" in type(module).__name__:
        return _Candidate("3-D expert weights")
    return _Candidate(type(module).__name__)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' transposed linear layer, without importing transformers."""
    return any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(module).__mro__)


def _plain_reason(name: str, modules: dict[str, nn.Module], heads: set[int]) -> str | None:
    """Return why all parameters of the module of that name stay plain, or None."""
    path = name.split(".")
    if any(_is_router(".".join(path[:depth]), modules) for depth in range(len(path) + 1)):
        return "router of a mixture of experts"
    return "output head" if id(modules[name]) in heads else None


def _is_router(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module chooses among experts: by its type's name, or by its own, as "gate" beside experts alone."""
    parent, _, leaf = name.rpartition(".")
    kind = type(modules[name]).__name__
    if leaf == "router" or "Router" in kind or "TopKGating" in kind:
        return True
    return leaf in ROUTER_NAMES and hasattr(modules[parent], "experts")


def _heads(model: nn.Module) -> set[int]:
    """Return the output heads: the one that the model names, those as wide as a vocabulary, those of usual names."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name}
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    by_name = _named_heads(model, linears)
    # DDP and others around a model do not hand on what it says of itself.
    speaker: Any = next((m for m in model.modules() if callable(getattr(m, "get_output_embeddings", None))), None)
    if speaker is not None:
        named = speaker.get_output_embeddings()
        found = list(named.modules()) if isinstance(named, nn.Module) else []  # adapters may wrap it
        vocabularies.add(getattr(getattr(speaker, "config", None), "vocab_size", -1))
        return {id(m) for m in (*found, *by_name, *_surely_wide(linears, vocabularies))}
    wide = [m for m in linears.values() if m.out_features in vocabularies]
    # A byte vocabulary may equal the model's width: among several as wide, the name decides, then the last one.
    chosen = [m for m in wide if any(m is n for n in by_name)] or wide[-1:] or by_name
    return {id(m) for m in chosen}


def _named_heads(model: nn.Module, linears: dict[str, nn.Linear]) -> list[nn.Module]:
    """Return what has the name of a head; "fc" is one where no linear layer comes after it."""
    last = next(reversed(linears), "")
    found: list[nn.Module] = []
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        pooling = "Pooling" in type(module).__name__  # SigLIP's is called "head"
        final = leaf == "fc" and not _numbered(name) and f"{last}.".startswith(f"{name}.")
        if final or (leaf in HEAD_NAMES and not pooling):
            found.extend(_last(module))
    return found


def _surely_wide(linears: dict[str, nn.Linear], vocabularies: set[int]) -> list[nn.Linear]:
    """Return what maps to a vocabulary: wider than its input, in no numbered block, and read by no layer."""
    read = {m.in_features for m in linears.values()}
    return [
        m
        for name, m in linears.items()
        if m.out_features in vocabularies - read and m.out_features > m.in_features and not _numbered(name)
    ]


def _numbered(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _last(head: nn.Module) -> Sequence[nn.Module]:
    """Return what is the head in a module of a head's name: itself, its last linear layer, all that PEFT wraps."""
    if hasattr(head, "base_layer") or hasattr(head, "modules_to_save"):
        return list(head.modules())
    if isinstance(head, nn.ModuleList):  # one head a layer of the decoder
        return [part for module in head for part in _last(module)]
    last = [module for module in head.modules() if isinstance(module, nn.Linear)][-1:]
    # As wide as its input, the last of a stack only prepares for what comes after, as ModernBERT's "head" does.
    return [m for m in last if m is head or m.in_features != m.out_features]
