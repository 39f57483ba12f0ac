"""What the names and methods of modules say: output heads, routers, step biases, and the parts of fused projections."""

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

__all__ = ["Parts", "check_parts", "ends_like", "fused_parts", "map_parts", "plain_modules"]

# Patterns of names. In a stack of layers with such a name, the last one is the head.
HEAD_NAMES = (
    *("head", "*_head", "classifier", "*_classifier", "classifier_*", "score", "cls", "logit*", "*_logits"),
    *("unembed", "unembedding", "ctc_proj", "seq_relationship", "dense_prediction", "rank_output"),
    *("qa_outputs", "answer_class", "*class_embed", "*bbox_embed", "class_predictor", "bbox_predictor"),
)
# Heads only outside of numbered blocks and if no linear layer or convolution follows.
LAST_NAMES = ("fc", "fc_out", "output", "summary")
ROUTER_NAMES = ("router", "*_router", "router_gate", "shared_expert_gate")
GATE_NAMES = ("gate", "gating")  # routers, or halves of gated feed-forward layers: see `_is_router`
# The softplus of this bias is a step size. The bias lies in the tail of the map, where a small step has a large effect.
STEP_BIASES = ("dt_proj.bias",)
# Embeddings of positions or segments, not of tokens: a layer of their size is not a head.
_PLACES = re.compile(
    r"(?:^|[._])(?:pos|pos(?:it|emb|enc)\w*|w?pe|rel|relative|seg|segment\w*|types?|rows?|col|columns?|levels?"
    r"|query|queries|time|timesteps?)(?:$|[._])"
)
# Fused projections: queries, keys and values in one weight, and the two halves of a gated layer.
QKV_NAMES = ("qkv", "qkv_proj", "in_proj_weight", "c_attn", "Wqkv", "query_key_value")
GATE_UP_NAMES = ("gate_up", "gate_up_proj")

_LAYERS = (nn.Linear, _ConvNd)  # what may be a head
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

# The outputs of each matrix of a fused projection; () for one matrix. Parts that add up to a divisor of all outputs
# repeat: (2, 1) means two outputs of the first matrix and one of the second in turn.
Parts = tuple[int, ...]


def ends_like(name: str, patterns: Sequence[str]) -> bool:
    """Whether the last part of a dotted name matches one of the fnmatch patterns.

    >>> ends_like("model.enc_bbox_embed", ("*bbox_embed",)), ends_like("head.dense", ("head",))
    (True, False)
    """
    return any(fnmatch.fnmatchcase(name.rpartition(".")[2], pattern) for pattern in patterns)


def plain_modules(model: nn.Module) -> dict[int, str]:
    """Return the ids of heads and routers, with the reason why their parameters stay plain."""
    reasons = dict.fromkeys(map(id, _heads(model)), "output head")
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if _is_router(name, module, modules[name.rpartition(".")[0]]):
            reasons |= dict.fromkeys(map(id, module.modules()), "router of a mixture of experts")
    return reasons


def _is_router(name: str, module: nn.Module, parent: nn.Module) -> bool:
    """Whether a module chooses among experts.

    Its type's name, one of :data:`ROUTER_NAMES`, or the name "gate" beside experts identifies it. Without experts, a
    "gate" is a router if it is a linear layer with fewer outputs than inputs and no sibling has as many outputs. In a
    gated feed-forward layer, a sibling has the gate's number of outputs.
    """
    kind = type(module).__name__
    if "Router" in kind or "TopKGating" in kind or ends_like(name, ROUTER_NAMES):
        return True
    if not ends_like(name, GATE_NAMES):
        return False
    if any("expert" in child for child in (*parent._modules, *parent._parameters)):
        return True
    if not isinstance(module, nn.Linear) or module.out_features >= module.in_features:
        return False
    siblings = (child for child in parent.children() if isinstance(child, nn.Linear) and child is not module)
    return all(child.out_features != module.out_features for child in siblings)


def _heads(model: nn.Module) -> list[nn.Module]:
    """Return the output heads: those that the model returns, those with a usual name, and those over a vocabulary."""
    # All modules, not the model alone: a wrapper such as DistributedDataParallel may lack the method.
    speakers: list[Any] = [m for m in model.modules() if callable(getattr(m, "get_output_embeddings", None))]
    said = [speaker.get_output_embeddings() for speaker in speakers]
    heads = [part for head in said if isinstance(head, nn.Module) for part in head.modules()]  # adapters may wrap it
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _LAYERS)}
    last = next(reversed(layers), "")
    for name, module in model.named_modules():
        final = ends_like(name, LAST_NAMES) and not _is_numbered(name) and f"{last}.".startswith(f"{name}.")
        pooling = "Pooling" in type(module).__name__  # SigLIP's is called "head"
        if final or (ends_like(name, HEAD_NAMES) and not pooling):
            heads.extend(_last_layers(module))
    if _begins_with_embedding(model.get_submodule(last.rpartition(".")[0])):
        heads.append(layers[last])
    return [*heads, *_vocabulary_heads(model, {id(head) for head in heads}, bool(speakers))]


def _last_layers(head: nn.Module) -> Sequence[nn.Module]:
    """Return the heads in a module with a head's name: itself, its last layer, or all that PEFT wraps."""
    if hasattr(head, "base_layer") or hasattr(head, "modules_to_save"):
        return list(head.modules())
    if isinstance(head, nn.ModuleList):  # one head per layer of the decoder
        return [part for module in head for part in _last_layers(module)]
    last = [module for module in head.modules() if isinstance(module, _LAYERS)][-1:]
    # The last layer of a stack is not the head if it is as wide as its input, as in ModernBERT's "head".
    return [layer for layer in last if layer is head or not _is_square(layer)]


def _is_square(layer: Any) -> bool:
    if isinstance(layer, nn.Linear):
        return layer.in_features == layer.out_features
    return bool(layer.in_channels == layer.out_channels)


def _begins_with_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and isinstance(next(module.children(), None), _EMBEDDINGS)


def _vocabulary_heads(model: nn.Module, heads: set[int], speaks: bool) -> list[nn.Linear]:
    """Return the linear layers that map to a token vocabulary, except the `heads` already found.

    They are wider than their input, outside of numbered blocks, and no layer reads their output. A byte vocabulary may
    equal the model's width, so if this finds none and the model does not return its head, it is the last layer as wide
    as the vocabulary whose output no later layer reads.
    """
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    sizes = {getattr(getattr(module, "config", None), "vocab_size", None) for module in model.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and not _PLACES.search(".".join(name.split(".")[-2:])):
            sizes.add(module.num_embeddings)
    read = {m.in_features for m in linears.values()}
    wide = {name: m for name, m in linears.items() if m.out_features in sizes}
    found = [
        *(m for name, m in wide.items() if id(m) in heads),
        *(
            m
            for name, m in wide.items()
            if m.out_features not in read and m.out_features > m.in_features and not _is_numbered(name)
        ),
    ]
    rest = [name for name, m in wide.items() if id(m) not in heads]
    if not found and not speaks and rest:
        name, layer = rest[-1], wide[rest[-1]]
        later = list(linears.values())[list(linears).index(name) + 1 :]
        if all(m.in_features != layer.out_features or (id(m) in heads and not _is_numbered(name)) for m in later):
            found.append(layer)
    # MobileBERT splits its head: a layer beside the one over the vocabulary reads the vocabulary.
    parents = [model.get_submodule(name.rpartition(".")[0]) for name, m in wide.items() if m in found]
    siblings = [child for parent in parents if not isinstance(parent, nn.Sequential) for child in parent.children()]
    halves = [m for m in siblings if isinstance(m, nn.Linear) and m.in_features in sizes]
    return found + [m for m in halves if m.in_features > m.out_features]


def _is_numbered(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def fused_parts(model: nn.Module, name: str, outputs: int, inputs: int) -> Parts:
    """Return the parts of the weight with this qualified name in `model`, or () if it is one matrix.

    An attribute `sel_parts` of the module that owns the weight, or of one around it, maps names relative to that module
    to parts and comes first. Otherwise usual names tell.

    >>> block = nn.ModuleDict({"qkv": nn.Linear(8, 24), "gate_up_proj": nn.Linear(8, 12), "up": nn.Linear(8, 24)})
    >>> [fused_parts(block, f"{name}.weight", *layer.weight.shape) for name, layer in block.items()]
    [(8, 8, 8), (6, 6), ()]
    """
    owners = list(_owners(model, name))
    for module, local in owners:
        said = getattr(module, "sel_parts", None)
        if isinstance(said, Mapping) and local in said:
            return check_parts(f"sel_parts of {name}", said[local], outputs)
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf in GATE_UP_NAMES and outputs % 2 == 0:
        return (outputs // 2,) * 2 if getattr(owners[0][0], "is_concatenated", True) else (1, 1)
    if leaf not in QKV_NAMES:
        return ()
    configs = (getattr(module, "config", None) for module, _ in owners)
    config: Any = next((config for config in configs if hasattr(config, "num_attention_heads")), None)
    heads, groups = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", None)
    if groups and groups != heads and outputs % (heads + 2 * groups) == 0:
        size = outputs // (heads + 2 * groups)
        if size == (getattr(config, "head_dim", None) or config.hidden_size // heads):
            return heads * size, groups * size, groups * size
    if outputs == 2 * inputs:  # keys and values alone: GPT-2's attention to an encoder
        return (inputs,) * 2
    return (outputs // 3,) * 3 if outputs % 3 == 0 else ()


def _owners(model: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules around a parameter with its name relative to each, the innermost first."""
    parts = name.split(".")
    for i in reversed(range(len(parts))):
        yield model.get_submodule(".".join(parts[:i])), ".".join(parts[i:])


def check_parts(name: str, parts: Sequence[int], outputs: int) -> Parts:
    """Return the parts of a weight with this number of outputs, none for one matrix, or raise ValueError."""
    sizes = tuple(parts) if isinstance(parts, Sequence) else (0,)
    if any(not isinstance(size, int) or size < 1 for size in sizes) or (sizes and outputs % sum(sizes)):
        raise ValueError(f"{name} must be sizes that add up to its {outputs} outputs, or to a divisor, got {parts!r}")
    return sizes


def map_parts(rule: Callable[[Tensor], Tensor], matrices: Tensor, out_dim: int, parts: Parts) -> Tensor:
    """Return the matrices whose parts are what `rule` makes of each part, or of all if there are no parts.

    >>> matrix = torch.tensor([[1.0], [10.0], [20.0], [2.0], [30.0], [40.0]])
    >>> map_parts(lambda part: part / part.sum(), matrix, 0, (1, 2)).T
    tensor([[0.3333, 0.1000, 0.2000, 0.6667, 0.3000, 0.4000]])
    """
    if not parts:
        return rule(matrices)
    dim = matrices.dim() - 2 + out_dim
    before, after = matrices.shape[:dim], matrices.shape[dim + 1 :]
    blocks = torch.split(matrices.reshape(*before, -1, sum(parts), *after), list(parts), dim + 1)
    done = [rule(block.flatten(dim, dim + 1)).reshape(block.shape) for block in blocks]
    return torch.cat(done, dim + 1).reshape(matrices.shape)
