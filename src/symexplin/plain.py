"""The layers that stay plain: output heads, routers and step biases, by the model's methods and by usual names."""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

__all__ = ["GATE_NAMES", "HEAD_NAMES", "LAST_NAMES", "ROUTER_NAMES", "STEP_BIASES", "ends_like", "plain_modules"]

# Patterns of the last parts of a module's name. In a stack of layers the last one is the head.
HEAD_NAMES = (
    # over a vocabulary
    *("lm_head", "*_lm_head", "codec_head", "ctc_head", "ctc_proj", "unembed", "unembedding"),
    *("bpe_head", "char_head", "wp_head"),
    # over classes, pairs and values
    *("head", "output_head", "classification_head", "dense_prediction", "decoder.final_layer", "value_head"),
    *("classifier", "cls_classifier", "distillation_classifier", "classifier_distill", "sop_classifier"),
    *("class_labels_classifier", "qa_classifier", "dist_head", "mim_head", "mmm_image_head", "itm_head", "rank_output"),
    *("score", "cls", "seq_relationship", "logits_proj", "logit_fc"),
    # over the tokens of a span
    *("qa_outputs", "start_logits", "end_logits", "answer_class"),
    # over classes, boxes and objects of an image
    *("class_embed", "bbox_embed", "enc_*_embed", "encoder_output_*_embed", "class_predictor", "bbox_predictor"),
    *("class_head.*", "box_head", "bbox_head", "*_bbox_head", "enc_score_head", "objectness_head", "presence_head"),
    *("iou_prediction_head.proj_out", "pred_obj_score_head.proj_out", "video_grounding_head", "decoder_dict.*"),
    *("decoder_pred",),
)
# Heads only if no linear layer or convolution follows: XLNet's summary feeds a head, XLM's summary is one.
LAST_NAMES = ("fc", "summary")
ROUTER_NAMES = ("router", "*_router", "router_gate", "shared_expert_gate")
GATE_NAMES = ("gate", "gating")  # routers, or halves of gated feed-forward layers: see `_is_router`
# The softplus of this bias is a step size. The bias lies in the tail of the map, where a small step has a large effect.
STEP_BIASES = ("dt_proj.bias",)

# Embeddings of positions or segments, not of tokens. A layer of their size is not a head.
_PLACES = re.compile(
    r"(?:^|[._])(?:pos|pos(?:it|emb|enc)\w*|w?pe|rel|relative|seg|segment\w*|types?|rows?|col|columns?|levels?"
    r"|query|queries|time|timesteps?)(?:$|[._])"
)

_LAYERS = (nn.Linear, _ConvNd)  # what may be a head


def ends_like(name: str, patterns: Iterable[str]) -> bool:
    """Whether the last parts of a dotted name match one of the fnmatch patterns, part by part.

    >>> ends_like("model.enc_out_bbox_embed", ("enc_*_embed",))
    True
    >>> ends_like("model.class_head.dense0", ("class_head.*",)), ends_like("model.class_head", ("class_head.*",))
    (True, False)
    """
    path = name.split(".")
    for pattern in patterns:
        parts = pattern.split(".")
        tail = path[-len(parts) :]
        if len(tail) == len(parts) and all(map(fnmatch.fnmatchcase, tail, parts)):
            return True
    return False


def plain_modules(model: nn.Module) -> dict[int, str]:
    """Return the ids of heads and routers, with the reason why their parameters stay plain."""
    reasons = dict.fromkeys(_heads(model), "output head")
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
    beside = (child for child in parent.children() if isinstance(child, nn.Linear) and child is not module)
    return all(child.out_features != module.out_features for child in beside)


def _heads(model: nn.Module) -> set[int]:
    """Return the ids of output heads, by `get_output_embeddings`, by usual names and by the vocabulary's size."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name}
    # All modules, not the model alone: a wrapper such as DistributedDataParallel may lack the method.
    speakers: list[Any] = [m for m in model.modules() if callable(getattr(m, "get_output_embeddings", None))]
    said = [speaker.get_output_embeddings() for speaker in speakers]
    parts = [part for head in said if isinstance(head, nn.Module) for part in head.modules()]  # adapters may wrap it
    heads = {id(m) for m in (*parts, *_named_heads(model))}
    vocabularies = _vocabularies(model)
    heads |= {id(m) for m in _surely_wide(linears, vocabularies)}
    if not speakers:  # a model that returns no head has none
        heads |= {id(m) for m in _last_wide(linears, vocabularies, heads)}
    # MobileBERT splits its head: beside the layer that maps to the vocabulary, and not before it in a chain, is one
    # that maps from it.
    chains = {name for name, m in model.named_modules() if isinstance(m, nn.Sequential)}
    halves = {
        (name.rpartition(".")[0], m.out_features)
        for name, m in linears.items()
        if id(m) in heads and m.out_features in vocabularies and name.rpartition(".")[0] not in chains
    }
    for name, m in linears.items():
        if (name.rpartition(".")[0], m.in_features) in halves and m.in_features > m.out_features:
            heads.add(id(m))
    return heads


def _vocabularies(model: nn.Module) -> set[int]:
    """Return the sizes of token vocabularies: from configurations and from embeddings of tokens."""
    sizes = {getattr(getattr(module, "config", None), "vocab_size", None) for module in model.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and not _PLACES.search(".".join(name.split(".")[-2:])):
            sizes.add(module.num_embeddings)
    return {size for size in sizes if isinstance(size, int)}


def _named_heads(model: nn.Module) -> list[nn.Module]:
    """Return the modules with the name of a head."""
    last = next((name for name, m in reversed([*model.named_modules()]) if isinstance(m, _LAYERS)), "")
    found: list[nn.Module] = []
    for name, module in model.named_modules():
        pooling = "Pooling" in type(module).__name__  # SigLIP's is called "head"
        final = ends_like(name, LAST_NAMES) and not _numbered(name) and f"{last}.".startswith(f"{name}.")
        if final or (ends_like(name, HEAD_NAMES) and not pooling):
            found.extend(_last(module))
    return found


def _surely_wide(linears: dict[str, nn.Linear], vocabularies: set[int]) -> list[nn.Linear]:
    """Return layers as wide as a vocabulary, wider than their input, outside of blocks, whose output no layer reads."""
    read = {m.in_features for m in linears.values()}
    return [
        m
        for name, m in linears.items()
        if m.out_features in vocabularies - read and m.out_features > m.in_features and not _numbered(name)
    ]


def _last_wide(linears: dict[str, nn.Linear], vocabularies: set[int], heads: set[int]) -> list[nn.Linear]:
    """Return the last layer as wide as a vocabulary, if no head is that wide.

    A byte vocabulary may equal the model's width. So no later layer may read as many numbers. Beside other heads, the
    layer must be the last of the remaining ones and outside of blocks, because a text classifier has no head over the
    vocabulary.
    """
    rest = {name: m for name, m in linears.items() if id(m) not in heads}
    wide = [name for name, m in rest.items() if m.out_features in vocabularies]
    if not wide or any(id(m) in heads and m.out_features in vocabularies for m in linears.values()):
        return []
    name = wide[-1]
    width = rest[name].out_features
    if len(rest) == len(linears):  # no other head
        later = list(rest.values())[list(rest).index(name) + 1 :]
        return [] if any(m.in_features == width for m in later) else [rest[name]]
    read = {m.in_features for m in linears.values()}
    final = name == next(reversed(rest)) and not (_numbered(name) and width in read)
    return [rest[name]] if final else []


def _numbered(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _last(head: nn.Module) -> Sequence[nn.Module]:
    """Return the head inside a module with a head's name: itself, its last layer, or all that PEFT wraps."""
    if hasattr(head, "base_layer") or hasattr(head, "modules_to_save"):
        return list(head.modules())
    if isinstance(head, nn.ModuleList):  # one head per layer of the decoder
        return [part for module in head for part in _last(module)]
    last = [module for module in head.modules() if isinstance(module, _LAYERS)][-1:]
    # The last layer of a stack is not the head if it is as wide as its input, as in ModernBERT's "head".
    return [m for m in last if m is head or not _is_square(m)]


def _is_square(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Linear):
        return layer.in_features == layer.out_features
    return isinstance(layer, _ConvNd) and layer.in_channels == layer.out_channels
