"""How alike the hidden states of a model are before training, from its own initial weights and from the paper's.

    python benchmarks/start.py --sizes 128x4 1024x1 1024x12 --norms rms layer
    python benchmarks/start.py --sizes 1024x12 --norms rms layer --figure docs/images/start.svg

The paper's initialization makes negative weights weaker, so that the entries of a matrix have a positive mean, which
adds a large singular value along (1, ..., 1). A norm that subtracts the mean removes what that adds to the states. The
columns: the largest singular value over the second largest, and the mean |cosine| between the states of two positions
after each norm of the residual stream. For a model of your own, call :func:`cosines`.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import symexplin as sel
from symexplin.lab.config import ModelConfig
from symexplin.lab.model import Transformer

CONTEXT, VOCABULARY = 256, 4096


@torch.no_grad()
def cosines(model: nn.Module, *inputs: Any) -> dict[str, float]:
    """Return by name the mean |cosine| between the states of two positions after each norm of the model.

    Norms are modules with "norm" in the name of their class. Close to 1 after the last one, all positions look alike.

    Args:
        model: in its initial state; it is called once.
        inputs: its arguments, such as token ids of shape (batch, positions), with two positions or more.

    Raises:
        ValueError: no norm has states of shape (batch, positions, width), or there is one position.
    """
    alike: dict[str, float] = {}

    def hook(name: str) -> Any:
        def look(_module: nn.Module, _inputs: Any, states: Tensor) -> None:
            if states.ndim == 3 and states.shape[1] > 1:  # those of queries and keys have heads
                unit = nn.functional.normalize(states.float(), dim=-1)
                apart = ~torch.eye(unit.shape[1], dtype=torch.bool, device=unit.device)
                alike[name] = float((unit @ unit.mT)[:, apart].abs().mean())

        return look

    norms = [(name, module) for name, module in model.named_modules() if "norm" in type(module).__name__.lower()]
    handles = [module.register_forward_hook(hook(name)) for name, module in norms]
    try:
        model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not alike:
        raise ValueError(
            'model must have modules with "norm" in the name of their class whose states have the shape (batch, '
            "positions, width), with two positions or more, found none"
        )
    return alike


def residual(model: Transformer, tokens: Tensor) -> list[float]:
    """Return the cosines after the first norm of each block, and after the last norm."""
    return [
        value for name, value in cosines(model, tokens).items() if name.endswith("attention_norm") or name == "norm"
    ]


def main() -> None:
    """Print a line for each size, norm and start, and draw the cosines by block."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["128x4", "1024x1", "1024x4", "1024x12"], metavar="WIDTHxDEPTH")
    parser.add_argument("--norms", nargs="+", default=["rms"], choices=["rms", "layer"], help="the paper has RMSNorm")
    parser.add_argument("--embedding-std", type=float, default=0.02, help="the paper does not give it")
    parser.add_argument("--figure", type=Path, help="SVG file to write")
    options = parser.parse_args()
    tokens = torch.randint(VOCABULARY, (1, CONTEXT), generator=torch.Generator().manual_seed(1))
    lines: dict[str, list[float]] = {}
    print("size     norm   start    singular values  |cosine| after the norms")
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
                alike = lines[f"{start} initialization, {norm}"] = residual(model, tokens)
                cells = " ".join(f"{value:.3f}" for value in alike)
                print(f"{size:8} {norm:6} {start:8} {first / second:15.2f}  {cells}", flush=True)
    if options.figure:
        draw(lines, options.figure)


def draw(lines: dict[str, list[float]], path: Path) -> None:
    """Draw a line of cosines by block for each norm and start."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from symexplin.lab.report.charts import COLORS, STYLE, UNDATED

    names = {"rms": "RMSNorm", "layer": "norms that subtract the mean"}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.subplots()
        for name, values in lines.items():
            start, norm = name.split(", ")
            color = COLORS[5 if start.startswith("paper") else 0]  # as in other figures
            axes.plot(values, color=color, linestyle="-" if norm == "rms" else "--", label=f"{start}, {names[norm]}")
        axes.set(xlabel="layers passed", ylabel="mean |cosine| of two positions", ylim=(0, 1.02))
        axes.legend(loc="lower right")
        figure.savefig(path, format="svg", metadata=UNDATED)


if __name__ == "__main__":
    main()
