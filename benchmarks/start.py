"""How alike the hidden states of a transformer are before training, from AdamW's initial weights and the paper's start.

    python benchmarks/start.py --sizes 128x4 1024x1 1024x12

The paper's mismatched start makes negative weights weaker, so that the entries of a matrix have a positive mean, which
adds a large singular value along (1, ..., 1). The columns: the mean |cosine| between the states of two positions behind
the last norm, the share of their squares along (1, ..., 1), and the largest singular value over the second largest.
"""

import argparse

import torch
from torch import Tensor

import symexplin as sel
from symexplin.lab.config import ModelConfig
from symexplin.lab.model import Transformer

CONTEXT, VOCABULARY = 256, 4096


@torch.no_grad()
def alike(model: Transformer) -> tuple[float, float, float]:
    """Return the three columns for random tokens."""
    kept: list[Tensor] = []
    model.norm.register_forward_hook(lambda _module, _inputs, states: kept.append(states[0]))
    tokens = torch.randint(VOCABULARY, (1, CONTEXT), generator=torch.Generator().manual_seed(1))
    model(tokens)
    states = torch.nn.functional.normalize(kept[0], dim=-1)
    others = ~torch.eye(CONTEXT, dtype=torch.bool)
    largest = torch.linalg.svdvals(model.blocks[0].attention.v.weight)
    along = states.sum(-1).square().mean() / states.shape[-1]
    return float((states @ states.T)[others].abs().mean()), float(along), float(largest[0] / largest[1])


def main() -> None:
    """Print a line for each size and start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["128x4", "1024x1", "1024x4", "1024x12"], metavar="WIDTHxDEPTH")
    parser.add_argument("--embedding-std", type=float, default=0.02, help="the paper does not give it")
    options = parser.parse_args()
    print("size     start    |cosine|  along (1, ..., 1)  singular values")
    for size in options.sizes:
        width, depth = map(int, size.split("x"))
        config = ModelConfig(width, depth, width // 64, vocab_size=VOCABULARY, context=CONTEXT)
        for start in ("AdamW's", "paper's"):
            model = Transformer(config, torch.Generator().manual_seed(0))
            torch.nn.init.normal_(model.embedding.weight, std=options.embedding_std, generator=torch.manual_seed(0))
            if start == "paper's":
                sel.init_(model, sel.preset("paper", beta="auto"), xavier=False)
            cosine, along, ratio = alike(model)
            print(f"{size:8} {start:8} {cosine:8.3f} {along:18.3f} {ratio:16.2f}", flush=True)


if __name__ == "__main__":
    main()
