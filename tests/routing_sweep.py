"""Route every model class of transformers on the meta device, and print what changed since a saved sweep.

    python tests/routing_sweep.py --save old.json
    python tests/routing_sweep.py --against old.json

Every class is built from its default configuration, or from the first one below that it accepts. Recorded are the
parameters of linear layers, convolutions and experts, with "#" for numbers of blocks. A sweep takes several minutes.
"""

import argparse
import collections
import inspect
import json
import re
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

import symexplin as sel

# What some defaults leave to a checkpoint.
FILLED = {
    **{"vocab_size": 64, "prediction_length": 24, "is_decoder": True, "num_key_value_heads": 8, "num_images": 2},
    **{"head_dim": 64, "num_cross_attention_heads": 1},
}


def model_classes():
    import transformers

    transformers.logging.set_verbosity_error()
    for name in dir(transformers):
        try:
            kind = getattr(transformers, name)
        except ImportError as error:
            sys.stdout.write(f"{name}: {error}\n")
            continue
        is_model = inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel) and kind.config_class
        if is_model and not name.lower().endswith("pretrainedmodel"):
            yield name, kind


def settings_to_try():
    from transformers import ResNetConfig

    # A backbone that needs no timm.
    backbone = ResNetConfig(out_features=["stage2", "stage3", "stage4"])
    yield {}
    for key, value in FILLED.items():
        yield {key: value}
    yield {"use_timm_backbone": False, "backbone": None, "backbone_config": backbone}


def build(kind):
    """Return a model of that class on the meta device, or raise the first error."""
    errors = []
    for settings in settings_to_try():
        try:
            with torch.device("meta"):
                return kind(kind.config_class(**settings))
        except Exception as error:  # any, from 1,700 constructors
            errors.append(error)
    raise errors[0]


def decisions(model):
    """Return what is decided about the parameters of linear layers, convolutions and experts, by name."""
    layers = set()
    for module in model.modules():
        kind = type(module).__name__
        if isinstance(module, nn.Linear | nn.MultiheadAttention | _ConvNd) or kind == "Conv1D" or "Experts" in kind:
            layers |= {id(parameter) for parameter in module.parameters(recurse=False)}
    found = collections.defaultdict(set)
    for route in sel.routing(model):
        if id(route.parameter) in layers:
            name = re.sub(r"(?<![^.])\d+(?![^.])", "#", route.name)
            found[name].add(f"{'curved' if route.curved else 'plain'} ({route.reason}) {route.axes}".strip())
    return {name: " and ".join(sorted(kinds)) for name, kinds in found.items()}


def changes(old, new):
    """Return the classes of every change, by the end of the name, the old and the new decision."""
    found = collections.defaultdict(list)
    for kind in sorted(old.keys() & new.keys()):
        for name, now in new[kind].items():
            before = old[kind].get(name, "absent")
            if before != now:
                found[".".join(name.split(".")[-4:]), before, now].append(kind)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a saved sweep")
    parser.add_argument("--save", type=Path, help="where to save this sweep")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    routed, found = {}, dict(model_classes())
    for name, kind in found.items():
        try:
            model = build(kind)
        except Exception as error:
            sys.stdout.write(f"not built: {name}: {' '.join(str(error).split())[:90]}\n")
        else:
            routed[name] = decisions(model)
    sys.stdout.write(f"built and routed {len(routed)} classes of {len(found)}\n")
    if options.save:
        options.save.write_text(json.dumps(routed, indent=1))
    if options.against:
        for (name, before, now), kinds in changes(json.loads(options.against.read_text()), routed).items():
            sys.stdout.write(f"{before} -> {now}: {name} in {len(kinds)}: {', '.join(kinds[:6])}\n")


if __name__ == "__main__":
    main()
