"""What names and methods of modules say: output heads, routers and step biases."""

import fnmatch
import re
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

__all__ = ["HEAD_NAMES", "ROUTER_NAMES", "plain_parameters"]

# Patterns of the names of heads. In a stack of layers, the last one is the head.
HEAD_NAMES = (
    *("head", "*_head", "classifier", "*_classifier", "classifier_*", "score", "cls", "logit*", "*_logits"),
    *("unembed", "unembedding", "ctc_proj", "seq_relationship", "*_prediction", "rank_output"),
    *("qa_outputs", "answer_class", "*class_embed", "*bbox_embed", "class_predictor", "bbox_predictor", "decoder_pred"),
)
# Heads only outside of numbered blocks and if no linear layer or convolution follows.
LAST_NAMES = ("fc", "fc_out", "final_layer", "output", "summary")
# Layers inside of a model, in DistilBERT, MambaOut, Funnel, detectors and MobileNet.
INNER_NAMES = ("pre_classifier", "pre_logits", "[qkv]_head", "*pos*_head", "ref_*_head", "conv_head")
ROUTER_NAMES = ("router", "*_router", "router_gate", "shared_expert_gate")
GATE_NAMES = ("gate", "gating")  # routers, or halves of gated feed-forward layers: see `_is_router`
# The softplus of this bias is a step size. The bias lies in the tail of the map, where a small step has a large effect.
STEP_BIASES = (".dt_proj.bias",)
# Embeddings of positions or segments, not of tokens: a layer of their size is not a head.
_PLACES = re.compile(
    r"(?:^|[._])(?:pos|pos(?:it|emb|enc)\w*|w?pe|rel|relative|seg|segment\w*|types?|rows?|col|columns?|levels?"
    r"|query|queries|time|timesteps?)(?:$|[._])"
)

_LAYERS = (nn.Linear, _ConvNd)  # what may be a head
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def plain_parameters(model: nn.Module) -> dict[int, str]:
    """Return the ids of the parameters of embeddings, heads and routers, and of step biases, with the reason."""
    modules = dict(model.named_modules())
    reasons = {id(p): "output head" for head in _heads(model) for p in head.parameters(recurse=False)}
    for name, module in modules.items():
        if _is_router(name, module, modules[name.rpartition(".")[0]]):
            reasons |= {id(p): "router of a mixture of experts" for p in module.parameters()}
    steps = (parameter for name, parameter in model.named_parameters() if f".{name}".endswith(STEP_BIASES))
    reasons |= {id(parameter): "state-space step bias" for parameter in steps}
    embeddings = [module for module in modules.values() if isinstance(module, _EMBEDDINGS)]
    others = {id(p) for m in modules.values() if m not in embeddings for p in m.parameters(recurse=False)}
    ids = {id(p) for module in embeddings for p in module.parameters()}
    return reasons | {key: "tied to an embedding" if key in others else "embedding" for key in ids}


def _is_router(name: str, module: nn.Module, parent: nn.Module) -> bool:
    """Whether a module chooses among experts, by the name of its type, its own name, or a "gate" beside experts.

    Without experts, a "gate" is a router if it is a linear layer with fewer outputs than inputs and no sibling has as
    many outputs. In a gated feed-forward layer, a sibling has the gate's number of outputs.
    """
    kind = type(module).__name__
    if "Router" in kind or "TopKGating" in kind or _ends_like(name, ROUTER_NAMES):
        return True
    if not _ends_like(name, GATE_NAMES):
        return False
    if any("expert" in child for child in (*parent._modules, *parent._parameters)):
        return True
    siblings = {child.out_features for child in parent.children() if isinstance(child, nn.Linear) and child != module}
    narrow = isinstance(module, nn.Linear) and module.out_features < module.in_features
    return narrow and module.out_features not in siblings


def _heads(model: nn.Module) -> list[nn.Module]:
    """Return the output heads: those that the model returns, those with a usual name, and those over a vocabulary."""
    # All modules, not the model alone: a wrapper such as DistributedDataParallel may lack the method.
    owners: list[Any] = [m for m in model.modules() if callable(getattr(m, "get_output_embeddings", None))]
    returned = [owner.get_output_embeddings() for owner in owners]
    # An adapter may wrap the head.
    heads = [part for head in returned if isinstance(head, nn.Module) for part in head.modules()]
    modules = dict(model.named_modules())  # not get_submodule, which a module called "half" would defeat
    last = next((name for name, module in reversed(modules.items()) if isinstance(module, _LAYERS)), "")
    for name, module in modules.items():
        final = f"{last}.".startswith(f"{name}.") and not _is_numbered(name)
        usual = _ends_like(name, HEAD_NAMES) and not _ends_like(name, INNER_NAMES)
        if usual or (final and _ends_like(name, LAST_NAMES)):
            heads.extend(_last_layers(module))
    chain = modules[last.rpartition(".")[0]]
    if isinstance(chain, nn.Sequential) and isinstance(next(chain.children(), None), _EMBEDDINGS):
        heads.append(modules[last])
    return [*heads, *_vocabulary_heads(model, {id(head) for head in heads}, bool(owners))]


def _last_layers(head: nn.Module) -> Sequence[nn.Module]:
    """Return the heads in a module with a head's name: itself, its last layer, or all that PEFT wraps."""
    if hasattr(head, "base_layer") or hasattr(head, "modules_to_save"):
        return list(head.modules())
    if isinstance(head, nn.ModuleList):  # one head per layer of the decoder
        return [part for module in head for part in _last_layers(module)]
    layers: list[Any] = [module for module in head.modules() if isinstance(module, _LAYERS)]
    # The head is the last layer whose output none of them reads: a square one reads its own (ModernBERT's "head").
    read = {getattr(layer, "in_features", None) or layer.in_channels for layer in layers}
    last = [layer for layer in layers if (getattr(layer, "out_features", None) or layer.out_channels) not in read]
    return [head] if head in layers else last[-1:]


def _vocabulary_heads(model: nn.Module, heads: set[int], speaks: bool) -> list[nn.Linear]:
    """Return the linear layers that map to a token vocabulary.

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
    clear = {n for n, m in wide.items() if m.in_features < m.out_features not in read and not _is_numbered(n)}
    to_vocabulary = {n: m for n, m in wide.items() if n in clear or id(m) in heads}
    if wide and not to_vocabulary and not speaks:
        name, layer = wide.popitem()
        later = list(linears.values())[list(linears).index(name) + 1 :]
        if all(m.in_features != layer.out_features or (id(m) in heads and not _is_numbered(name)) for m in later):
            to_vocabulary[name] = layer
    # MobileBERT splits its head: beside the layer that maps to the vocabulary is one that maps from it.
    beside = {(name.rpartition(".")[0], m.out_features) for name, m in to_vocabulary.items() if not _is_numbered(name)}
    halves = [m for name, m in linears.items() if (name.rpartition(".")[0], m.in_features) in beside]
    return [*to_vocabulary.values(), *(m for m in halves if m.in_features > m.out_features)]


def _ends_like(name: str, patterns: Sequence[str]) -> bool:
    """Whether the last part of a dotted name matches one of the fnmatch patterns."""
    return any(fnmatch.fnmatchcase(name.rpartition(".")[2], pattern) for pattern in patterns)


def _is_numbered(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))
