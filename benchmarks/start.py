"""How alike the hidden states of a transformer are before training, from AdamW's initial weights and the paper's start.

    python benchmarks/start.py --sizes 128x4 1024x1 1024x12 --norms rms layer

The paper's mismatched start makes negative weights weaker, so that the entries of a matrix have a positive mean, which
adds a large singular value along (1, ..., 1). A norm that subtracts the mean removes what that adds to the states. The
columns: the largest singular value over the second largest, the share of the squares of the states along (1, ..., 1)
behind the last norm, and the mean |cosine| between the states of two positions behind the first norm of each block and
the last one.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import symexplin as sel
from symexplin.lab.config import ModelConfig
from symexplin.lab.model import Transformer

CONTEXT, VOCABULARY = 256, 4096


@torch.no_grad()
def states_behind(norms: Sequence[nn.Module], model: nn.Module, tokens: Tensor) -> list[Tensor]:
    """Return the normalized states (positions, width) behind each norm for one sequence."""
    kept: list[Tensor] = []
    for norm in norms:
        norm.register_forward_hook(lambda _module, _inputs, states: kept.append(states[0]))
    model(tokens)
    return [nn.functional.normalize(states, dim=-1) for states in kept]


def cosine(states: Tensor) -> float:
    """Return the mean |cosine| between two positions of normalized states."""
    others = ~torch.eye(len(states), dtype=torch.bool)
    return float((states @ states.T)[others].abs().mean())


def main() -> None:
    """Print a line for each size, norm and start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["128x4", "1024x1", "1024x4", "1024x12"], metavar="WIDTHxDEPTH")
    parser.add_argument("--norms", nargs="+", default=["rms"], choices=["rms", "layer"], help="the paper has RMSNorm")
    parser.add_argument("--embedding-std", type=float, default=0.02, help="the paper does not give it")
    options = parser.parse_args()
    tokens = torch.randint(VOCABULARY, (1, CONTEXT), generator=torch.Generator().manual_seed(1))
    print("size     norm   start    singular values  along (1, ..., 1)  |cosine| behind the norms")
    for size in options.sizes:
        width, depth = map(int, size.split("x"))
        for norm in options.norms:
            shape = {"vocab_size": VOCABULARY, "context": CONTEXT, "norm": norm, "embedding_std": options.embedding_std}
            config = ModelConfig(width, depth, width // 64, **shape)
            for start in ("AdamW's", "paper's"):
                model = Transformer(config, torch.Generator().manual_seed(0))
                if start == "paper's":
                    sel.init_(model, sel.preset("paper"), xavier=False)
                first, second, *_ = torch.linalg.svdvals(model.blocks[0].attention.v.weight.detach()).tolist()
                states = states_behind([*(block.attention_norm for block in model.blocks), model.norm], model, tokens)
                along = float(states[-1].sum(-1).square().mean() / width)
                cosines = " ".join(f"{cosine(each):.3f}" for each in states)
                print(f"{size:8} {norm:6} {start:8} {first / second:15.2f} {along:18.3f}  {cosines}", flush=True)


if __name__ == "__main__":
    main()
